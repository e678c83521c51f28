"""Experiments: what the file says, what the command line changes in it, and the record that stands beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from pipetrain.comparison import experiment, request
from pipetrain.comparison.experiment import merged
from pipetrain.comparison.methods import Method, of_schedule
from pipetrain.comparison.record import markdown, pairs
from pipetrain.comparison.runs import Spec
from pipetrain.comparison.table import make_rows
from pipetrain.errors import ConfigError
from tests.comparison.support import asked
from tests.comparison.test_table import outcome

STATIC = ["--method", "layer_dist", "--method", "pipedream", "--method", "pipedream_2bw"]


def specs(*arguments: str) -> list[Spec]:
    return asked("--experiment", "xdypipe", *arguments)


def config(spec: Spec) -> Any:
    with initialize_config_dir(str(request.conf_dir()), version_base="1.3"):
        return compose("config", overrides=spec.arguments)


def there(method: Method) -> bool:
    """Whether this checkout's configuration has what the method sets."""
    with initialize_config_dir(str(request.conf_dir()), version_base="1.3"):
        known = set(compose("config"))
    return {word.partition("=")[0].partition(".")[0] for word in method.overrides} <= known


def test_the_experiment_is_the_issue_s():
    found = experiment.load("xdypipe")
    assert [method.name for method in found.methods] == [
        *("layer_dist", "pipedream", "pipedream_2bw"),
        *("fbp", "fbp + topk", "fbp + int8", "fbp + topk + int8"),
    ]
    assert (list(found.models), found.nproc, len(found.seeds)) == (["vgg16", "resnet18"], 2, 3)


@pytest.mark.parametrize("method", experiment.load("xdypipe").methods, ids=lambda method: method.name)
@pytest.mark.parametrize("model", ["vgg16", "resnet18"])
def test_every_run_has_the_record_s_recipe(method, model):
    if method.schedule not in request.names("schedule") or not there(method):
        pytest.skip("this checkout has no such schedule or codec")
    cfg = config(next(s for s in specs("--method", method.name, "--models", model)))
    assert (cfg.data.name, cfg.data.fallback, cfg.data.workers, cfg.batch_size) == ("cifar10", None, 0, 64)
    assert (cfg.optim._target_, cfg.optim.lr, cfg.optim.momentum) == ("torch.optim.SGD", 0.01, 0.9)
    assert (cfg.optim.weight_decay, cfg.lr_schedule, cfg.warmup) == (5e-4, "constant", 0)
    assert (cfg.data.augment.crop, cfg.data.augment.flip) == (4, True)


@pytest.mark.parametrize(
    ("model", "crosses", "params"),
    [("vgg16", (256, 4, 4), (1.74, 12.99)), ("resnet18", (128, 16, 16), (0.68, 10.50))],
)
def test_the_cut_is_the_record_s(model, crosses, params):
    cfg = config(specs("--method", "layer_dist", "--models", model)[0])
    (cut,) = cfg.partition
    layers = instantiate(cfg.model).eval()
    assert tuple(layers[:cut](torch.zeros(1, 3, 32, 32)).shape[1:]) == crosses
    halves = (sum(p.numel() for p in half.parameters()) / 1e6 for half in (layers[:cut], layers[cut:]))
    assert tuple(round(half, 2) for half in halves) == params


def test_the_command_line_changes_what_it_names():
    some = specs(
        *STATIC, "--models", "vgg16", "--seeds", "0", "7", "data=digits", "epochs=2", "partition=[3]"
    )
    assert [(spec.method.name, spec.seed) for spec in some[:4]] == [
        *(("layer_dist", 0), ("pipedream", 0), ("pipedream_2bw", 0)),
        ("layer_dist", 7),
    ]
    assert {spec.model for spec in some} == {"vgg16"}
    words = some[0].overrides
    assert words[-3:] == ("data=digits", "epochs=2", "partition=[3]")
    assert "data=cifar10" not in words
    assert "partition=[7]" not in words
    assert "optim.lr=0.01" in words


def test_each_model_has_its_own_overrides():
    cuts = {spec.model: [w for w in spec.overrides if "partition" in w] for spec in specs(*STATIC)}
    assert cuts == {"vgg16": ["partition=[7]"], "resnet18": ["partition=[5]"]}
    assert not any("partition" in w for w in specs(*STATIC, "model=mlp")[0].overrides)


def test_a_schedule_that_is_no_row_of_it_may_join():
    named = specs("--schedules", "gpipe", "pipedream_2bw")
    assert [spec.method for spec in named[:2]] == [
        of_schedule("gpipe"),
        experiment.load("xdypipe").methods[2],
    ]


def test_later_words_replace_earlier_ones():
    assert merged(["a=1", "b=1"], ["+b=2"], ["c=3", "a=4"]) == ("+b=2", "c=3", "a=4")


def test_the_record_stands_beside_with_its_own_speedup_and_its_faults():
    done = {"best_val_acc": 0.9, "val_acc": 0.9, "best_epoch": 1, "epoch_s": 5.0}
    outcomes = [outcome(name, 0, **done) for name in ("layer_dist", "fbp + int8", "gpipe")]
    reported = experiment.load("xdypipe").record
    assert reported is not None
    found = pairs(make_rows(outcomes), reported)
    assert [(pair.ours.method, pair.speedup) for pair in found] == [
        *(("layer_dist", 1.0), ("fbp + int8", 21 / 12), ("fbp + int8", 3.0)),
        ("gpipe", None),
    ]
    text = markdown(make_rows(outcomes), reported)
    assert "| vgg16 | layer_dist | 90.00 |    90.00 |     5.0s |   1.00x | layer_dist " in text
    assert "ours quantized, 8 bit" in text
    assert "[4] labelled ResNet18, but an epoch of 12 s beside 1m15s says" in text
    assert "without weight stashing" not in text  # of a row that is not shown
    assert markdown(make_rows(outcomes[2:]), reported) == ""


def test_a_record_of_other_data_is_not_passed_off_as_comparable():
    done = {"best_val_acc": 0.9, "val_acc": 0.9, "best_epoch": 1, "epoch_s": 5.0}
    reported = experiment.load("xdypipe").record
    assert reported is not None
    text = markdown(make_rows([outcome("layer_dist", 0, **done, data="digits")]), reported)
    assert "not to be compared: ours are of digits, the record's of cifar10." in text
    assert "not to be compared" not in markdown(make_rows([outcome("layer_dist", 0, **done)]), reported)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("title: x", "must have methods: a name and a list of overrides each"),
        (
            "methods: {a: [schedule=gpipe]}\ncolour: red",
            "has colour, which means nothing; it may have methods, ",
        ),
        ("methods: {a: schedule=gpipe}", "method a must be a list of overrides such as epochs=5"),
        ("methods: {a: [epochs=2]}", "method a: a method needs one schedule=NAME"),
        ("methods: {a: [schedule=gpipe]}\nseeds: 3", "seeds must be a list of whole numbers; got 3"),
        ("methods: {a: [schedule=gpipe]}\nnproc: two", "nproc must be a whole number; got two"),
        ("methods: {a: [schedule=gpipe]}\nrecord: {rows: [{acc: 1}]}", "row 1 must say beside:"),
        (
            "methods: {a: [schedule=gpipe]}\nrecord: {rows: [{beside: [m, a], faults: [x]}]}",
            "record, row 1 has x, which is neither a column nor one of the faults",
        ),
        ("methods: [", "is no YAML: "),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_in_one_sentence(tmp_path: Path, text, why):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        experiment.load(str(path))
    assert why in str(error.value)
    assert "\n" not in str(error.value)
