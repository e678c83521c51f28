"""Experiments: what the file says, and what the command line changes in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from comparison.request import Spec, load, merged
from pipetrain.errors import ConfigError
from tests.comparison.support import asked
from tests.support.cases import config

CODECS = {"fbp + topk": "TopK", "fbp + int8": "Int8", "fbp + topk + int8": "TopKInt8"}  # of gradients


def specs(*arguments: str) -> list[Spec]:
    return asked("--experiment", "xdypipe", *arguments)


def test_the_experiment_is_the_issue_s():
    found = load("xdypipe")
    assert list(found.methods) == [
        *("layer_dist", "pipedream", "pipedream_2bw"),
        *("fbp", "fbp + topk", "fbp + int8", "fbp + topk + int8"),
    ]
    assert (list(found.models), found.nproc, len(found.seeds)) == (["vgg16", "resnet18"], 2, 3)


@pytest.mark.parametrize("spec", specs("--seeds", "0", "--models", "vgg16")[3:], ids=lambda spec: spec.title)
def test_every_run_has_the_record_s_recipe(spec):
    cfg = config(spec.arguments)
    assert (cfg.data.name, cfg.data.fallback, cfg.data.workers, cfg.batch_size) == ("cifar10", None, 0, 64)
    assert (cfg.optim._target_, cfg.optim.lr, cfg.optim.momentum) == ("torch.optim.SGD", 0.01, 0.9)
    assert (cfg.optim.weight_decay, cfg.lr_schedule, cfg.warmup) == (5e-4, "constant", 0)
    assert (cfg.data.augment.crop, cfg.data.augment.flip) == (4, True)
    assert cfg.schedule._target_.startswith("pipetrain.schedule.")
    assert cfg.codec.forward._target_ == "pipetrain.codec.Identity"
    name = CODECS.get(spec.method.name, "Identity")
    assert cfg.codec.backward._target_ == f"pipetrain.codec.{name}"


@pytest.mark.parametrize(
    ("model", "crosses", "params"),
    [("vgg16", (256, 4, 4), (1.74, 12.99)), ("resnet18", (128, 16, 16), (0.68, 10.50))],
)
def test_the_cut_is_the_record_s(model, crosses, params):
    cfg = config(specs("--method", "layer_dist", "--models", model)[0].arguments)
    (cut,) = cfg.partition
    layers = instantiate(cfg.model).eval()
    assert tuple(layers[:cut](torch.zeros(1, 3, 32, 32)).shape[1:]) == crosses
    halves = (sum(p.numel() for p in half.parameters()) / 1e6 for half in (layers[:cut], layers[cut:]))
    assert tuple(round(half, 2) for half in halves) == params


def test_the_command_line_changes_what_it_names():
    some = specs(
        *("--schedules", "layer_dist", "fbp", "--models", "vgg16", "--seeds", "0", "7"),
        *("data=digits", "epochs=2", "partition=[3]"),
    )
    assert [(spec.method.name, spec.seed) for spec in some] == [
        *(("layer_dist", 0), ("fbp", 0)),
        *(("layer_dist", 7), ("fbp", 7)),
    ]
    assert {spec.model for spec in some} == {"vgg16"}
    words = some[0].overrides
    assert words[-3:] == ("data=digits", "epochs=2", "partition=[3]")
    assert "data=cifar10" not in words
    assert "partition=[7]" not in words
    assert "optim.lr=0.01" in words


def test_each_model_has_its_own_overrides():
    cuts = {spec.model: [w for w in spec.overrides if "partition" in w] for spec in specs()}
    assert cuts == {"vgg16": ["partition=[7]"], "resnet18": ["partition=[5]"]}
    assert not any("partition" in w for w in specs("model=mlp")[0].overrides)


def test_later_words_replace_earlier_ones():
    assert merged(["a=1", "b=1"], ["+b=2"], ["c=3", "a=4"]) == ("+b=2", "c=3", "a=4")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("title: x", "an experiment needs methods"),
        ("methods: {a: [schedule=gpipe]}\ncolour: red", "colour: Key 'colour' not in 'Experiment'"),
        ("methods: {a: schedule=gpipe}", "methods.a: Value 'schedule=gpipe' (str) is incompatible with"),
        ("methods: {a: [epochs=2]}", "method a: a method needs one schedule=NAME"),
        ("methods: {a: [schedule=gpipe]}\noverrides: [epochs]", "epochs is no override"),
        ("methods: {a: [schedule=gpipe]}\nseeds: 3", "seeds: "),
        (
            "methods: {a: [schedule=gpipe]}\nseeds: []",
            "an experiment needs methods, a list of overrides each",
        ),
        ("methods: {a: [schedule=gpipe]}\nnproc: two", "nproc: Value 'two' of type 'str' could not be conv"),
        ("methods: [", "is no YAML: "),
        ("- a", "Cannot merge DictConfig with ListConfig"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_in_one_sentence(tmp_path: Path, text, why):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(str(path))
    assert why in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
