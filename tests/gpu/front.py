"""The ways in: torchrun and `pipetrain` over NCCL, with all that may happen to a run; and `Pipeline`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import torch

from pipetrain.checkpoint.files import CHECKPOINTS
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.stage import cuda_graphs
from tests.gpu.rows import SKIPPED, Row, Setting, judged
from tests.gpu.speed import no_compiler
from tests.gpu.training import NEAR, exactly
from tests.support.processes import (
    CHECKOUT,
    TORCHRUN,
    Started,
    await_epoch,
    await_line,
    checkpoints,
    ended,
    rank_of,
    running,
    said,
)

NEEDED = ("safetensors", "tqdm", "tensorboard", "matplotlib")
OVER_NCCL = str(Path(__file__).with_name("over_nccl.py"))
EPOCHS, KILLED, STOPPED = 8, 2, 5  # of a run; after which a rank is killed, and all are stopped
WAIT_S = 25  # that a rank may wait for another: it says so before torchrun kills it
SOON_S = 10.0  # within which a rank that is killed is lost, and the other one has ended
STOP_S = 30.0  # torchrun kills its ranks so many seconds after SIGTERM
RUN_S = 120.0  # a run may take
TOLERANCE = 1e-9  # of weights in float64
KEPT_S = 20.0  # that a training which is kept may take
SLOW = ["model._target_=tests.support.models.faulty", "partition=[2]"]  # 20 ms a microbatch
SLOW += ["+model.kind=sleep", "+model.rank=1", "+model.at=20"]
WORDS = ["data=digits", "data.test_limit=64", "batch_size=64", "threads=1", f"timeout={WAIT_S}"]


def command_line(setting: Setting) -> Iterator[Row]:
    """Run to the end; then once more, killed, restarted, stopped, and restarted to the same end."""
    if why := lacking():
        yield Row("torchrun", why, "", SKIPPED)
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        words = [*WORDS, *SLOW, "data.train_limit=384", "dtype=float64", f"epochs={EPOCHS}"]
        with pipetrain(setting, folder, [*words, "run_dir=whole"]) as process:
            out = ended(process)
        yield judged("torchrun", last(out), "ends with 0", process.returncode == 0)
        if process.returncode:
            return
        if setting.cuda:
            staged = "messages go through host memory" in out
            yield judged(
                "messages go", "through host memory" if staged else "over NCCL", "over NCCL", not staged
            )
        words += ["run_dir=harmed", "resume=auto"]
        yield from killed(setting, folder, words)
        yield from stopped(setting, folder, words)
        with pipetrain(setting, folder, words) as process:
            out = ended(process)
        apart = difference(folder / "whole", folder / "harmed") if process.returncode == 0 else float("inf")
        figure = f"{apart:.1e} off the run that nobody harmed" if process.returncode == 0 else last(out)
        yield judged(
            "killed, stopped, and gone on to the end", figure, f"<= {TOLERANCE:g}", apart <= TOLERANCE
        )


def lacking() -> str:
    """Say what the ways in need beside torch and Hydra and is not here; nothing where all is."""
    return " and ".join(f"no {name}" for name in NEEDED if find_spec(name) is None)


def pipetrain(setting: Setting, folder: Path, words: Sequence[str]) -> AbstractContextManager[Started]:
    """Start two ranks of `python -m pipetrain` by torchrun."""
    return torchrun(setting, folder, ["pipetrain", f"device={setting.device}", *words])


def torchrun(setting: Setting, folder: Path, words: Sequence[str]) -> AbstractContextManager[Started]:
    """Start two ranks of a module or a script by torchrun, over NCCL though they share a GPU."""
    command = ["-m", TORCHRUN, "--standalone", "--nproc_per_node=2", OVER_NCCL, *words]
    limit = max(1.0, min(setting.left, RUN_S * setting.patience))
    places = [str(CHECKOUT), str(CHECKOUT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(places)}
    if setting.cuda:
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return running(folder, command, variables, limit, cold=True)


def killed(setting: Setting, folder: Path, words: Sequence[str]) -> Iterator[Row]:
    """Kill rank 1 in the middle of a run; the other one says so, and ends in time."""
    with pipetrain(setting, folder, words) as process:
        await_epoch(process, KILLED)
        sleep(0.25)  # half an epoch
        start = monotonic()
        os.kill(rank_of(process, 1), signal.SIGKILL)
        out = ended(process)
    seconds, limit = monotonic() - start, setting.patience * SOON_S
    sentences = [line for line in said(out).splitlines() if re.match(r"pipetrain: rank 0 (?!got )", line)]
    named = len(sentences) == 1 and "rank 1" in sentences[0]
    target = "one sentence of rank 0 that names it"
    yield judged("rank 1 is killed", " / ".join(sentences) or last(out), target, named)
    yield judged("the other ends after", f"{seconds:.1f} s", f"<= {limit:g} s", seconds <= limit)


def stopped(setting: Setting, folder: Path, words: Sequence[str]) -> Iterator[Row]:
    """Restart the run, and stop it in the middle; it saves, and leaves before torchrun would kill it."""
    with pipetrain(setting, folder, words) as process:
        seen = await_epoch(process, STOPPED)
        start = monotonic()
        os.kill(process.pid, signal.SIGTERM)  # torchrun's, which passes it on to every rank
        out = ended(process)
    seconds = monotonic() - start
    again = re.search(r"going on from .*", seen)
    yield judged("the restart", again[0] if again else "began anew", "goes on", again is not None)
    left = [line for line in out.splitlines() if "go on with: run_dir=" in line]
    yield judged("SIGTERM", left[0] if left else last(out), "saves", bool(left))
    yield judged("leaves after", f"{seconds:.1f} s", f"<= {STOP_S:g} s", seconds <= STOP_S)


def stopped_early(setting: Setting) -> Iterator[Row]:
    """Stop a run while it compiles its stages."""
    if why := lacking() or no_compiler(setting):
        yield Row("SIGTERM while stages are compiled", why, "", SKIPPED)
        return
    with TemporaryDirectory() as name:
        words = [*WORDS, "model=vgg11", "compile=true", "epochs=1", "run_dir=run"]
        with pipetrain(setting, Path(name), words) as process:
            await_line(process, "records in")
            sleep(8.0)
            start = monotonic()
            os.kill(process.pid, signal.SIGTERM)
            out = ended(process)
        seconds = monotonic() - start
    what = "SIGTERM while stages are compiled"
    yield judged(f"{what}: leaves after", f"{seconds:.1f} s", f"<= {STOP_S:g} s", seconds <= STOP_S)
    yield Row(f"{what}: it says", last(said(out)) or last(out))


def difference(one: Path, other: Path) -> float:
    """Return the largest one of any weight in the newest checkpoints of two runs."""
    from safetensors.torch import load_file  # is not needed by the other checks

    def weights(run: Path) -> dict[str, object]:
        (name, manifest), *_ = checkpoints(run).items()
        files = [run / CHECKPOINTS / name / part for part in manifest.parts]
        tensors = {key: t for path in files for key, t in load_file(path).items()}
        return {key: tensor for key, tensor in tensors.items() if key.startswith("model/")}

    mine, theirs = weights(one), weights(other)
    if mine.keys() != theirs.keys() or not mine:
        return float("inf")
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)  # type: ignore[operator]


def last(out: str) -> str:
    """Return the last line that was said."""
    return (out.strip().splitlines() or ["nothing"])[-1]


def pipeline(setting: Setting) -> Iterator[Row]:
    """Train by `Pipeline`, in a world against a plain loop, and in a script under torchrun."""
    if why := lacking():
        yield Row("Pipeline", why, "", SKIPPED)
        return
    from tests.support.parity import GROUPS, Way

    device, window = {"device": setting.device}, 3
    clipped = {**device, "clip_grad_norm": 0.05, "ema": 0.6}
    ways = [
        ("gpt", Way("pipedream", 2, options=device)),
        ("mlp", Way("1f1b", by_step=True, options=device)),
        ("gpt", Way("zbv", 4, window, options=device)),
        ("normed", Way("1f1b", 2, options=device)),
        ("tuples", Way("interleaved_1f1b", 4, window, options=device)),
        ("mlp", Way("1f1b", options={**device, "param_groups": GROUPS})),
        ("gpt", Way("pipedream", 2, options=clipped)),
        *(("unet", Way(name, window=window, options=device)) for name in ("1f1b", "pipedream", "zbv")),
    ]
    if find_spec("transformers"):  # traced, and its embedding is its head
        ways += [("gpt2", Way(name, window=window, options=device)) for name in ("1f1b", "pipedream")]
    for (name, way), _, why in setting.each(train_by_pipeline, 2, ways[:2] if setting.quick else ways):
        yield judged(f"{name}, {way}", why or "as one process", "as one process", not why)
    if setting.quick:
        return
    with TemporaryDirectory() as name:
        script = str(CHECKOUT / "docs/examples/mlp.py")
        with torchrun(setting, Path(name), [script]) as process:
            out = ended(process)
    met = process.returncode == 0 and len(re.findall("^epoch 2: last update", out, re.MULTILINE)) == 1
    yield judged("docs/examples/mlp.py under torchrun", last(out), "epoch 2: last update ...", met)


def lengths(setting: Setting) -> Iterator[Row]:
    """Train by `Pipeline` on batches of several lengths, with CUDA graphs of each, against a plain loop."""
    if why := lacking():
        yield Row("batches of several lengths", why, "", SKIPPED)
        return
    from tests.support.parity import Way

    device = {"device": setting.device}
    ways = [("gpt, lengths", Way(name, 2, window=1, options=device)) for name in ("1f1b", "pipedream", "zbv")]
    for (name, way), _, why in setting.each(train_by_pipeline, 2, ways[: 1 if setting.quick else None]):
        yield judged(f"{name}, {way}", why or "as one process", "as one process", not why)


def kept(setting: Setting) -> Iterator[Row]:
    """Predict, save and load by `Pipeline`, and the same by torch.distributed.checkpoint."""
    if why := lacking():
        yield Row("Pipeline", why, "", SKIPPED)
        return
    with TemporaryDirectory() as name:
        items = [(schedule, setting.device, f"{name}/{schedule}") for schedule in ("zbv", "pipedream")]
        for (schedule, *_), _, why in setting.each(
            keep, 2, items[: 1 if setting.quick else None], within=KEPT_S
        ):
            what = f"{schedule}: predict, load, torch.distributed.checkpoint"
            yield judged(what, why or "as before", "as before", not why)


def keep(groups: ProcessGroups, item: tuple[str, str, str]) -> None:
    """Train, predict as the weights alone do, and twice train on from what was saved, with equal losses."""
    import torch.distributed.checkpoint as dcp
    from torch.nn.functional import cross_entropy
    from torch.testing import assert_close

    from pipetrain import Pipeline
    from tests.support.model_zoo import classified, mlp
    from tests.support.parity import ADAMW

    exactly()
    schedule, device, folder = item
    batches = classified(mlp()).batches
    with Pipeline(mlp(), cross_entropy, ADAMW, schedule, microbatches=2, device=device, threads=1) as pipe:
        list(pipe.train(batches))
        state, outputs = pipe.state_dict(), list(pipe.predict([x for x, _ in batches]))
        pipe.save(f"{folder}/own")
        dcp.save(pipe.dcp(), checkpoint_id=f"{folder}/dcp")
        wanted = list(pipe.train(batches))
        pipe.load(f"{folder}/own")
        assert_close(list(pipe.train(batches)), wanted, rtol=TOLERANCE, atol=0.0)
        dcp.load(pipe.dcp(), checkpoint_id=f"{folder}/dcp")
        assert_close(list(pipe.train(batches)), wanted, rtol=TOLERANCE, atol=0.0)
    if groups.world.rank == 0:
        alone = mlp()
        alone.load_state_dict(state)
        assert_close(outputs, [alone(x).detach() for x, _ in batches], rtol=TOLERANCE, atol=TOLERANCE)


def bf16_weights(setting: Setting) -> Iterator[Row]:
    """Weights of 16 bits train as on the CPU, whose kernels take more dtypes."""
    if why := lacking():
        yield Row("weights in bf16", why, "", SKIPPED)
        return
    ways: dict[str, dict[str, Any]] = {
        "1f1b": {},
        "clipped over the model, EMA": {"clip_grad_norm": 0.05, "clip_grad_norm_over": "model", "ema": 0.6},
        "on_nan=skip": {"on_nan": "skip"},
    }
    items = [(name, options, setting.device) for name, options in ways.items()][
        : 1 if setting.quick else None
    ]
    for (name, *_), apart, why in setting.each(
        train_in_bf16, 2, items[: 1 if setting.quick else None], within=KEPT_S
    ):
        figure = why or f"losses {apart:.2%} off the CPU's"
        yield judged(f"weights in bf16, {name}", figure, f"<= {NEAR:.0%}", not why and apart <= NEAR)


def train_in_bf16(groups: ProcessGroups, item: tuple[str, dict[str, Any], str]) -> float:
    """Train on a device and on the CPU; return by how much a loss differs, relative."""
    from torch.nn.functional import cross_entropy

    from pipetrain import Pipeline
    from tests.support.model_zoo import classified, mlp
    from tests.support.parity import ADAMW

    _, options, device = item
    batches = [(x.bfloat16(), y) for x, y in classified(mlp()).batches]
    losses = []
    for where in (device, "cpu"):
        torch.manual_seed(0)
        model = mlp().bfloat16()
        with Pipeline(
            model, cross_entropy, ADAMW, microbatches=2, device=where, threads=1, **options
        ) as pipe:
            losses.append(list(pipe.train(batches)))
    return max(abs(one / other - 1) for one, other in zip(*losses, strict=True))


def train_by_pipeline(groups: ProcessGroups, item: tuple[str, Any]) -> None:
    """Train, evaluate and take the weights by Pipeline, and hold them against one process on rank 0."""
    from tests.support import model_zoo, parity

    exactly()
    cuda_graphs.OFTEN = 1
    parity.train(model_zoo.make(item[0]), item[1], TOLERANCE)
