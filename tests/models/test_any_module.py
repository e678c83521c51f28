"""Modules as they are, over stages and schedules, against one process of plain PyTorch in float64.

Three updates of uneven microbatches and an evaluation: weights, buffers and losses must be the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipetrain import export
from tests.support import goes_on, subjects
from tests.support.parity import ADAMW, Way, compare
from tests.support.worlds import run_world

pytestmark = pytest.mark.slow

FLUSH, FLUSH_3 = Way("1f1b", 2), Way("gpipe", 3)
STASH_2, STASH = Way("pipedream_2bw", 2), Way("pipedream", 3)
VIRTUAL = Way("interleaved_1f1b", 2)
WAYS: dict[str, tuple[Way, ...]] = {
    "gpt2": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL, Way("1f1b", 2, ADAMW), Way("pipedream", 3, ADAMW)),
    "gpt2 untied, with dropout": (FLUSH, FLUSH_3, STASH_2, STASH),
    "llama": (FLUSH, STASH),
    "llama tied": (FLUSH_3, STASH_2, STASH),
    "bert": (FLUSH, FLUSH_3, STASH_2, STASH, Way("interleaved_1f1b", 2, ADAMW)),
    "vit": (FLUSH_3, STASH_2),
    "resnet50": (FLUSH, STASH),
    "convnext": (FLUSH, STASH),
    "segformer": (FLUSH, FLUSH_3, STASH_2, STASH),
    "transformer": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "two inputs": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "branches": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "branches with dropout": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "encoder": (FLUSH, FLUSH_3, STASH_2, STASH),
    "unet": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
}


@pytest.mark.parametrize("name", subjects.SUBJECTS)
def test_trains_as_one_process(name):
    subject = subjects.make(name)
    for way in WAYS[name]:
        compare(subject, way)


@pytest.mark.processes
def test_from_python_on_other_ranks_and_out_again(tmp_path, capsys):
    """Dicts in and out, a weight of two stages, tables that all blocks use; 2 ranks, then 3, then none."""
    whole = run_world(goes_on.begun, 2, str(tmp_path))
    rest = run_world(goes_on.gone_on, 3, str(tmp_path))
    model, wanted = goes_on.plain()
    for ranks, updates in ((whole, wanted.losses), (rest, wanted.losses[goes_on.SAVED :])):
        for ended in ranks:
            assert ended.losses == pytest.approx(updates, rel=1e-12)
            assert ended.evaluated["loss"] == pytest.approx(wanted.evaluated["loss"], rel=1e-12)
        assert list(ranks[0].state) == list(wanted.state)
        for name, values in wanted.state.items():
            np.testing.assert_allclose(ranks[0].state[name], values, rtol=1e-12, atol=1e-12)
    assert export.main([str(tmp_path), "--out", str(tmp_path / "weights")]) == 0
    assert "of update 2 in" in capsys.readouterr().out
    exported = torch.load(tmp_path / "weights.pt")
    assert exported.keys() == wanted.state.keys()
    model.load_state_dict(exported)
