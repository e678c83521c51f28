"""That weights at fixed addresses train as others do."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from pipetrain.runtime.session import Session
from pipetrain.runtime.stage import stage_factory
from pipetrain.runtime.stage.cuda_graphs import GraphedStage
from tests.runtime.test_rehearsal import rehearsed
from tests.support.cases import Case
from tests.support.thread_ranks import run_in_threads

pytestmark = pytest.mark.slow

WORDS = ("microbatches=3", "epochs=2", "window=2", "clip_grad_norm=0.1", "optim=adamw", "ema=0.9")


@pytest.mark.parametrize("words", [("1f1b",), ("pipedream",), ("pipedream", "correction=msnag")])
def test_gradients_and_versions_at_fixed_addresses_train_alike(words):
    """A rehearsal, and what follows on its first one, but for the capture itself."""
    case, fixed = Case(words[0], 2, (*WORDS, *words[1:])), dict[int, set[int]]()
    plain, _ = run_in_threads(case)

    def fix(self: GraphedStage, slots: int, versions: int, why: str) -> None:
        self._examples.clear()
        fixed[self.index] = set(self.store.fix(versions))

    train = Session.train

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        for index, stage in self.stages.items():
            assert stage.store.storage(stage.store.newest) in fixed[index]
        return result

    with (
        rehearsed(),
        patch.object(stage_factory, "Stage", GraphedStage),
        patch.object(GraphedStage, "capture", fix),
        patch.object(Session, "train", trained),
    ):
        state, _ = run_in_threads(case)
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, state[name])] == []
