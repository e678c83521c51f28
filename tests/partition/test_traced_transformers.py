"""Hugging Face's models, with random weights, as networks of layers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipetrain.boundary import Example
from pipetrain.partition.network import INPUT, Made
from tests.support.tracing import assert_equal, images, tokens

TEXT = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2(of: Any) -> nn.Module:
    config = of.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, **TEXT)
    return of.GPT2LMHeadModel(config)


def llama(of: Any) -> nn.Module:
    return of.LlamaForCausalLM(
        of.LlamaConfig(num_key_value_heads=1, max_position_embeddings=16, **SMALL, **TEXT)
    )


def bert(of: Any) -> nn.Module:
    return of.BertForSequenceClassification(of.BertConfig(vocab_size=50, max_position_embeddings=16, **SMALL))


def vit(of: Any) -> nn.Module:
    return of.ViTForImageClassification(of.ViTConfig(image_size=16, patch_size=8, **SMALL))


def resnet(of: Any) -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}
    return of.ResNetForImageClassification(of.ResNetConfig(layer_type="bottleneck", num_labels=5, **sizes))


def convnext(of: Any) -> nn.Module:
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}
    return of.ConvNextForImageClassification(of.ConvNextConfig(drop_path_rate=0.5, num_labels=5, **sizes))


def segformer(of: Any) -> nn.Module:
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    sizes |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    config = of.SegformerConfig(decoder_hidden_size=16, num_labels=5, drop_path_rate=0.5, **sizes)
    return of.SegformerForSemanticSegmentation(config)


BLOCKS = {
    gpt2: ["transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"],
    llama: ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
    bert: ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "classifier"],
    vit: ["vit.embeddings", "vit.layers.0", "vit.layers.1", "classifier"],
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
    example: Example = tokens("input_ids") if make in (gpt2, llama, bert) else images(32)
    if make is vit:
        example = images(16)
    # Traced, Llama's attention has a mask rather than a flag, and its kernel adds in another order.
    network = assert_equal(make(pytest.importorskip("transformers")), example, exact=make is not llama)
    assert network.names == BLOCKS[make]


def test_a_mask_by_keyword_travels_straight_to_each_block():
    network = assert_equal(bert(pytest.importorskip("transformers")), tokens("attention_mask", "input_ids"))
    mask = Made(0, 1)
    assert network.takes(0, ()) == (Made(INPUT, 0), Made(INPUT, 1))
    assert [mask in network.takes(k, ()) for k in range(5)] == [False, True, True, False, False]
