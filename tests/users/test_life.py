"""A Pipeline from its making to its end, and others before and after it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD

from pipetrain import ConfigError, Pipeline, fit
from pipetrain.runtime.comm.collectives import World
from tests.support import parity
from tests.support.parity import of_pairs, plainly
from tests.support.processes import Ended, running
from tests.users.programs import batch, ended, mlp, sgd


def pipe_of(model: Any, schedule: str = "1f1b", **options: Any) -> Pipeline:
    return Pipeline(model, cross_entropy, sgd, schedule, microbatches=2, device="cpu", threads=1, **options)


PROGRAM = """
import ctypes, os
from tests.users.test_life import batch, mlp, pipe_of

for schedule in ("1f1b", "gpipe"):
    with pipe_of(mlp(), schedule) as pipe:
        pipe.step(*batch())
        print(f"rank {pipe.rank} {schedule} {pipe.updates}")
pipe = pipe_of(mlp())
pipe.step(*batch())
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for thread in map(int, os.listdir("/proc/self/task")):
    if thread != os.getpid():  # all others run when the main one does not
        os.sched_setaffinity(thread, os.sched_getaffinity(0))
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
pipe.evaluate([batch()])
ctypes.pythonapi.Py_Exit(0)  # as Python itself ends, and a program that was forked does not
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_ranks_run_a_program_to_its_end_with_a_pipeline_that_is_open_or_none(tmp_path: Path) -> None:
    """A thread of gloo that dropped a tensor while Python ended aborted the process."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with ExitStack() as left:
        processes = []
        for rank in ("0", "1"):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **meeting}
            processes.append(left.enter_context(running(tmp_path, ["mine.py"], world)))
        for rank, process in enumerate(processes):
            done = Ended.of(process, tmp_path)
            assert done.status == 0, done.out
            assert done.out == f"rank {rank} 1f1b 1\nrank {rank} gpipe 1\n"


def made_and_closed(times: int, folder: Path) -> list[tuple[int, int]]:
    """Return the descriptors and threads of this process after each of so many Pipelines.

    Python does not look for cycles meanwhile: a thread of a group that is left may take a whole processor.
    """
    counts = []
    gc.disable()
    for number in range(times):
        with pipe_of(mlp()) as pipe:
            fit(pipe, [batch()], None, 1, folder / str(number), loggers=())
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    gc.enable()
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux lists")
def test_a_pipeline_that_is_closed_leaves_no_descriptors_and_no_threads(ranks, tmp_path) -> None:
    """What each one left would add up; torch makes a few threads of its own when it likes."""
    times = 6
    for counts in ranks(made_and_closed, times, tmp_path):
        grown = [last - second for second, last in zip(counts[1], counts[-1], strict=True)]
        assert max(grown) < (times - 2) / 2, counts


def alone_at(caller: int, closes: bool) -> str:
    """Ask for the weights on one rank, after the other has closed or ended; return what is said."""
    pipe, handler = pipe_of(mlp()), signal.getsignal(signal.SIGINT)
    pipe.step(*batch())
    if pipe.rank == caller:
        return ended(pipe.state_dict)
    if not closes:
        pipe._training.groups._leave()
    signal.signal(signal.SIGINT, handler)
    return ended(pipe.close)


@pytest.mark.parametrize(("caller", "closes"), [(0, False), (1, False), (0, True), (1, True)])
def test_a_call_of_one_rank_alone_is_told_that_the_others_have_ended(ranks, caller, closes) -> None:
    said = ranks(alone_at, caller, closes)
    assert said[caller] == (
        f"ChannelError: rank {caller} waits for the state_dict, and rank {1 - caller} is at close() or the "
        f"end of its program: let all ranks call the same methods in the same order"
    )


def test_a_pass_that_nobody_iterates_is_said_to_have_done_nothing(caplog) -> None:
    with pipe_of(mlp()) as pipe:
        pipe.train([batch()])
        assert caplog.messages == [
            "pipetrain: train() has done nothing: it runs while its results are read, in a for loop"
        ]
        for _ in pipe.train([batch(), batch()]):
            break
        assert len(list(pipe.predict([batch()]))) == len(caplog.messages) == pipe.updates == 1
        never = pipe.predict([batch()])
        assert len(caplog.messages) == 1
        del never
        assert "predict() has done nothing" in caplog.messages[-1]


# Whose the weights are


def normed() -> nn.Sequential:
    return mlp(nn.BatchNorm1d(8))


class Skipping(nn.Module):
    """Traced: a weight that two layers share, a constant buffer, and one frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 5)
        self.third.weight = self.first.weight
        self.second.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        out: Tensor = self.head(self.norm(self.third(self.second(x).relu()) + x))
        return out


def shared() -> nn.Module:
    torch.manual_seed(0)
    return Skipping().double()


MODELS = {"sequential": normed, "traced": shared}


def plainly_trained(model: nn.Module) -> Any:
    """Train 2 updates for each of two schedules, with an optimizer of its own, and evaluate."""
    losses = []
    for _ in range(2):
        optimizer = sgd([p for p in model.parameters() if p.requires_grad])
        plainly(model, optimizer, of_pairs(cross_entropy, 2), [batch()] * 2)
        losses.append(evaluated(model))
    return pytest.approx(losses, rel=1e-12)


