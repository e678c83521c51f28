"""What CUDA graphs need of weights, on a CPU. That they equal single launches is a row of gpu_check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipetrain.errors import ConfigError
from pipetrain.runtime import session
from pipetrain.runtime.graphs import GraphedStage
from pipetrain.runtime.session import Session
from tests.runtime.test_rehearsal import rehearsed
from tests.support.cases import Case, make_run, run_in_threads

WORDS = ("microbatches=3", "epochs=2", "window=2", "clip_grad_norm=0.1", "optim=adamw", "ema=0.9")


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_gradients_and_versions_at_fixed_addresses_train_alike(schedule):
    """A rehearsal, and what follows on its first one, but for the capture itself."""
    case, fixed = Case(schedule, 2, WORDS), dict[int, set[int]]()
    plain, _ = run_in_threads(case)

    def fix(self: GraphedStage, slots: int, versions: int) -> None:
        fixed[self.index] = set(self.weights.fix(versions))

    train = Session.train

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        for index, stage in self.stages.items():
            assert stage.weights.storage(stage.weights.newest) in fixed[index]
        return result

    with (
        rehearsed(),
        patch.object(session, "Stage", GraphedStage),
        patch.object(GraphedStage, "capture", fix),
        patch.object(Session, "train", trained),
    ):
        state, _ = run_in_threads(case)
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, state[name])] == []


class Recorded(TorchDispatchMode):
    """A graph of the CPU: operations that are noted, undone, and run again on the same tensors."""

    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, Any]] = []
        self.undo: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_passes_that_are_replayed_train_alike(schedule, monkeypatch):
    case = Case(schedule, 2, ("microbatches=4", "window=1", "epochs=1", "partition=even", "dtype=float32"))
    plain, _ = run_in_threads(case)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(Recorded, "replays", 0)
    train, kept = Session.train, list[Any]()

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        kept.extend(one for stage in self.stages.values() for one in stage._example)
        return result

    with (
        rehearsed(),
        patch.object(session, "Stage", GraphedStage),
        patch.object(Session, "train", trained),
    ):
        state, _ = run_in_threads(case)
    assert kept == []  # though the short batch at the end was rehearsed after the capture
    assert Recorded.replays > 0
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, state[name])] == []


@pytest.mark.parametrize(
    ("schedule", "words", "said"),
    [
        ("1f1b", (), "cuda_graphs=true needs a GPU"),
        ("1f1b", ("on_nan=skip",), "on_nan=skip needs other passes than CUDA graphs have captured"),
        (
            "1f1b",
            ("model._target_=tests.support.models.dropping",),
            "layer .* draws random numbers, and cuda_graphs=true would repeat them",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused(schedule, words, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "GPU" not in said)
    with pytest.raises(ConfigError, match=said):
        make_run(Case(schedule, 2, ("microbatches=3", "cuda_graphs=true", *words)))
