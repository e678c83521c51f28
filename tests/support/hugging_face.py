"""Hugging Face's models, tiny and with random weights. `of`: the module transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

VOCABULARY = 50
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
POSITIONS = {"max_position_embeddings": 16}
CONVOLUTIONS = {"hidden_sizes": [8, 16], "depths": [1, 2]}
SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
SEGFORMER |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
SEGFORMER |= {"decoder_hidden_size": 16, "num_labels": 5, "drop_path_rate": 0.5}


def _make(family: str, head: str, sizes: dict[str, Any], of: Any, **options: Any) -> nn.Module:
    return getattr(of, family + head)(getattr(of, f"{family}Config")(**(sizes | options)))


GPT2 = TEXT | {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
gpt2 = partial(_make, "GPT2", "LMHeadModel", GPT2)
llama = partial(_make, "Llama", "ForCausalLM", SMALL | TEXT | POSITIONS | {"num_key_value_heads": 1})
bert = partial(_make, "Bert", "ForSequenceClassification", SMALL | POSITIONS | {"vocab_size": VOCABULARY})
vit = partial(_make, "ViT", "ForImageClassification", SMALL | {"image_size": 16, "patch_size": 8})
RESNET = CONVOLUTIONS | {"embedding_size": 8, "num_labels": 5, "layer_type": "bottleneck"}
resnet = partial(_make, "ResNet", "ForImageClassification", RESNET)
CONVNEXT = CONVOLUTIONS | {"num_stages": 2, "num_labels": 5, "drop_path_rate": 0.5}
convnext = partial(_make, "ConvNext", "ForImageClassification", CONVNEXT)
segformer = partial(_make, "Segformer", "ForSemanticSegmentation", SEGFORMER)
