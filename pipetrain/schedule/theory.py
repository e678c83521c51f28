"""Formulas from the papers, to compare simulations and measurements with.

No program is built or read here, so that the comparison is independent. The formulas are exact for stages of
equal times F + B with free messages, also for short windows, in which the pipeline never fills; where a
backward is split, for F = I = W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Theory:
    """The formulas' results for a window. Lists are by stage; None where no formula is known."""

    activations: list[int]  # peak of microbatches held between their forward and backward
    versions: list[int]  # peak of weight versions held
    staleness: list[int]  # the maximum, in updates
    bubble: float | None
    source: str
    exact: bool = True  # False: no stage holds more activations, and some hold one less
    held: float | None = None  # the greatest peak of a rank, in microbatches of 1/S of the model on S ranks


def theory(name: str, ranks: int, batches: int, microbatches: int, virtual: int = 1) -> Theory | None:
    """Return a schedule's results by its YAML name, None if unknown; `batches` is the window's length."""
    if name == "interleaved_1f1b" and ranks > 1 and virtual > 1:
        return _interleaved(ranks, microbatches, virtual)
    if name == "interleaved_1f1b":
        if virtual > 1:  # each microbatch goes through all stages and back before the next
            return _flushing([1] * virtual, 0.0, "one rank alone has no bubble")
        name = "1f1b"
    known = _KNOWN.get(name)
    return known(ranks, batches, microbatches) if known else None


def _layer_dist(ranks: int, batches: int, microbatches: int) -> Theory:
    return _flushing([1] * ranks, (ranks - 1) / ranks, "by definition: one rank of S computes at a time")


def _gpipe(ranks: int, batches: int, microbatches: int) -> Theory:
    return _flushing(
        [microbatches] * ranks,
        _fill_and_drain(ranks, microbatches),
        "GPipe, Huang et al. 2019, section 2.3: bubble O((K-1)/(M+K-1))",
    )


def _one_f_one_b(ranks: int, batches: int, microbatches: int) -> Theory:
    return _flushing(
        [min(ranks - stage, microbatches) for stage in range(ranks)],
        _fill_and_drain(ranks, microbatches),
        "PipeDream-Flush, Narayanan et al. 2021 (Memory-Efficient Pipeline-Parallel DNN Training), "
        "section 3.2",
    )


def _interleaved(ranks: int, microbatches: int, virtual: int) -> Theory:
    """Megatron's order. The bubble is known if the microbatches form whole groups of `ranks`."""
    whole = microbatches % ranks == 0
    return _flushing(
        [_interleaved_peak(stage, ranks, microbatches, virtual) for stage in range(ranks * virtual)],
        _fill_and_drain(ranks, virtual * microbatches) if whole else None,
        "Narayanan et al. 2021 (Efficient Large-Scale Language Model Training on GPU Clusters), section 2.2: "
        "bubble (p-1)/(v m) over the ideal time",
    )


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


def _pipedream(ranks: int, batches: int, microbatches: int) -> Theory:
    return _stashing(
        [ranks - 1 - stage for stage in range(ranks)],
        batches,
        microbatches,
        _fill_and_drain(ranks, batches * microbatches),
        "PipeDream, Narayanan et al. 2019, section 3.3: weight stashing, "
        "w(t+1) = w(t) - v grad f(w1(t-n+1), w2(t-n+2), ..., wn(t))",
    )


