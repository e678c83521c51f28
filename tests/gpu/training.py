"""Training on the GPU against the reference on the CPU in float64, schedule by schedule and option by option.

Also what has no such reference: bf16, codecs that lose something, CUDA graphs, a trace, a loss of NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmark.worlds import Say, fitted
from pipetrain.errors import TrainingStopped
from pipetrain.runtime.comm import gradient_buckets as buckets
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import Program
from tests.gpu.rows import SKIPPED, Row, Setting, judged
from tests.gpu.speed import no_compiler
from tests.support.cases import Case, Listener, expected, make_run, rank_run, state_of
from tests.support.process_ranks import gathered
from tests.support.thread_ranks import run_in_threads

TOLERANCE = 1e-9  # of weights and losses in float64
NEAR = 0.05  # of a loss, relative, where something is rounded
COMPILE_S = 90.0  # that a rank may wait for another that compiles
GRAPHS_S = 20.0  # that a training may take
MODELS = "model._target_=tests.support.models."
COMMON = ("partition=even", "epochs=2")
FLOAT32 = ("dtype=float32", "microbatches=4", *COMMON)
TIED, SKIPS = f"{MODELS}tied", f"{MODELS}skipping"
CLIPPED = ("clip_grad_norm=0.25", "clip_grad_norm_over=model")
FOUR = ("1f1b", "interleaved_1f1b", "zb_h1", "zbv", "v_async", "pipedream", "pipedream_2bw", "fbp")
STAGED = ("1f1b", "interleaved_1f1b", "zbv", "pipedream", "fbp")
QUICK = ("fbp",)
SGD = ("optim.momentum=0.9", "optim.lr=0.02")
CORRECTIONS = {  # by ranks
    2: {
        "pipedream, spectrain": Case("pipedream", 2, ("correction=spectrain", "microbatches=1", *SGD)),
        "pipedream, gap_aware": Case("pipedream", 2, ("correction=gap_aware", "microbatches=3", *SGD)),
        "pipedream, hybrid, gap_aware, msnag": Case(
            "pipedream", 2, ("correction=[hybrid,gap_aware,msnag]", "microbatches=4", *SGD)
        ),
        "pipedream_2bw, msnag, Muon": Case(
            "pipedream_2bw",
            2,
            ("correction=msnag", "microbatches=4", f"{MODELS}without_norm", "optim=muon"),
        ),
    },
    3: {
        "pipedream, spectrain, [2,1]": Case(
            "pipedream", 3, ("correction=spectrain", "replicas=[2,1]", "microbatches=1", *SGD)
        ),
    },
}
GRAPHED = ("1f1b", "gpipe", "pipedream", "zb_h1")
MORE_GRAPHED = ("interleaved_1f1b", "pipedream_2bw", "zb_h2", "zb_auto", "zbv", "v_half", "v_async")

FOURTHS = (*COMMON, "microbatches=4")
REPLICAS = {  # by ranks
    3: {
        "[2,1], 1f1b": Case("1f1b", 3, ("replicas=[2,1]", *FOURTHS)),
        "[1,2], zb_h1, clipped": Case("zb_h1", 3, ("replicas=[1,2]", *FOURTHS, *CLIPPED)),
        "[2,1], pipedream, microbatches=1": Case(
            "pipedream", 3, ("replicas=[2,1]", *COMMON, "microbatches=1")
        ),
    },
    4: {
        "[2,2], 1f1b": Case("1f1b", 4, ("replicas=[2,2]", *FOURTHS)),
        "[2,2], zb_h1": Case("zb_h1", 4, ("replicas=[2,2]", *FOURTHS)),
        "[2,2], pipedream": Case("pipedream", 4, ("replicas=[2,2]", *FOURTHS, "window=3")),
        "[2,2], ties, clipped": Case(
            "1f1b", 4, ("replicas=[2,2]", TIED, "partition=[3]", "microbatches=4", *CLIPPED)
        ),
    },
}


@dataclass(frozen=True)
class Trained:
    """What a case left: the whole state; (train loss, val loss, val accuracy) by epoch; the bytes sent.

    `ran`: the programs of all windows, where a policy decided the order.
    """

    state: dict[str, Tensor]
    epochs: list[tuple[float, ...]]
    sent: int = 0
    ran: list[Program] = field(default_factory=list)


Work = Callable[[ProcessGroups, Case], Trained]


def train(groups: ProcessGroups, case: Case) -> Trained:
    """Train a case on one rank; return what all ranks left."""
    exactly()
    run = make_run(case)
    listener = Listener()
    epochs = rank_run(run, fitted(groups, run.plan), None if groups.world.rank else listener)  # type: ignore[arg-type]
    epochs.run()
    return Trained(
        whole(state_of(epochs, run)),
        [(f.trained["loss"], f.evaluated["loss"], f.score) for f in listener.epochs],
        sum(stats.bytes_sent for f in listener.epochs for stats in f.stages.values()),
        listener.epochs.ran,
    )


def whole(mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of all ranks, in host memory."""
    states = gathered({name: tensor.cpu() for name, tensor in mine.items()})
    return {name: tensor for state in states for name, tensor in state.items()}


