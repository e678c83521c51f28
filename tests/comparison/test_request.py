"""The command line and experiments: what they ask for, and what they refuse before anything starts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate

from comparison import request
from comparison.request import load, merged
from comparison.runs import words
from pipetrain.commands.cli import quoted
from tests.comparison.support import asked, compare
from tests.support.cases import config

ROOT = Path(__file__).parents[2]
CODECS = {  # of gradients
    "fbp + topk": "TopK",
    "fbp + threshold": "Threshold",
    "fbp + int8": "Int8",
    "fbp + topk + int8": "TopKInt8",
}
WORKERS = "fbp + 2 workers"
REFUSED = {
    "": "there is nothing to compare: give --schedules, --method or --experiment",
    "--schedules gpipe gpipe": "two runs would share the folder gpipe-seed0",
    "--method 'a b: schedule=gpipe' --method 'a+b: schedule=gpipe'": "two runs would share the folder a_b",
    "--schedules gpipe --nproc 0": "--nproc=0 must be a whole number of at least 1",
    "--schedules gpipe --seeds 0 -1": "--seeds=-1 must be a whole number of at least 0",
    "--schedules gpipe --models vgg16 -- model=mlp": "model is set by --models;",
    "--method 'mine: schedule=gpipe seed=1'": "seed is set by --seeds;",
    "--schedules gpipe -- --multirun": "method gpipe: --multirun cannot be read: ",
    "--schedules gpipe model=mpl": "method gpipe: there is no model/mpl: did you mean mlp? choose one of ",
    "--schedules 1f1b --method 'mine: schedule=gpip'": "method mine: there is no schedule/g",
    "--method 'mine: schedule=gpipe nope=2'": "method mine: there is no nope in the configuration",
    "--method mine": "--method: there is no mine; say what it is: 'mine: schedule=...'",
    "--method 'mine: schedule=gpipe epochs=2' epochs=3": "method mine: it has epochs=2, and epochs=3",
    "--experiment xdypipe_full buffer_size=2": "method fbp: it has buffer_size=4, and buffer_size=2",
    "--experiment no/such.yaml": "--experiment no/such.yaml: [Errno 2] No such file",
    "--experiment wrong.yaml": "--experiment wrong.yaml: Key 'colour' not in 'Experiment'",
    "--experiment empty.yaml": "empty.yaml: an experiment needs methods, a list of overrides each, and seeds",
}


@pytest.mark.parametrize(("typed", "why"), REFUSED.items())
def test_what_cannot_be_meant_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, typed, why):
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text("title: x")
    Path("wrong.yaml").write_text("methods: {a: [schedule=gpipe]}\ncolour: red")
    assert compare(*shlex.split(typed)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"compare: {why}")
    assert said.count("\n") == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_runs_go_seed_by_seed_into_a_folder_named_after_what_is_compared():
    for typed, folder in {
        "": "default",
        "--models vgg16 mlp -- ++optim.lr=0.1": "vgg16+mlp-optim.lr_0.1",
        "--nproc 4 -- model=vgg16 partition=[3,6,9]": "model_vgg16-partition_3_6_9_-nproc_4",
    }.items():
        assert request.read(["--schedules", "gpipe", *typed.split()]).out == Path("comparisons") / folder
    specs = asked("--schedules", "gpipe", "1f1b", "--models", "mlp", "vgg16", "--seeds", "3", "0")
    assert [spec.title for spec in specs] == [
        *("mlp gpipe seed 3", "mlp 1f1b seed 3", "vgg16 gpipe seed 3", "vgg16 1f1b seed 3"),
        *("mlp gpipe seed 0", "mlp 1f1b seed 0", "vgg16 gpipe seed 0", "vgg16 1f1b seed 0"),
    ]
    assert specs[0].name == "mlp-gpipe-seed3"


def test_a_run_has_the_words_that_a_user_would_type_and_to_make_it_again_removes_nothing():
    (spec,) = asked("--schedules", "gpipe", "--", "stages=3", "epochs=2")
    typed = "--nproc_per_node=3 checkpoint.every=null stages=3 epochs=2 schedule=gpipe seed=0 "
    assert shlex.join(words(spec, Path("/a/c"))) == typed + "run_dir=/a/c"
    for path in ("/plain/path-1.0", "/it's", "/x=1,y", "/a\\'b", "/(1)"):
        assert OverridesParser.create().parse_override(f"run_dir={quoted(path)}").value() == path
    made = request.read(["--fresh", "--schedules", "gpipe", "--out", "a b", "--fresh", "data=digits"])
    assert (made.fresh, made.typed) == (True, "--schedules gpipe --out 'a b' data=digits")


@pytest.mark.processes
def test_the_comparison_never_imports_torch():
    code = (
        "import sys; from comparison import cli; from scipy.stats import ttest_ind; "
        "cli.request.read(['--schedules', 'gpipe', 'fbp']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", check=False).returncode == 0


# The published experiment


def test_every_run_of_the_experiment_has_the_record_s_recipe():
    found = load("xdypipe_full")
    assert [*found.methods] == ["layer_dist", "pipedream", "pipedream_2bw", "fbp", WORKERS, *CODECS]
    assert (list(found.models), found.nproc, len(found.seeds)) == (["vgg16", "resnet18"], 2, 3)
    for spec in asked("--experiment", "xdypipe_full", "--seeds", "0", "--models", "vgg16")[-5:]:
        cfg = config(spec.arguments)
        data = (cfg.data.name, cfg.data.fallback, cfg.data.workers, cfg.batch_size)
        assert data == ("cifar10", None, 2 if spec.method.name == WORKERS else 0, 64)
        assert (cfg.optim._target_, cfg.optim.lr, cfg.optim.momentum) == ("torch.optim.SGD", 0.01, 0.9)
        assert (cfg.optim.weight_decay, cfg.lr_schedule, cfg.warmup) == (5e-4, "constant", 0)
        assert (cfg.data.augment.crop, cfg.data.augment.flip) == (4, True)
        assert cfg.codec.forward._target_ == "pipetrain.codec.Identity"
        assert cfg.codec.backward._target_ == f"pipetrain.codec.{CODECS.get(spec.method.name, 'Identity')}"


@pytest.mark.parametrize(
    ("model", "crosses", "params"),
    [("vgg16", (256, 4, 4), (1.74, 12.99)), ("resnet18", (128, 16, 16), (0.68, 10.50))],
)
def test_the_cut_is_the_record_s(model, crosses, params):
    cfg = config(
        asked("--experiment", "xdypipe_full", "--method", "layer_dist", "--models", model)[0].arguments
    )
    (cut,) = cfg.partition
    layers = instantiate(cfg.model).eval()
    assert tuple(layers[:cut](torch.zeros(1, 3, 32, 32)).shape[1:]) == crosses
    halves = (sum(p.numel() for p in half.parameters()) / 1e6 for half in (layers[:cut], layers[cut:]))
    assert tuple(round(half, 2) for half in halves) == params


def test_the_command_line_changes_what_it_names_and_each_model_has_its_own_overrides():
    typed = "--experiment xdypipe_full --schedules layer_dist fbp --models vgg16 --seeds 0 7"
    some = asked(*typed.split(), "data=digits", "epochs=2", "partition=[3]")
    assert [spec.title for spec in some] == [
        f"vgg16 {method} seed {seed}" for seed in (0, 7) for method in ("layer_dist", "fbp")
    ]
    found = some[0].overrides
    assert found[-3:] == ("data=digits", "epochs=2", "partition=[3]")
    assert not {"data=cifar10", "partition=[7]"} & {*found}
    assert "optim.lr=0.01" in found
    cuts = {
        spec.model: [w for w in spec.overrides if "partition" in w]
        for spec in asked("--experiment", "xdypipe_full", "--schedules", "fbp")
    }
    assert cuts == {"vgg16": ["partition=[7]"], "resnet18": ["partition=[5]"]}
    assert merged(["a=1", "b=1"], ["+b=2"], ["c=3", "a=4"]) == ("+b=2", "c=3", "a=4")