def _v_async(ranks: int, batches: int, microbatches: int) -> Theory | None:
    """V-Min's offsets: a microbatch is at stage s of 2S for 2 (2S - 1 - s) + 2 slots and more, six a period.

    Where S is a multiple of 3 the way there and the way back collide on a rank, and some works wait: then the
    depths are known for S = 3 alone.
    """
    behind = [2 * ranks - 1 - stage for stage in range(2 * ranks)]
    if ranks % 3 == 0 and ranks > 3:
        return None
    depths = [k // 2 if ranks == 3 else (k + ranks % 3) // 3 for k in behind]
    total = batches * microbatches
    idle = (0 if ranks == 1 else 4 * ranks - 5) - (ranks == 3 and total > 1)
    known = _stashing(
        depths,
        batches,
        microbatches,
        idle / (6 * total + idle),
        "V-Min, Qi et al. 2024 (arXiv 2405.15362), with PipeDream's weight stashing in the place of flushes",
    )
    return replace(known, held=min((ranks + 4) // 3, total))


def _stashing(depths: list[int], batches: int, microbatches: int, bubble: float, source: str) -> Theory:
    """Forward k of a stage follows k - d backwards, d its depth: it reads version max(0, k - d) // m.

    In a window of n microbatches the last version that anything reads is thus (n - 1 - d) // m.
    """
    total = batches * microbatches
    late = [min(-(-d // microbatches), batches - 1) for d in depths]
    last_read = [max(0, total - 1 - d) // microbatches for d in depths]
    return Theory(
        activations=[min(d + 1, total) for d in depths],
        versions=[1 + min(most, last + 1) for most, last in zip(late, last_read, strict=True)],
        staleness=late,
        bubble=bubble,
        source=source,
    )


def _pipedream_2bw(ranks: int, batches: int, microbatches: int) -> Theory:
    delay = min(1, batches - 1)
    return Theory(
        activations=[min(ranks - stage, batches * microbatches) for stage in range(ranks)],
        versions=[1 + delay] * ranks,
        staleness=[delay] * ranks,
        bubble=_fill_and_drain(ranks, batches * microbatches),
        source="PipeDream-2BW, Narayanan et al. 2021, section 3.1: w(t+1) = w(t) - v grad f(w(t-1))",
    )


def _zb_h1(ranks: int, batches: int, microbatches: int) -> Theory:
    drain = max(0, ranks - microbatches)
    return _zero_bubble(
        [min(ranks, microbatches)] * ranks,
        batches * (ranks - 1 + drain),
        batches * microbatches,
        min(ranks, microbatches),
        "ZB-H1, Qi et al. 2024 (arXiv 2401.10241), table 2: memory p, bubble (p-1)(F+B-W), B = I, for m >= p",
    )


def _zb_h2(ranks: int, batches: int, microbatches: int) -> Theory:
    """With 2S-1 microbatches or more a batch drains while the next one fills the pipeline."""
    held = min(2 * ranks - 1, microbatches)
    first = max(ranks - 1, 2 * (ranks - 1) - microbatches // 2)
    return _zero_bubble(
        [held] * ranks,
        first + (batches - 1) * max(0, 2 * ranks - 1 - microbatches),
        batches * microbatches,
        held,
        "ZB-H2, Qi et al. 2024 (arXiv 2401.10241), table 2: memory 2p-1, bubble (p-1)(F+B-2W)",
    )


# Of the V placements a stage is half of what a stage of 1f1b is: `work` and idle slots are of half the size.


def _zbv(ranks: int, batches: int, microbatches: int) -> Theory:
    alone = 2 * (2 * ranks - 1 - microbatches)  # one microbatch's way there and back, less what others fill
    return _zero_bubble(
        [min(2 * ranks - stage, microbatches) for stage in range(2 * ranks)],
        max(ranks - 1, alone) + (batches - 1) * max(0, alone),
        2 * batches * microbatches,
        min(ranks, microbatches),
        "ZB-V, Qi et al. 2024 (arXiv 2401.10241), section 6: memory p, no bubble between batches",
    )


def _v_half(ranks: int, batches: int, microbatches: int) -> Theory:
    if ranks == 1:
        return _one_rank()
    odd = ranks % 2
    late = microbatches - 1 if odd else max(0, microbatches - 2)
    alone = max(3 * (ranks - 1) - odd, 4 * ranks - 5 - 2 * late)
    between = 2 if ranks == 2 and microbatches > 1 else alone
    return _zero_bubble(
        [min(ranks + 1 - (stage + odd) // 2, 2 * ranks - stage, microbatches) for stage in range(2 * ranks)],
        alone + (batches - 1) * between,
        2 * batches * microbatches,
        min(ranks // 2 + 1, microbatches),
        "V-Half, Qi et al. 2024 (arXiv 2405.15362): memory floor((p+2)/2), bubble about p/(2m)",
    )


def _v_min(ranks: int, batches: int, microbatches: int) -> Theory:
    if ranks == 1:
        return _one_rank()
    gap = 2 if ranks % 3 == 0 and ranks > 3 and microbatches > 1 else 0
    once_full = [(2 * ranks + 4 - (ranks % 3 == 1) - stage) // 3 for stage in range(2 * ranks)]
    full = _zero_bubble(
        [min(held, microbatches) for held in once_full],
        batches * (4 * ranks - 5 + gap),
        2 * batches * microbatches,
        min((ranks + 4) // 3, microbatches),
        "V-Min, Qi et al. 2024 (arXiv 2405.15362): memory floor((p+4)/3), bubble about 2p/(3m)",
    )
    return replace(full, exact=microbatches >= once_full[0])


def _one_rank() -> Theory:
    return _zero_bubble([1, 1], 0, 1, 1, "one rank alone has no bubble")


def _zero_bubble(activations: list[int], idle: int, work: int, held: float, source: str) -> Theory:
    """`idle`: the slots in which each rank waits, beside `work` forwards and twice as many I and W."""
    return replace(_flushing(activations, idle / (3 * work + idle), source), held=held)


def _flushing(activations: list[int], bubble: float | None, source: str) -> Theory:
    stages = len(activations)
    return Theory(activations, [1] * stages, [0] * stages, bubble, source)


def _fill_and_drain(ranks: int, work: int) -> float:
    """Return the bubble of a pipeline that fills and drains once around `work` units per rank."""
    return (ranks - 1) / (work + ranks - 1)


_KNOWN: dict[str, Callable[[int, int, int], Theory | None]] = {
    "layer_dist": _layer_dist,
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "zb_h1": _zb_h1,
    "zb_h2": _zb_h2,
    "zbv": _zbv,
    "v_half": _v_half,
    "v_min": _v_min,
    "pipedream": _pipedream,
    "pipedream_2bw": _pipedream_2bw,
    "v_async": _v_async,
}
