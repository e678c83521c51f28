"""The configurations of Hugging Face's models: each runs shrunk; wrong values are refused in a sentence."""

from __future__ import annotations

import pytest
import torch

from pipetrain.config.build import build
from pipetrain.config.choices import conf_dir
from pipetrain.data import declared_example, load_data
from pipetrain.errors import ConfigError
from pipetrain.model.specs import Size
from pipetrain.model.trial_tensors import made_up
from tests.support.cases import options_of, prepared

pytest.importorskip("transformers")

ATTENTION = ("num_hidden_layers=2", "hidden_size=16", "intermediate_size=32", "num_attention_heads=2")
SMALL: dict[str, tuple[str, ...]] = {
    "hf_bert": ATTENTION,
    "hf_convnext": ("depths=[1,1,1,1]", "hidden_sizes=[4,4,8,8]"),
    "hf_gpt2": ("n_layer=2", "n_embd=16", "n_head=2"),
    "hf_llama": (*ATTENTION, "num_key_value_heads=1"),
    "hf_resnet50": ("depths=[1,1,1,1]", "hidden_sizes=[8,8,8,8]", "embedding_size=4"),
    "hf_segformer": ("depths=[1,1,1,1]", "hidden_sizes=[8,8,8,8]", "decoder_hidden_size=8"),
    "hf_vit": ATTENTION,
}
DATA = {"hf_gpt2": "text", "hf_llama": "text", "hf_bert": "text", "hf_segformer": "shapes"}


def small(name: str, *words: str) -> list[str]:
    data = [f"data={DATA.get(name, 'digits')}", f"model={name}"]
    return [*data, *(f"model.config.{word}" for word in SMALL[name]), *words]


@pytest.mark.parametrize("name", [path.stem for path in sorted((conf_dir() / "model").glob("hf_*.yaml"))])
def test_takes_an_input_of_its_data(name):
    cfg = options_of(small(name))
    example = declared_example(cfg["data"], torch.float32) or load_data(cfg["data"]).facts.example
    assert build(cfg, "model")(*map(made_up, example.of(Size(2)).specs)).logits.shape[0] == 2


def test_the_vocabulary_and_the_length_are_those_of_the_data():
    model = build(options_of(small("hf_gpt2", "data.block=24", "data.vocabulary=70")), "model")
    assert model.transformer.wpe.weight.shape == (24, 16)
    assert model.lm_head.weight.shape == (70, 16)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "model.config.hidden_sise=3",
            r"model\.config cannot be built: transformers\.ViTConfig takes no hidden_sise; did you mean "
            r"hidden_size\? If not, leave it out with ~model\.config\.hidden_sise",
        ),
        (
            "model.config.num_hidden_layers=two",
            r"model cannot be built: \w+: Validation error for field "
            r"'num_hidden_layers': TypeError: Field 'num_hidden_layers' expected int, got str",
        ),
        ("model.confg=3", r"transformers\.ViTForImageClassification takes no confg; did you mean config\?"),
    ],
)
def test_wrong_values_are_refused(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(options_of(small("hf_vit", words)), "model")


@pytest.mark.slow
def test_another_size_of_image_is_refused():
    with pytest.raises(
        ConfigError, match=r"Input image size \(32\*32\) doesn't match model \(16\*16\): write"
    ):
        prepared(options_of(small("hf_vit", "model.config.image_size=16", "batch_size=8")), "1f1b", 2, 8)
