"""Training on the GPU against the reference on the CPU in float64; bf16; a trace; a loss of NaN."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchmark.worlds import Say
from pipetrain.errors import TrainingStopped
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import COMMUNICATION, RECEIVES, SENDS
from pipetrain.schedule.timeline import TracedWindow
from pipetrain.training.tracer import about_trace
from pipetrain.training.trainer import Trainer
from tests.gpu.rows import Row, Setting, judged
from tests.support.cases import SCHEDULES, Case, Listener, expected, make_run, state_of

TOLERANCE = 1e-9  # of weights and losses in float64
BF16_TOLERANCE = 0.05  # of a loss, relative to fp32's
CLOCKS_S = 1e-3  # by which a device's events may be off the host's clock, beside the error of the clocks
REHEARSAL_S = 1.0  # likewise where a busy host may stop between sending and looking at the clock
MODELS = "model._target_=tests.support.models."
FLOAT32 = ("dtype=float32", "microbatches=4", "partition=even", "epochs=2")


@dataclass(frozen=True)
class Trained:
    """What a case left: the whole state; (train loss, val loss, val accuracy) by epoch; the bytes sent."""

    state: dict[str, Tensor]
    epochs: list[tuple[float, float, float]]
    sent: int


def cases(ranks: int, quick: bool) -> list[Case]:
    """Several microbatches and windows of each schedule; pipedream with an update a microbatch, too."""
    common = ("partition=even", "epochs=1" if quick else "epochs=2")
    made = []
    for schedule in ["1f1b", "pipedream"] if quick else SCHEDULES:
        drains = ("window=3",) if schedule.startswith("pipedream") else ()
        made.append(Case(schedule, ranks, (*common, *drains, "microbatches=4")))
        if schedule == "pipedream":
            made.append(Case(schedule, ranks, (*common, *drains, "microbatches=1")))
    return made


def against_reference(setting: Setting, ranks: int, staged: bool) -> Iterator[Row]:
    """Every schedule, over NCCL or, `staged`, over gloo and pinned host memory; that against NCCL's, too."""
    chosen = cases(ranks, setting.quick)
    packed = setting.world(train, ranks, chosen, staged=staged)[0]
    trained: dict[Case, Trained] = pickle.loads(packed)
    if not staged:
        setting.kept[f"nccl-{ranks}"] = trained
    elsewhere: dict[Case, Trained] = setting.kept.get(f"nccl-{ranks}", {})
    for case, found in trained.items():
        wanted = setting.kept.get(str(case)) or expected(case)
        setting.kept[str(case)] = wanted
        apart = difference(found, wanted.state, wanted.epochs)
        what = f"{case.schedule}, {case.overrides[-1]}"
        yield judged(what, f"{apart:.1e} off the reference", f"<= {TOLERANCE:g}", apart <= TOLERANCE)
        if staged and case in elsewhere:
            apart = difference(found, elsewhere[case].state, elsewhere[case].epochs)
            yield judged(what, f"{apart:.1e} off NCCL's", f"<= {TOLERANCE:g}", apart <= TOLERANCE)


def train(mesh: Mesh, say: Say, chosen: Sequence[Case]) -> bytes:
    """Train the cases on one rank; return what they left, by case, pickled: tensors do not outlive a pipe."""
    exactly()
    left: dict[Case, Trained] = {}
    for case in chosen:
        say(str(case))
        run = make_run(case)
        listener = Listener()
        trainer = Trainer(run, mesh, listener if mesh.world.rank == 0 else None)  # type: ignore[arg-type]
        trainer.fit()
        mine = {name: tensor.cpu() for name, tensor in state_of(trainer, run).items()}
        whole = {n: t for state in mesh.gather("the weights", mine) for n, t in state.items()}  # type: ignore[attr-defined]
        left[case] = Trained(
            whole,
            [(f.trained.mean_loss, f.evaluated.mean_loss, f.score) for f in listener.epochs],
            sum(stats.bytes_sent for f in listener.epochs for stats in f.stages.values()),
        )
    return pickle.dumps(left) if mesh.world.rank == 0 else b""


