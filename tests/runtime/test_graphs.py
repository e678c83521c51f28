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
from tests.support.cases import Case, make_run, run_in_threads

WORDS = ("microbatches=3", "epochs=2", "window=2", "clip_grad_norm=0.1", "optim=adamw", "ema=0.9")


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_gradients_and_versions_at_fixed_addresses_train_alike(schedule):
    case = Case(schedule, 2, WORDS)
    plain, _ = run_in_threads(case)
    fixed: dict[int, set[int]] = {}
    train = Session.train

    def fix(self: Any, *args: Any, **kwargs: Any) -> Any:
        for index, stage in self.stages.items():
            if index not in fixed:  # after the first window all weights have had a gradient
                fixed[index] = set()
            elif not fixed[index]:
                fixed[index] = set(stage.weights.fix(self.engine.bounds[index].versions))
            if fixed[index]:
                assert stage.weights.storage(stage.weights.newest) in fixed[index]
        return train(self, *args, **kwargs)

    with patch.object(Session, "train", fix), patch.object(session, "Stage", GraphedStage):
        state, _ = run_in_threads(case)
    assert all(fixed.values())
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
