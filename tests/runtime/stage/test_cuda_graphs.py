"""What CUDA graphs need of weights, on a CPU. That they equal single launches is a row of gpu_check."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipetrain.errors import ConfigError
from pipetrain.plan.memory_fit import peaks_by_rank
from pipetrain.runtime import session as session_module
from pipetrain.runtime.session import Session
from pipetrain.runtime.stage import stage_factory
from pipetrain.runtime.stage.cuda_graphs import GraphedStage
from pipetrain.runtime.stage.stage import Stage
from tests.runtime.test_rehearsal import rehearsed
from tests.support.cases import Case, make_run
from tests.support.models import CLASSES, flat
from tests.support.thread_ranks import run_in_threads

pytestmark = pytest.mark.slow


class Recorded(TorchDispatchMode):
    """A graph of the CPU: operations that are noted, undone, and run again on the same tensors."""

    replays = 0
    sync: object = 0  # the mode in which operations synchronise

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, Any]] = []
        self.undo: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            assert Recorded.sync == "error", "a wait of the host would spoil what is captured"
            raise RuntimeError("called a synchronizing CUDA operation")
        for given, argument in zip(func._schema.arguments, args, strict=False):
            if given.alias_info is not None and given.alias_info.is_write:
                self.undo += [(t, t.clone()) for t in tree_leaves(argument) if isinstance(t, Tensor)]
        if func is torch.ops.aten.native_batch_norm.default:  # its schema does not tell
            self.undo += [(t, t.clone()) for t in args[3:5] if t is not None]
        result = func(*args, **(kwargs or {}))
        self.noted.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        Recorded.replays += 1
        with torch.no_grad():
            for func, args, kwargs, result in self.noted:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if (
                        isinstance(old, Tensor)
                        and old.untyped_storage()._cdata != new.untyped_storage()._cdata
                    ):
                        old.data.copy_(new)


@contextmanager
def recording(graph: Recorded, **_: Any) -> Iterator[None]:
    with graph:
        yield
    for tensor, before in reversed(graph.undo):
        tensor.data.copy_(before)


@pytest.fixture
def recorded(monkeypatch) -> Iterator[dict[int, bool]]:
    """Let stages be captured on the CPU; by number, whether each was in the last window."""
    captured, train = dict[int, bool](), Session.train
    fakes = {
        "CUDAGraph": Recorded,
        "graph": recording,
        "graph_pool_handle": object,
        "current_stream": lambda: None,
        "stream": nullcontext,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: setattr(Recorded, "sync", mode),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Recorded, "replays", 0)

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        captured.update({index: bool(stage.shapes_captured) for index, stage in self.stages.items()})
        assert all(stage.shapes_captured or not stage.store.fixed for stage in self.stages.values())
        assert not any(stage.capture_due for stage in self.stages.values())
        return result

    with (
        rehearsed(),
        patch.object(stage_factory, "Stage", GraphedStage),
        patch.object(Session, "train", trained),
    ):
        yield captured


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_passes_that_are_replayed_train_alike(schedule, request):
    """The short batch at the end is rehearsed after the capture."""
    case = Case(schedule, 2, ("microbatches=4", "window=1", "epochs=1", "partition=even", "dtype=float32"))
    plain, _ = run_in_threads(case)
    captured = request.getfixturevalue("recorded")
    state, _ = run_in_threads(case)
    assert all(captured.values())
    assert Recorded.replays > 0
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, state[name])] == []


@pytest.mark.parametrize("schedule", ["pipedream", "zb_h1"])
def test_passes_have_tensors_in_common_where_they_are_never_open_together(schedule, recorded):
    """Inputs, targets and outputs those of a slot; gradients all, but where a later pass needs them too."""
    found, capture = dict[int, tuple[int, int]](), GraphedStage.capture

    def capturing(self: GraphedStage, slots: int, versions: int, why: str) -> str:
        assert not capture(self, slots, versions, why)
        found[self.index], passes = (slots, versions), [*self._graphs.passes.values()]
        assert len(passes) == slots * versions
        kept = slots if passes[0].weight else 1
        of_slot = dict.fromkeys(("inputs", "target", "outputs"), slots)
        for name, count in {**of_slot, "grads": kept, "back": 1}.items():
            of_each = [getattr(one, name) for one in passes]
            assert len({t.data_ptr() for tensors in of_each for t in tensors}) == count * len(of_each[0])
        return ""

    case = Case(schedule, 3, ("microbatches=4", "epochs=1", "partition=even", "dtype=float32"))
    with patch.object(GraphedStage, "capture", capturing):
        run_in_threads(case)
    assert found == (
        {0: (3, 2), 1: (2, 2), 2: (1, 1)} if schedule == "pipedream" else dict.fromkeys(range(3), (3, 1))
    )


@pytest.mark.parametrize(
    ("schedule", "words", "said"),
    [
        ("1f1b", (), "cuda_graphs needs a GPU: leave it out"),
        ("1f1b", ("batchnorm=batch",), "batchnorm=batch needs other passes than CUDA graphs have captured"),
        (
            "1f1b",
            ("model._target_=tests.support.models.dropping",),
            "layer .* draws random numbers, which cuda_graphs would repeat",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused(schedule, words, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "GPU" not in said)
    with pytest.raises(ConfigError, match=said):
        make_run(Case(schedule, 2, ("microbatches=3", "cuda_graphs=true", *words)))


class Looks(nn.Module):
    """Looks at a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x