def exactly() -> None:
    """Compute alike every time, and without TF32."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def difference(found: Trained, state: dict[str, Tensor], epochs: Sequence[tuple[float, ...]]) -> float:
    """Return the largest one of any weight, statistic or figure; infinite where there is no comparing."""
    if found.state.keys() != state.keys() or len(found.epochs) != len(epochs):
        return float("inf")
    pairs = [(found.state[name], tensor) for name, tensor in state.items()]
    pairs.append((torch.tensor(found.epochs, dtype=torch.float64), torch.tensor(epochs, dtype=torch.float64)))
    largest = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
    finite = all(bool(a.isfinite().all()) for a, _ in pairs)
    return largest if finite else float("inf")


def bf16(setting: Setting) -> Iterator[Row]:
    """Two ranks under precision=bf16: what is sent is half as much, and the losses are near fp32's."""
    fp32, narrow = (Case("1f1b", 2, (*FLOAT32, f"precision={name}")) for name in ("fp32", "bf16"))
    trained: dict[Case, Trained] = pickle.loads(setting.world(train, 2, [fp32, narrow])[0])
    plan = make_run(narrow).plan
    kinds = {
        str(s.dtype).removeprefix("torch.") for entry in plan.boundaries.values() for s in entry[1].specs
    }
    share = trained[narrow].sent / trained[fp32].sent
    yield judged("boundary", ", ".join(kinds), "bfloat16", kinds == {"bfloat16"})
    yield judged("bytes sent, of fp32's", f"{share:.3f}", "0.5", share == 0.5)
    losses = [(n[0], w[0]) for n, w in zip(trained[narrow].epochs, trained[fp32].epochs, strict=True)]
    apart = max(abs(n / w - 1) for n, w in losses)
    finite = all(bool(tensor.isfinite().all()) for tensor in trained[narrow].state.values())
    yield judged("training loss, of fp32's", f"{apart:.2%} apart", "<= 5%", apart <= BF16_TOLERANCE)
    yield judged("weights", "finite" if finite else "not finite", "finite", finite)


def trace(setting: Setting) -> Iterator[Row]:
    """A trace of two ranks: written, read again, and in the order that messages impose."""
    chosen = f"{MODELS}with_norm" if setting.quick else "model._target_=pipetrain.models.vgg11"
    case = Case("1f1b", 2, (chosen, *FLOAT32, "batch_size=64", "trace=true"), train_samples=256)
    path = setting.out / "trace.json"
    marks, error = setting.world(traced, 2, case, str(path))[0]
    wanted = "Event" if setting.cuda else "float"
    yield judged("moments are marked by", marks, wanted, marks == wanted)
    _, windows = chrome.read(path)
    actions = sum(len(row.actions) for window in windows for row in window.timeline.rows)
    planned = len(windows) * sum(map(len, make_run(case).plan.window.program))
    figure = f"{len(windows)} windows, {actions} actions"
    yield judged("trace.json", figure, str(planned), actions == planned > 0)
    early = max(early_s(window) for window in windows)
    most = error + (CLOCKS_S if setting.cuda else REHEARSAL_S)
    what = "a receive ends before its send begins by"
    yield judged(what, f"{1e3 * early:.3f} ms", f"<= {1e3 * most:.3f} ms", early <= most)
    overlap = max(overlap_s(window) for window in windows)
    yield judged("computing overlaps on a rank by", f"{1e6 * overlap:.1f} us", "<= 10 us", overlap <= 1e-5)


def traced(mesh: Mesh, say: Say, case: Case, path: str) -> tuple[str, float]:
    """Train with a trace; return what marks a moment, and the error of the clocks in seconds."""
    run = make_run(case)
    listener = Listener()
    Trainer(run, mesh, listener if mesh.world.rank == 0 else None).fit()  # type: ignore[arg-type]
    if mesh.world.rank:
        return "", 0.0
    (found,) = listener.traces
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    chrome.write(Path(path), about_trace(run, found, f"2 x {device}"), found.windows)
    return type(Clock(mesh.device).mark()).__name__, found.clock_error_s


def early_s(window: TracedWindow) -> float:
    """By how much any receive ends before its send begins; below 0 where none does."""
    spans = [span for row in window.timeline.rows for span in row.spans if span.action is not None]
    began = {(s.action.edge, s.action.mb): s.start + s.waited for s in spans if s.action.op in SENDS}
    return max(began[s.action.edge, s.action.mb] - s.end for s in spans if s.action.op in RECEIVES)


def overlap_s(window: TracedWindow) -> float:
    """By how much any two actions of a rank are computed at once: a device does one after the other."""
    computed = [
        sorted((s.start, s.end) for s in row.spans if s.action and s.action.op not in COMMUNICATION)
        for row in window.timeline.rows
    ]
    overlaps = [a[1] - b[0] for row in computed for a, b in pairwise(row)]
    return max([0.0, *overlaps])


def nan(setting: Setting) -> Iterator[Row]:
    """A loss that is no number stops the training, with its microbatch's name."""
    case = Case("1f1b", 1, (MODELS + "explode", "microbatches=4", "dtype=float32"))
    said = setting.world(explode, 1, case)[0]
    wanted = r"the loss of microbatch \d+ is (nan|-?inf)( \(.*\))? at stage 0, update \d+: stopped "
    named = re.match(wanted, said)
    yield judged("a loss that is no number", said or "trained to the end", "is named", named is not None)


def explode(mesh: Mesh, say: Say, case: Case) -> str:
    """Train what cannot be; return what is said."""
    try:
        Trainer(make_run(case), mesh, None).fit()
    except TrainingStopped as error:
        return str(error)
    return ""
