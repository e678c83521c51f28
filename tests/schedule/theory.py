"""Formulas from the papers, to compare simulations and measurements with.

No program is built or read here, so that the comparison is independent. The formulas are exact for stages of
equal times F + B with free messages, also for short windows, in which the pipeline never fills; where a
backward is split, for F = I = W. S ranks, m microbatches a batch, n batches a window:

- gpipe: Huang et al. 2019, section 2.3: bubble O((K-1)/(M+K-1))
- 1f1b: PipeDream-Flush, Narayanan et al. 2021 (Memory-Efficient Pipeline-Parallel DNN Training), section 3.2
- interleaved_1f1b: Narayanan et al. 2021 (Efficient Large-Scale Language Model Training on GPU Clusters),
  section 2.2: bubble (p-1)/(v m) over the ideal time
- pipedream: Narayanan et al. 2019, section 3.3: w(t+1) = w(t) - v grad f(w1(t-n+1), w2(t-n+2), ..., wn(t))
- pipedream_2bw: Narayanan et al. 2021 (as 1f1b), section 3.1: w(t+1) = w(t) - v grad f(w(t-1))
- ssp: OneFlow 2020, whose test of a buffer of 4 reads versions 0, 0, 0, 0, 1, 2, 3
- zb_h1, zb_h2: Qi et al. 2024 (arXiv 2401.10241), table 2: memory p and 2p-1, bubble (p-1)(F+B-W) and
  (p-1)(F+B-2W); zbv: section 6: memory p, no bubble between batches
- v_half, v_min: Qi et al. 2024 (arXiv 2405.15362): memory floor((p+2)/2) and floor((p+4)/3), bubble about
  p/(2m) and 2p/(3m); v_async: v_min with pipedream's stashing in the place of flushes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Theory:
    """The formulas' results for a window. Lists are by stage; None where no formula is known."""

    activations: list[int]  # peak of microbatches held between their forward and backward
    versions: list[int]  # peak of weight versions held
    staleness: list[int]  # the maximum, in updates
    bubble: float | None


def theory(name: str, ranks: int, batches: int, microbatches: int, virtual: int = 1) -> Theory | None:
    """Return a schedule's results by its YAML name, None if unknown; `batches` is the window's length."""
    if name == "interleaved_1f1b" and virtual > 1:
        return _interleaved(ranks, microbatches, virtual)
    known = _KNOWN.get("1f1b" if name == "interleaved_1f1b" else name)
    return known(ranks, batches, microbatches) if known else None


def _interleaved(ranks: int, microbatches: int, virtual: int) -> Theory:
    """Megatron's order. The bubble is known if the microbatches form whole groups of `ranks`."""
    if ranks == 1:  # each microbatch goes through all stages and back before the next
        return _flushing([1] * virtual, 0.0)
    peaks = [_interleaved_peak(stage, ranks, microbatches, virtual) for stage in range(ranks * virtual)]
    return _flushing(peaks, None if microbatches % ranks else _fill_and_drain(ranks, virtual * microbatches))


