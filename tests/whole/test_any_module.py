"""Modules as they are, trained through Pipeline, against one process of plain PyTorch in float64.

Three updates of uneven microbatches and an evaluation: weights, buffers, losses and metrics must be the same,
and all ranks know the results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipetrain import Pipeline, export
from pipetrain.network.chain import network_of
from pipetrain.network.network import INPUT, Made
from pipetrain.network.values import ValueSpec
from tests.support import parity, subjects
from tests.support.parity import ADAMW, GROUPS, Way

pytestmark = [pytest.mark.slow, pytest.mark.processes]

FLUSH, FLUSH_3 = Way("1f1b"), Way("gpipe", ranks=3)
STASH_2, STASH = Way("pipedream_2bw", window=3), Way("pipedream", ranks=3)
VIRTUAL = Way("interleaved_1f1b", window=3)
CLIPPED = {"clip_grad_norm": 0.05, "ema": 0.6}
GROUPED = {"param_groups": GROUPS}
WAYS: dict[str, tuple[Way, ...]] = {
    "gpt2": (VIRTUAL, Way("pipedream", ranks=3, optimizer=ADAMW)),
    "gpt2 untied, with dropout": (STASH,),
    "llama": (STASH,),
    "llama tied": (STASH_2,),
    "bert": (Way("interleaved_1f1b", optimizer=ADAMW),),
    "vit": (FLUSH_3,),
    "resnet50": (STASH,),
    "convnext": (STASH_2,),
    "segformer": (FLUSH_3,),
    "transformer": (STASH,),
    "two inputs": (FLUSH_3, STASH_2, VIRTUAL),
    "branches": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "branches with dropout": (FLUSH_3, STASH),
    "encoder": (STASH,),
    "unet": (FLUSH_3, STASH_2, VIRTUAL),
}
SMALL: dict[str, tuple[Way, ...]] = {
    "mlp": (
        FLUSH,
        Way("gpipe", 4, window=2),
        Way("pipedream", 1, window=2),
        Way("1f1b", 4, by_step=True),
        Way("1f1b", options=GROUPED | CLIPPED),
    ),
    "normed": (Way("1f1b", 2), Way("pipedream", 2), Way("pipedream_2bw", 2, window=2, options=GROUPED)),
    "gpt": (FLUSH, STASH_2, VIRTUAL, Way("zb_h1"), Way("zbv", 4), Way("pipedream", 2, options=CLIPPED)),
    "tuples": (FLUSH, Way("pipedream", 2), VIRTUAL, Way("v_half", 4)),
    "regression": (FLUSH,),
    "factory": (FLUSH, Way("pipedream", 2, options={"ema": 0.6}, ranks=3)),
    "traced factory": (FLUSH, FLUSH_3),
}
"""These in one process too, where there are no virtual stages."""

BLOCKS = {
    "gpt2": ["transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"],
    "llama": ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "classifier"],
    "vit": ["vit.embeddings", "vit.layers.0", "vit.layers.1", "classifier"],
    "transformer": ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
    "encoder": ["lstm", "attention", "dense", "head"],
}
"""The layers of some."""


def trained(name: str, way: Way) -> dict[str, Any]:
    return parity.train(subjects.make(name), way)


@pytest.mark.parametrize("name", [*WAYS, *SMALL])
def test_trains_as_one_process(ranks, three, name):
    for way in (WAYS | SMALL)[name]:
        first, *others = (ranks if way.ranks == 2 else three)(trained, name, way)
        assert all(other == first for other in others)
        assert first["updates"] == 3


@pytest.mark.parametrize("name", SMALL)
def test_alone_too(name):
    for way in SMALL[name]:
        if way.schedule not in ("interleaved_1f1b", "zbv", "v_half"):
            trained(name, way)


@pytest.mark.parametrize("name", BLOCKS)
def test_layers_are_the_blocks(name):
    subject = subjects.make(name)
    network = network_of(subject.model, ValueSpec.in_batch(subject.batches[0][0]))
    assert network.names == BLOCKS[name]
    if name == "bert":  # a mask by keyword travels straight to each block
        mask = Made(0, 1)
        assert network.takes(0, ()) == (Made(INPUT, 0), Made(INPUT, 1))
        assert [mask in network.takes(k, ()) for k in range(5)] == [False, True, True, False, False]


# From Python, on other ranks, and out again


def llama(schedule: str) -> tuple[Pipeline, Any]:
    """With one weight for the embedding and the head, and tables that all blocks use."""
    subject, way = subjects.make("llama tied"), FLUSH
    options = {"seed": parity.SEED, "lr_schedule": parity.falling, "device": "cpu", "threads": 1}
    given = subject.model, subject.task, way.optimizer, schedule
    return Pipeline(*given, microbatches=way.microbatches, partition="even", **options), subject


def begun(folder: str) -> None:
    pipe, subject = llama("1f1b")
    with pipe:
        list(pipe.train(subject.batches[:2]))
        pipe.save(folder)


def test_it_goes_on_on_one_rank_with_another_schedule_and_is_exported(ranks, tmp_path, capsys):
    told, _ = ranks(trained, "llama tied", FLUSH)
    ranks(begun, str(tmp_path))
    pipe, subject = llama("gpipe")
    with pipe:
        pipe.load(tmp_path)
        saved = pipe.state_dict()
        assert list(pipe.train(subject.batches[2:])) == pytest.approx(told["losses"][2:], rel=1e-11)
        assert pipe.evaluate(subject.batches)["loss"] == pytest.approx(told["evaluation"]["loss"], rel=1e-11)
    assert export.main([str(tmp_path), "--out", str(tmp_path / "weights")]) == 0
    assert "of update 2 in" in capsys.readouterr().out
    exported = load_file(tmp_path / "weights" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    subject.model.load_state_dict(exported)