def exactly() -> None:
    """Compute alike every time, and without TF32."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def difference(found: Trained, state: Mapping[str, Tensor], epochs: Sequence[tuple[float, ...]]) -> float:
    """Return the largest one of any weight, statistic or figure; infinite where there is no comparing."""
    if found.state.keys() != state.keys() or len(found.epochs) != len(epochs):
        return float("inf")
    pairs = [(found.state[name], tensor) for name, tensor in state.items()]
    pairs.append((torch.tensor(found.epochs, dtype=torch.float64), torch.tensor(epochs, dtype=torch.float64)))
    largest = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
    finite = all(bool(a.isfinite().all()) for a, _ in pairs)
    return largest if finite else float("inf")


def off(found: Sequence[tuple[float, ...]], wanted: Sequence[tuple[float, ...]]) -> float:
    """Return by how much any training loss is off another run's, relative; infinite if it is no number."""
    ratios = [abs(mine[0] / theirs[0] - 1) for mine, theirs in zip(found, wanted, strict=True)]
    return max(ratios) if all(ratio < float("inf") for ratio in ratios) else float("inf")


# Against the reference


def of_schedules(ranks: int, schedules: Sequence[str]) -> dict[str, Case]:
    """Return cases of several microbatches and windows; of pipedream with an update a microbatch, too."""
    made = {}
    for schedule in schedules:
        drains = ("window=3",) if schedule.startswith("pipedream") else ()
        made[schedule] = Case(schedule, ranks, (*COMMON, *drains, "microbatches=4"))
        if schedule == "pipedream":
            made[f"{schedule}, microbatches=1"] = Case(schedule, ranks, (*COMMON, *drains, "microbatches=1"))
    return made


def over_nccl(setting: Setting, ranks: int, names: Sequence[str]) -> Iterator[Row]:
    """Train schedules over NCCL."""
    yield from against_reference(setting, of_schedules(ranks, QUICK if setting.quick else names), ranks)


def replicas(setting: Setting) -> Iterator[Row]:
    """Train replicas over NCCL, most matrices in a bucket of their own."""
    first = "[2,1], 1f1b"
    for ranks, cases in ({3: {first: REPLICAS[3][first]}} if setting.quick else REPLICAS).items():
        yield from against_reference(setting, cases, ranks, bucketed)
    if setting.cuda:
        yield from graphed(setting, [Case("1f1b", 4, ("replicas=[2,2]", *FLOAT32))], bucketed)


def corrections(setting: Setting) -> Iterator[Row]:
    """Train with corrections of late gradients, on replicas too."""
    chosen = {2: dict([*CORRECTIONS[2].items()][:1])} if setting.quick else CORRECTIONS
    for ranks, cases in chosen.items():
        yield from against_reference(setting, cases, ranks)