def _interleaved_peak(stage: int, ranks: int, microbatches: int, virtual: int) -> int:
    """Return a stage's peak: its share of its rank's first w + i forwards less the first i - 1 backwards.

    A rank runs w = 2 (S - 1 - r) + (v - 1) S forwards, then one forward and one backward in turn.
    Microbatches go through its virtual stages in groups of S, the last one filled up with microbatches that
    do not exist, so the place of the n-th forward is known.
    """
    position, rank = divmod(stage, ranks)
    total = -(-microbatches // ranks) * ranks * virtual
    ahead = min(2 * (ranks - 1 - rank) + (virtual - 1) * ranks, total)

    def among_first(count: int, position: int) -> int:
        groups, rest = divmod(count, ranks * virtual)
        return min(groups * ranks + min(max(rest - position * ranks, 0), ranks), microbatches)

    return max(
        among_first(min(ahead + pair, total), position)
        - among_first(max(pair - 1, 0), virtual - 1 - position)
        for pair in range(total - ahead + 1)
    )


def _pipedream_2bw(ranks: int, batches: int, microbatches: int) -> Theory:
    delay, total = min(1, batches - 1), batches * microbatches
    return Theory(_as_1f1b(ranks, total), [1 + delay] * ranks, [delay] * ranks, _fill_and_drain(ranks, total))


def _ssp(ranks: int, batches: int, microbatches: int) -> Theory:
    """Versions and delays as pipedream's with a microbatch a batch, whatever their number; order as its."""
    total = batches * microbatches
    ring = _stashing(range(ranks)[::-1], batches, 1, _fill_and_drain(ranks, total))
    return replace(ring, activations=_as_1f1b(ranks, total))


def _v_async(ranks: int, batches: int, microbatches: int) -> Theory | None:
    """V-Min's offsets: a microbatch is at stage s of 2S for 2 (2S - 1 - s) + 2 slots and more, six a period.

    Where S is a multiple of 3 the way there and the way back collide on a rank, and some works wait.
    """
    if ranks % 3 == 0:
        return None
    depths = [(behind + ranks % 3) // 3 for behind in range(2 * ranks - 1, -1, -1)]
    idle = max(0, 4 * ranks - 5)
    return _stashing(depths, batches, microbatches, idle / (6 * batches * microbatches + idle))


def _stashing(depths: Sequence[int], batches: int, microbatches: int, bubble: float) -> Theory:
    """Forward k of a stage follows k - d backwards, d its depth: it reads version max(0, k - d) // m.

    In a window of n microbatches the last version that anything reads is thus (n - 1 - d) // m.
    """
    total = batches * microbatches
    late = [min(-(-d // microbatches), batches - 1) for d in depths]
    last_read = [max(0, total - 1 - d) // microbatches for d in depths]
    versions = [1 + min(most, last + 1) for most, last in zip(late, last_read, strict=True)]
    return Theory([min(d + 1, total) for d in depths], versions, late, bubble)


# Split backwards: `idle` slots in which each rank waits, beside a work of one F, I and W a microbatch.


def _zb_h2(ranks: int, batches: int, microbatches: int) -> Theory:
    """With 2S-1 microbatches or more a batch drains while the next one fills the pipeline."""
    idle = max(ranks - 1, 2 * (ranks - 1) - microbatches // 2)
    idle += (batches - 1) * max(0, 2 * ranks - 1 - microbatches)
    return _zero_bubble([min(2 * ranks - 1, microbatches)] * ranks, idle, batches * microbatches)


# Of the V placements a stage is half of what a stage of 1f1b is: `work` and idle slots are of half the size.


def _zbv(ranks: int, batches: int, microbatches: int) -> Theory:
    peaks = [min(2 * ranks - stage, microbatches) for stage in range(2 * ranks)]
    alone = 2 * (2 * ranks - 1 - microbatches)  # one microbatch's way there and back, less what others fill
    idle = max(ranks - 1, alone) + (batches - 1) * max(0, alone)
    return _zero_bubble(peaks, idle, 2 * batches * microbatches)


def _v_half(ranks: int, batches: int, microbatches: int) -> Theory | None:
    if ranks == 1:
        return None
    odd, stages = ranks % 2, range(2 * ranks)
    peaks = [min(ranks + 1 - (s + odd) // 2, 2 * ranks - s, microbatches) for s in stages]
    idle = 2 * batches + 1 if ranks == 2 else batches * (3 * (ranks - 1) - odd)
    return _zero_bubble(peaks, idle if microbatches > ranks // 2 else None, 2 * batches * microbatches)


def _v_min(ranks: int, batches: int, microbatches: int) -> Theory | None:
    once_full = [(2 * ranks + 4 - (ranks % 3 == 1) - stage) // 3 for stage in range(2 * ranks)]
    if ranks == 1 or microbatches < once_full[0]:
        return None
    gap = 2 if ranks % 3 == 0 and ranks > 3 else 0
    return _zero_bubble(once_full, batches * (4 * ranks - 5 + gap), 2 * batches * microbatches)


def _zero_bubble(activations: list[int], idle: int | None, work: int) -> Theory:
    return _flushing(activations, None if idle is None else idle / (3 * work + idle))


def _flushing(activations: list[int], bubble: float | None) -> Theory:
    stages = len(activations)
    return Theory(activations, [1] * stages, [0] * stages, bubble)


def _as_1f1b(ranks: int, microbatches: int) -> list[int]:
    return [min(ranks - stage, microbatches) for stage in range(ranks)]


def _fill_and_drain(ranks: int, work: int) -> float:
    """Return the bubble of a pipeline that fills and drains once around `work` units per rank."""
    return (ranks - 1) / (work + ranks - 1)


_KNOWN: dict[str, Callable[[int, int, int], Theory | None]] = {
    "layer_dist": lambda ranks, n, m: _flushing([1] * ranks, (ranks - 1) / ranks),  # one rank at a time
    "gpipe": lambda ranks, n, m: _flushing([m] * ranks, _fill_and_drain(ranks, m)),
    "1f1b": lambda ranks, n, m: _flushing(_as_1f1b(ranks, m), _fill_and_drain(ranks, m)),
    "zb_h1": lambda ranks, n, m: _zero_bubble(
        [min(ranks, m)] * ranks, n * (ranks - 1 + max(0, ranks - m)), n * m
    ),
    "zb_h2": _zb_h2,
    "zbv": _zbv,
    "v_half": _v_half,
    "v_min": _v_min,
    "pipedream": lambda ranks, n, m: _stashing(range(ranks)[::-1], n, m, _fill_and_drain(ranks, n * m)),
    "pipedream_2bw": _pipedream_2bw,
    "ssp": _ssp,
    "v_async": _v_async,
}