def evaluated(model: nn.Module) -> float:
    (loss,) = parity.evaluated(model, of_pairs(cross_entropy), [batch()])
    return loss


def on_meta(model: nn.Module) -> bool:
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def one_after_another(kind: str, *schedules: str) -> tuple[list[float], list[float]]:
    """Train one model object with one Pipeline after another; return the losses, and those of plain PyTorch.

    In one process it is trained in place. On several ranks it is whole on rank 0 after it was collected.
    """
    model, losses, after, alone = MODELS[kind](), [], [], World.current().size == 1
    weights = [*model.parameters()]
    frozen = [p.requires_grad for p in weights]
    for schedule in schedules:
        with pipe_of(model, schedule) as pipe:
            list(pipe.train([batch()]))
            assert on_meta(model) != alone
            pipe.collect()
            pipe.evaluate([batch()])  # with what was collected in its place
            list(pipe.train([batch()]))
            assert alone or "pipe.collect(), on all ranks, puts them into" in ended(lambda: model(batch()[0]))
            assert pipe.collect() is model
            losses.append(pipe.evaluate([batch()])["loss"])
            state = pipe.state_dict()
        assert on_meta(model) == bool(pipe.rank)
        if pipe.rank == 0:
            after.append(evaluated(model))
            assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert not alone or all(p is q for p, q in zip(weights, model.parameters(), strict=True))
    assert [p.requires_grad for p in model.parameters()] == frozen
    return losses, after


@pytest.mark.parametrize("kind", MODELS)
def test_one_model_goes_from_pipeline_to_pipeline_and_ends_in_plain_pytorch(ranks, kind) -> None:
    wanted = plainly_trained(MODELS[kind]())
    assert ranks(one_after_another, kind, "zbv", "1f1b") == [(wanted, wanted), (wanted, [])]
    assert one_after_another(kind, "1f1b", "gpipe") == (wanted, wanted)


def refused_again(collecting: bool) -> str:
    """Give a model to a second Pipeline, with other layers around its own; return what is said."""
    model = mlp()
    with pipe_of(model) as pipe:
        pipe.step(*batch())
        if collecting:
            pipe.collect()
            pipe.step(*batch())  # after which it is not whole again
    return ended(lambda: pipe_of(nn.Sequential(nn.Linear(6, 6).double(), *model)).close())


@pytest.mark.parametrize("collecting", [False, True])
def test_a_model_that_was_not_collected_is_refused_on_all_ranks_alike(ranks, collecting) -> None:
    for said in ranks(refused_again, collecting):
        assert "of the model is on the meta device and has no values" in said
        assert "where another Pipeline has trained it, call its collect(), on all ranks" in said


class Traced(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + 0
        return out


def bytes_held() -> tuple[int, int]:
    """Return the bytes of all tensors with data in this process, before a large model and while it is cut."""

    def held() -> int:
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and not t.is_meta]
        return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())

    model = Traced(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())))
    whole = sum(p.nbytes for p in model.parameters())
    before = held() - whole
    sample = torch.ones(8, 256), torch.ones(8, 256)
    with Pipeline(model, mse_loss, lambda p: torch.optim.SGD(p, 0.1), sample=sample, device="cpu", threads=1):
        return whole, held() - before


def test_a_rank_holds_its_share_of_a_model(ranks) -> None:
    for whole, held in ranks(bytes_held):
        assert held < 0.52 * whole + 100_000


def collected_at_once(factory: bool, weights: str | None) -> tuple[list[float], float]:
    """Collect a model before its first batch, and after training."""
    found = []
    with pipe_of(mlp if factory else mlp(), weights=weights) as pipe:
        for batches in ([], [batch()]):
            list(pipe.train(batches)) if batches else None
            whole = pipe.collect()
            found += [evaluated(whole)] if pipe.rank == 0 else []
        return found, pipe.evaluate([batch()])["loss"]


def test_the_model_of_a_function_and_of_a_file_is_collected_too(ranks, tmp_path) -> None:
    torch.manual_seed(5)
    twin, file = mlp(), str(tmp_path / "weights.pt")
    for p in twin.parameters():
        nn.init.normal_(p)
    torch.save(twin.state_dict(), file)
    for factory, weights in ((True, None), (True, file), (False, file)):
        ((first, last), loss), other = ranks(collected_at_once, factory, weights)
        assert other == ([], pytest.approx(loss, rel=1e-12))
        assert last == pytest.approx(loss, rel=1e-12) != first
        assert weights is None or first == pytest.approx(evaluated(twin), rel=1e-12)


def test_in_one_process_another_pipeline_closes_the_one_before_as_a_notebooks_cell_does() -> None:
    first, second = (
        Pipeline(nn.Linear(2, 1), mse_loss, partial(SGD, lr=0.1), device="cpu", threads=1) for _ in range(2)
    )
    with pytest.raises(ConfigError, match="has been closed"):
        first.step(torch.ones(4, 2), torch.ones(4, 1))
    second.step(torch.ones(4, 2), torch.ones(4, 1))
    assert repr(first).endswith("rank 0 of 1, closed>")
    assert repr(second).startswith("<Pipeline of Linear: 1f1b, 4 microbatches, stages on ranks 0, ")
    assert repr(second).endswith(" 1 update>")
    second.close()