def bucketed(groups: ProcessGroups, case: Case) -> Trained:
    """Train as `train` does, in a process whose buckets are small."""
    buckets.BUCKET = 1000
    return train(groups, case)


def staged(setting: Setting) -> Iterator[Row]:
    """Train schedules on two ranks over gloo, through pinned host memory."""
    cases = of_schedules(2, QUICK if setting.quick else STAGED)
    yield from against_reference(setting, cases, 2, staged=True)


def exact(setting: Setting) -> Iterator[Row]:
    """Train with every option whose result is exact, on two ranks."""
    plain, four = (*COMMON, "microbatches=4"), "microbatches=4"
    ragged, same = (*COMMON, "microbatches=3"), "_target_=tests.support.models.Same"
    codec = (f"codec.forward.{same}", f"codec.backward.{same}")
    found = {
        "recompute=always": Case("1f1b", 2, (*plain, "recompute=always")),
        "recompute=selective": Case("1f1b", 2, (*plain, "recompute=selective")),
        "recompute=always, zbv": Case("zbv", 2, (*plain, "recompute=always")),
        "ties": Case("1f1b", 2, (TIED, "partition=[3]", four)),
        "ties of a V, clipped over the model": Case("zbv", 2, (TIED, "partition=[2,3,4]", four, *CLIPPED)),
        "clipped over the model": Case("1f1b", 2, (*plain, *CLIPPED)),
        "EMA": Case("pipedream", 2, (*plain, "ema=0.6", "window=2")),
        "skips": Case("1f1b", 2, (SKIPS, "partition=[7]", four)),
        "skips of a V": Case("zbv", 2, (SKIPS, "partition=[3,8,13]", four)),
        "a codec that loses nothing": Case("1f1b", 2, (*plain, *codec)),
        "on_nan=skip": Case("1f1b", 2, (*plain, "on_nan=skip")),
        "AdamW": Case("pipedream_2bw", 2, (*plain, "optim=adamw", "optim.lr=0.003")),
        "ragged batches": Case("1f1b", 2, ragged, 43),
        "ragged batches and evaluations": Case("pipedream", 2, (*ragged, "batch_size=6"), 40),
    }
    if setting.quick:
        found = {"skips": found["skips"]}
    yield from against_reference(setting, found, 2)


def against_reference(
    setting: Setting, cases: Mapping[str, Case], ranks: int, work: Work = train, **options: Any
) -> Iterator[Row]:
    """Train cases in one world, and hold each against the reference. `options`: see Setting.each."""
    names = {case: name for name, case in cases.items()}
    for case, found, why in setting.each(work, ranks, list(names), **options):
        target = f"<= {TOLERANCE:g}"
        if why:
            yield judged(names[case], why, target, False)
            continue
        wanted = expected(case, found.ran)
        apart = difference(found, wanted.state, wanted.epochs)
        yield judged(names[case], f"{apart:.1e} off the reference", target, apart <= TOLERANCE)


def compiled(setting: Setting) -> Iterator[Row]:
    """Train through torch.compile."""
    if why := no_compiler(setting):
        yield Row("compile=true", why, "", SKIPPED)
        return
    words = ("partition=even", "epochs=1", "microbatches=4", "data.drop_last=true", "compile=true")
    case = Case("1f1b", 2, words)
    yield from against_reference(setting, {"1f1b, compile=true": case}, 2, timeout=COMPILE_S)


# What is rounded


