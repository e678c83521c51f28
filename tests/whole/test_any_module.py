"""Modules as they are, trained through Pipeline, against one process of plain PyTorch in float64.

Three updates of uneven microbatches and an evaluation: weights, buffers, losses and metrics must be the same,
and all ranks know the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipetrain import Pipeline
from pipetrain.commands import export
from tests.support import model_zoo, parity
from tests.support.parity import ADAMW, GROUPS, Way

pytestmark = [pytest.mark.slow, pytest.mark.processes]

FLUSH, FLUSH_3, STASH = Way("1f1b"), Way("gpipe", ranks=3), Way("pipedream")
STASH_2, VIRTUAL = Way("pipedream_2bw", window=3), Way("interleaved_1f1b", window=3)
ALONE = Way("interleaved_1f1b", ranks=1)  # two stages, and one trace, which is most of the time
CLIPPED = {"clip_grad_norm": 0.05, "ema": 0.6}
GROUPED = {"param_groups": GROUPS}
WAYS: dict[str, tuple[Way, ...]] = {
    "gpt2": (Way("interleaved_1f1b", optimizer=ADAMW),),
    "gpt2 untied, with dropout": (ALONE,),
    "llama": (ALONE,),
    "bert": (ALONE,),
    "vit": (ALONE,),
    "resnet": (ALONE,),
    "convnext": (ALONE,),
    "segformer": (ALONE,),
    "transformer": (ALONE,),
    "two inputs": (FLUSH_3, STASH_2),
    "branches": (STASH, VIRTUAL),
    "branches with dropout": (Way("pipedream", ranks=3),),
    "encoder": (ALONE,),
    "unet": (FLUSH_3, STASH_2, VIRTUAL),
    "bert, lengths": (ALONE,),
    "resnet, lengths": (ALONE,),
}
SMALL: dict[str, tuple[Way, ...]] = {
    "mlp": (
        Way("gpipe", 4, window=2),
        Way("pipedream", 1, window=2),
        Way("1f1b", 4, by_step=True),
        Way("1f1b", options=GROUPED | CLIPPED),
    ),
    "normed": (
        Way("1f1b", 2),
        Way("pipedream", 2),
        Way("ssp", 2),
        Way("pipedream_2bw", 2, window=2, options=GROUPED),
    ),
    "gpt": (FLUSH, Way("zb_h1"), Way("zbv", 4), Way("pipedream", 2, options=CLIPPED)),
    "gpt, lengths": (Way("zbv", 4), Way("pipedream", ranks=3), Way("pipedream_2bw", 2, window=3)),
    "tuples": (Way("pipedream", 2), VIRTUAL, Way("v_half", 4)),
    "factory": (FLUSH, Way("pipedream", 2, options={"ema": 0.6}, ranks=3)),
    "traced factory": (FLUSH,),
}
"""These in one process too, where there are no virtual stages."""

BLOCKS = {
    "gpt2": ["transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "classifier"],
    "encoder": ["lstm", "attention", "dense", "head"],
}
"""The layers of some."""


def trained(name: str, way: Way) -> dict[str, Any]:
    return parity.train(model_zoo.make(name), way)


def alone(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return [function(*arguments)]


@pytest.mark.parametrize("name", [*WAYS, *SMALL])
def test_trains_as_one_process(ranks, three, name):
    for way in (WAYS | SMALL)[name]:
        virtual = way.schedule in ("interleaved_1f1b", "zbv", "v_half")
        for size in {way.ranks, 1} if name in SMALL and not virtual else {way.ranks}:
            first, *others = {1: alone, 2: ranks, 3: three}[size](trained, name, way)
            assert all(other == first for other in others)
            assert first["updates"] == 3
            assert first["layers"] == BLOCKS.get(name, first["layers"])


# From Python, on other ranks, and out again


def two_inputs(schedule: str) -> tuple[Pipeline, Any]:
    """With one weight in two layers."""
    subject, way = model_zoo.make("two inputs"), FLUSH
    options = {"seed": parity.SEED, "lr_schedule": parity.falling, "device": "cpu", "threads": 1}
    given = subject.model, subject.task, way.optimizer, schedule
    return Pipeline(*given, microbatches=way.microbatches, partition="even", **options), subject


def begun(folder: str) -> None:
    pipe, subject = two_inputs("1f1b")
    with pipe:
        list(pipe.train(subject.batches[:2]))
        pipe.save(folder)


def test_it_goes_on_on_one_rank_with_another_schedule_and_is_exported(ranks, tmp_path, capsys):
    whole, subject = two_inputs("1f1b")
    with whole:
        losses, evaluation = list(whole.train(subject.batches)), whole.evaluate(subject.batches)
    ranks(begun, str(tmp_path))
    pipe, subject = two_inputs("gpipe")
    with pipe:
        pipe.load(tmp_path)
        saved = pipe.state_dict()
        assert list(pipe.train(subject.batches[2:])) == pytest.approx(losses[2:], rel=1e-11)
        assert pipe.evaluate(subject.batches)["loss"] == pytest.approx(evaluation["loss"], rel=1e-11)
    assert export.main([str(tmp_path), "--out", str(tmp_path / "weights")]) == 0
    assert "of update 2 in" in capsys.readouterr().out
    exported = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    subject.model.load_state_dict(exported)
