"""Experiments: what the file says, what the command line changes in it, and the record that stands beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from comparison.request import Record, Spec, load, make_method, merged
from comparison.table import beside, make_rows
from pipetrain.errors import ConfigError
from tests.comparison.support import asked, of_schedule
from tests.comparison.test_table import DONE, outcome
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


def test_a_schedule_that_is_no_row_of_it_may_join():
    named = specs("--schedules", "gpipe", "pipedream_2bw")
    assert [spec.method for spec in named[:2]] == [
        of_schedule("gpipe"),
        make_method("pipedream_2bw", load("xdypipe").methods["pipedream_2bw"], ""),
    ]


def test_later_words_replace_earlier_ones():
    assert merged(["a=1", "b=1"], ["+b=2"], ["c=3", "a=4"]) == ("+b=2", "c=3", "a=4")


def record() -> Record:
    known = load("xdypipe").record
    assert known is not None
    return known


def beside_record(*names: str, **more: object) -> str:
    table = beside(make_rows([outcome(name, 0, **DONE, **more) for name in names]), record())
    return table.markdown() if table else ""


def test_the_record_stands_beside_with_its_own_speedup_and_its_faults():
    text = beside_record("layer_dist", "fbp + int8", "gpipe")
    assert "| vgg16 | layer_dist | 90.00 |    90.00 |     5.0s |   1.00x | layer_dist " in text
    assert "[4] labelled ResNet18, but an epoch of 12 s beside 1m15s says" in text
    said = " ".join(text.split())
    assert "| ours quantized, 8 bit | vgg16 | 2080*2 | - | 8/4 | 171 | 91.36 | 7.0s | 3.00x |" in said
    assert "without weight stashing" not in text  # of a row that is not shown
    assert beside_record("gpipe") == ""


@pytest.mark.parametrize(
    ("methods", "speedups"),
    [
        (["fbp + int8", "layer_dist"], ["1.00x", "1.71x", "0.57x"]),
        (["fbp", "layer_dist"], ["-", "-"]),  # the record's fbp on vgg16 has no time
        (["gpipe", "layer_dist"], ["-", "-"]),  # and no gpipe at all
    ],
)
def test_the_record_is_measured_by_what_stands_beside_our_first_row(methods, speedups):
    table = beside(make_rows([outcome(name, 0, **DONE) for name in methods]), record())
    assert table is not None
    assert [line[-2] for line in table.lines] == speedups


def test_a_record_of_other_data_is_not_passed_off_as_comparable():
    assert "not to be compared: ours are of digits, the record's of cifar10." in beside_record(
        "layer_dist", data="digits"
    )
    assert "not to be compared" not in beside_record("layer_dist")


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
        ("methods: {a: [schedule=gpipe]}\nrecord: {rows: [{acc: 1}]}", "record.rows[0].beside: "),
        (
            "methods: {a: [schedule=gpipe]}\nrecord: {rows: [{beside: [m, a], faults: [x]}]}",
            "x is none of the record's faults",
        ),
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
