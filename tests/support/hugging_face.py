"""Hugging Face's models, tiny and with random weights. `of`: the module transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

VOCABULARY = 50
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2(of: Any, **options: Any) -> nn.Module:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
    return of.GPT2LMHeadModel(of.GPT2Config(**(sizes | TEXT | options)))


def llama(of: Any, **options: Any) -> nn.Module:
    sizes = {"num_key_value_heads": 1, "max_position_embeddings": 16}
    return of.LlamaForCausalLM(of.LlamaConfig(**(sizes | SMALL | TEXT | options)))


def bert(of: Any, **options: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
    return of.BertForSequenceClassification(of.BertConfig(**(sizes | SMALL | options)))


def vit(of: Any, **options: Any) -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 8}
    return of.ViTForImageClassification(of.ViTConfig(**(sizes | SMALL | options)))


def resnet(of: Any, **options: Any) -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 5}
    return of.ResNetForImageClassification(
        of.ResNetConfig(**(sizes | {"layer_type": "bottleneck"} | options))
    )


def convnext(of: Any, **options: Any) -> nn.Module:
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": 5}
    return of.ConvNextForImageClassification(of.ConvNextConfig(**(sizes | {"drop_path_rate": 0.5} | options)))


def segformer(of: Any, **options: Any) -> nn.Module:
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    sizes |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    sizes |= {"decoder_hidden_size": 16, "num_labels": 5, "drop_path_rate": 0.5}
    return of.SegformerForSemanticSegmentation(of.SegformerConfig(**(sizes | options)))