class Counts(nn.Module):
    """Scales by how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Averages(nn.Module):
    """Replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Rolls(nn.Module):
    """Draws from Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Hooked(nn.Identity):
    """Has a hook that scales."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, x, output: 2 * output)


class Scales(nn.Module):
    """Scales by an attribute, which a program may change."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


LAYERS = {kind.__name__: kind for kind in (Looks, Counts, Averages, Rolls, Hooked, Scales)}


def with_one(kind: str) -> nn.Sequential:
    return nn.Sequential(*flat(nn.Tanh()), LAYERS[kind](), nn.Linear(12, CLASSES))


def holding(kind: str, *words: str) -> Case:
    """On one rank with two stages, the second of which has a layer of a kind."""
    model = (f"model._target_={__name__}.with_one", f"+model.kind={kind}", "partition=[1]")
    return Case("interleaved_1f1b", 1, (*model, "microbatches=4", "window=1", "epochs=1", *words))


@pytest.mark.parametrize("kind", ["Looks", "Counts", "Averages", "Rolls", "Hooked"])
def test_a_stage_that_cannot_be_captured_runs_as_it_does_without_and_a_line_says_why(kind, request, caplog):
    case = holding(kind)
    random.seed(1)
    plain, _ = run_in_threads(case)
    captured = request.getfixturevalue("recorded")
    random.seed(1)
    with caplog.at_level("INFO", "pipetrain"):
        state, _ = run_in_threads(case)
    assert captured == {0: True, 1: False}
    lines = [message for message in caplog.messages if "cuda_graphs=auto" in message]
    assert len(lines) == 1
    assert ("called a synchronizing" if kind == "Looks" else "layers have hooks, or do more") in lines[0]
    assert Recorded.replays > 0
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, state[name])] == []


def test_stages_are_captured_where_they_fit_and_a_line_says_which_do_not(recorded, caplog):
    case = holding("Scales")
    plan = make_run(case).plan
    room = peaks_by_rank(plan.memory())[0] + plan.graph_bytes(0)
    with caplog.at_level("INFO", "pipetrain"), patch.object(session_module, "gpu_bytes", lambda *_: room):
        run_in_threads(case)
    assert recorded == {0: True, 1: False}
    (line,) = [message for message in caplog.messages if "cuda_graphs=auto" in message]
    assert re.search(r"they would take .* GiB beside .*, and there are .* GiB: choose more stages", line)


def test_where_a_stage_must_be_captured_and_cannot_be_the_training_is_refused(recorded):
    case = holding("Looks", "cuda_graphs=true")
    with patch.object(torch.cuda, "is_available", lambda: True):
        make_run(case)
    with pytest.raises(ConfigError, match="the passes of stage 1 cannot be captured: layers or loss do"):
        run_in_threads(case)


def test_an_attribute_that_a_program_changes_later_counts(request):
    """Though the passes were captured with another one; they are replayed while it is as it was."""
    case, begin = holding("Scales"), Stage.begin_window

    def changing(self: Stage, *predicted: Any) -> None:
        for layer in self.module.modules() if not self.rehearses else ():
            if isinstance(layer, Scales):
                layer.factor = 0.5 if self.weights.updates == 2 else 1.0
        begin(self, *predicted)

    with patch.object(Stage, "begin_window", changing):
        plain, _ = run_in_threads(case)
        captured = request.getfixturevalue("recorded")
        state, _ = run_in_threads(case)
    assert captured == {0: True, 1: True}
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, state[name])] == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), ["", ""]),
        (("on_nan=skip",), ["", ""]),
        (("batchnorm=batch",), ["batchnorm=batch needs other passes than CUDA graphs have captured"] * 2),
        (("memory_limit=5",), ["memory_limit=5.0 needs other passes than CUDA graphs have captured"] * 2),
        (("model._target_=tests.support.models.dropping", "partition=[4]"), ["layer 1 draws random", ""]),
    ],
)
def test_a_plan_says_of_each_stage_why_it_is_not_captured(words, why):
    plan = make_run(Case("1f1b", 2, ("microbatches=3", *words))).plan
    for stage, text in enumerate(why):
        said = plan.not_captured(stage)
        assert (text in said) if text else not said


def test_where_an_option_stands_against_graphs_one_line_says_so_and_on_a_cpu_none(caplog):
    case = Case("1f1b", 2, ("microbatches=3", "epochs=1", "batchnorm=batch"))
    with caplog.at_level("INFO", "pipetrain"):
        run_in_threads(case)
        assert not [message for message in caplog.messages if "CUDA graphs" in message]
        with rehearsed():
            run_in_threads(case)
    line = "pipetrain: not all passes are CUDA graphs (cuda_graphs=auto): batchnorm=batch needs other passes"
    assert [message.startswith(line) for message in caplog.messages if "CUDA graphs" in message] == [True]
