"""Hugging Face's models, with random weights, as networks of layers; those of test_any_module.py apart."""

from __future__ import annotations

from typing import Any

import pytest

from pipetrain.network.network import INPUT, Made
from tests.support.hugging_face import bert, convnext, resnet, segformer
from tests.support.tracing import assert_equal, images, tokens

BLOCKS = {
    resnet: [
        "resnet.embedder",
        "resnet.encoder.stages.0",
        "resnet.encoder.stages.1.layers.0",
        "resnet.encoder.stages.1.layers.1",
        "classifier.1",
    ],
    convnext: [
        "convnext.embeddings",
        "convnext.encoder.stages.0",
        "convnext.encoder.stages.1.downsampling_layer.1",
        "convnext.encoder.stages.1.layers.0",
        "convnext.encoder.stages.1.layers.1",
        "classifier",
    ],
    segformer: [
        "segformer.stages.0.patch_embeddings",
        "segformer.stages.0.blocks.0",
        "segformer.stages.1.patch_embeddings",
        "segformer.stages.1.blocks.0",
        "decode_head.linear_projections.0",
        "decode_head.linear_projections.1",
        "decode_head.linear_fuse",
        "decode_head.classifier",
    ],
}


@pytest.mark.parametrize("make", BLOCKS, ids=lambda make: make.__name__)
def test_layers_are_the_blocks(make: Any):
    network = assert_equal(make(pytest.importorskip("transformers")), images(32))
    assert network.names == BLOCKS[make]


def test_a_mask_by_keyword_travels_straight_to_each_block():
    network = assert_equal(bert(pytest.importorskip("transformers")), tokens("attention_mask", "input_ids"))
    mask = Made(0, 1)
    assert network.takes(0, ()) == (Made(INPUT, 0), Made(INPUT, 1))
    assert [mask in network.takes(k, ()) for k in range(5)] == [False, True, True, False, False]