def bf16(setting: Setting) -> Iterator[Row]:
    """Two ranks under precision=bf16: what is sent is half as much, and the losses are near fp32's."""
    fp32, narrow = (Case("1f1b", 2, (*FLOAT32, f"precision={name}")) for name in ("fp32", "bf16"))
    plan = make_run(narrow).plan
    kinds = {
        str(s.dtype).removeprefix("torch.") for size in plan.cut.specs for s in plan.cut.entering(1, size)
    }
    yield judged("boundary", ", ".join(kinds), "bfloat16", kinds == {"bfloat16"})
    (_, wide, first), (_, found, second) = setting.each(train, 2, [fp32, narrow])
    if first or second:
        yield judged("trains", first or second, "to the end", False)
        return
    share = found.sent / wide.sent
    yield judged("bytes sent, of fp32's", f"{share:.3f}", "0.5", share == 0.5)
    apart = off(found.epochs, wide.epochs)
    finite = all(bool(tensor.isfinite().all()) for tensor in found.state.values())
    yield judged("training loss, of fp32's", f"{apart:.2%} apart", f"<= {NEAR:.0%}", apart <= NEAR)
    yield judged("weights", "finite" if finite else "not finite", "finite", finite)


def codecs(setting: Setting) -> Iterator[Row]:
    """Messages that lose something train as on the CPU, but that a number may be rounded to the next step."""
    ways = {
        "half": ("codec.forward=half", "codec.backward=half"),
        "int8 and topk": ("codec.forward=int8", "codec.forward.error_feedback=true", "codec.backward=topk"),
        "int8 by channel": ("codec.forward=int8", "codec.forward.scale=channel", "codec.backward=int8"),
    }
    chosen = ["int8 and topk"] if setting.quick else list(ways)
    names = {Case("1f1b", 2, (*FLOAT32, *ways[name])): name for name in chosen}
    for case, found, why in setting.each(train, 2, list(names)):
        apart = float("inf") if why else off(found.epochs, epochs_on_cpu(case))
        figure = why or f"training loss {apart:.2%} off the CPU's"
        yield judged(names[case], figure, f"<= {NEAR:.0%}", apart <= NEAR)


def epochs_on_cpu(case: Case) -> list[tuple[float, ...]]:
    """Train a case on the CPU, one thread a rank; return its losses."""
    _, epochs = run_in_threads(case)
    return [(f.trained["loss"],) for f in epochs]


def graphs(setting: Setting, names: Sequence[str] = GRAPHED) -> Iterator[Row]:
    """CUDA graphs change nothing, to the last bit."""
    if not setting.cuda:
        yield Row("cuda_graphs=true", "a rehearsal", "", SKIPPED)
        return
    yield from graphed(setting, [Case(name, 2, FLOAT32) for name in names])


def graphed(setting: Setting, cases: Sequence[Case], work: Work = train) -> Iterator[Row]:
    """Train cases of as many ranks without CUDA graphs and with them."""
    option = "cuda_graphs=true"
    ways = [
        replace(case, overrides=(*case.overrides, way))
        for case in cases
        for way in ("cuda_graphs=false", option)
    ]
    eager: Trained | None = None
    for case, found, why in setting.each(work, cases[0].ranks, ways, within=GRAPHS_S):
        if option not in case.overrides:
            eager = found  # None where it did not train
            continue
        same = eager is not None and found is not None and identical(found, eager)
        figure = why or ("bit for bit as without" if same else "other than without")
        yield judged(f"{case.schedule}, {option}", figure, "bit for bit as without", same)


def identical(one: Trained, other: Trained) -> bool:
    """Return whether two trainings left the same, bit for bit."""
    states = one.state.keys() == other.state.keys() and one.epochs == other.epochs
    return states and all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())


# A loss of NaN


def nan(setting: Setting) -> Iterator[Row]:
    """A loss that is no number stops the training, with its microbatch's name."""
    case = Case("1f1b", 1, (MODELS + "explode", "microbatches=4", "dtype=float32"))
    said = setting.world(explode, 1, case)[0]
    wanted = r"the loss of microbatch \d+ is (nan|-?inf)( \(.*\))? at stage 0, update \d+: stopped "
    named = re.match(wanted, said)
    yield judged("a loss that is no number", said or "trained to the end", "is named", named is not None)


def explode(groups: ProcessGroups, say: Say, case: Case) -> str:
    """Train what cannot be; return what is said."""
    try:
        rank_run(make_run(case), groups, None).run()
    except TrainingStopped as error:
        return str(error)
    return ""
