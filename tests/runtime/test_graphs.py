"""What CUDA graphs need of weights, on a CPU. That they equal single launches is a row of gpu_check."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

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


@pytest.mark.parametrize(
    ("schedule", "words", "said"),
    [
        ("1f1b", (), "cuda_graphs=true needs a GPU"),
        ("1f1b", ("on_nan=skip",), "on_nan=skip needs other passes than CUDA graphs have captured"),
        ("zb_h1", (), "schedule zb_h1 splits backwards, and cuda_graphs=true runs them whole"),
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
