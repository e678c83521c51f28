"""Modules as they are, over stages and schedules, against one process of plain PyTorch in float64.

Three updates of uneven microbatches and an evaluation: weights, buffers and losses must be the same.
"""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from pipetrain import export
from pipetrain.network.network import INPUT, Made
from tests.support import goes_on, subjects
from tests.support.parity import ADAMW, Way, compare

pytestmark = pytest.mark.slow

FLUSH, FLUSH_3 = Way("1f1b", 2), Way("gpipe", 3)
STASH_2, STASH = Way("pipedream_2bw", 2), Way("pipedream", 3)
VIRTUAL = Way("interleaved_1f1b", 2)
WAYS: dict[str, tuple[Way, ...]] = {
    "gpt2": (FLUSH, STASH_2, STASH, VIRTUAL, Way("pipedream", 3, ADAMW)),
    "gpt2 untied, with dropout": (FLUSH_3, STASH),
    "llama": (STASH,),
    "llama tied": (FLUSH_3, STASH_2),
    "bert": (FLUSH_3, STASH_2, Way("interleaved_1f1b", 2, ADAMW)),
    "vit": (FLUSH_3, STASH_2),
    "resnet50": (FLUSH, STASH),
    "convnext": (STASH,),
    "segformer": (FLUSH_3, STASH),
    "transformer": (FLUSH, STASH, VIRTUAL),
    "two inputs": (FLUSH_3, STASH_2, VIRTUAL),
    "branches": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "branches with dropout": (FLUSH_3, STASH),
    "encoder": (FLUSH, STASH),
    "unet": (FLUSH_3, STASH_2, VIRTUAL),
}
"""Each a flush and a stash, on two ranks and on three; all of them the cheapest one."""


BLOCKS = {
    "gpt2": ["transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"],
    "llama": ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "classifier"],
    "vit": ["vit.embeddings", "vit.layers.0", "vit.layers.1", "classifier"],
    "transformer": ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
    "encoder": ["lstm", "attention", "dense", "head"],
}
"""The layers of some."""


@pytest.mark.parametrize("name", subjects.SUBJECTS)
def test_trains_as_one_process(name):
    subject = subjects.make(name)
    assert subject.network.names == BLOCKS.get(name, subject.network.names)
    for way in WAYS[name]:
        compare(subject, way)


def test_a_mask_by_keyword_travels_straight_to_each_block():
    network, mask = subjects.make("bert").network, Made(0, 1)
    assert network.takes(0, ()) == (Made(INPUT, 0), Made(INPUT, 1))
    assert [mask in network.takes(k, ()) for k in range(5)] == [False, True, True, False, False]


@pytest.mark.processes
def test_from_python_on_other_ranks_and_out_again(ranks, tmp_path, capsys):
    """Dicts in and out, a weight of two stages, tables that all blocks use; 2 ranks, then 1, then none."""
    whole = ranks(goes_on.begun, str(tmp_path))
    rest = [goes_on.gone_on(str(tmp_path))]
    model, wanted = goes_on.plain()
    for all_ended, updates in ((whole, wanted.losses), (rest, wanted.losses[goes_on.SAVED :])):
        for ended in all_ended:
            assert ended.losses == pytest.approx(updates, rel=1e-12)
            assert ended.evaluated["loss"] == pytest.approx(wanted.evaluated["loss"], rel=1e-12)
        assert list(all_ended[0].state) == list(wanted.state)
        for name, values in wanted.state.items():
            np.testing.assert_allclose(all_ended[0].state[name], values, rtol=1e-12, atol=1e-12)
    assert export.main([str(tmp_path), "--out", str(tmp_path / "weights")]) == 0
    assert "of update 2 in" in capsys.readouterr().out
    exported = load_file(tmp_path / "weights" / "model.safetensors")
    assert exported.keys() == wanted.state.keys()
    model.load_state_dict(exported)
