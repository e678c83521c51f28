"""The command line: what it asks for, and what it refuses before anything starts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from comparison import request
from comparison.runs import words
from pipetrain.cli import quoted
from tests.comparison.support import asked, compare

ROOT = Path(__file__).parents[2]
REFUSED = {
    "": "there is nothing to compare: give --schedules, --method or --experiment",
    "--schedules gpipe 1f2b": "--schedules: there is no 1f2b; choose from 1f1b, ",
    "--schedules gpipe gpipe": "--schedules: gpipe is given twice",
    "--schedules gpipe --nproc 0": "--nproc must be 1 or more; got 0",
    "--schedules gpipe -- seed=3": "seed is set by --seeds; leave seed=3 out of the overrides",
    "--schedules gpipe -- +run_dir=x": "run_dir is set by --out;",
    "--schedules gpipe --models vgg16 -- model=mlp": "model is set by --models;",
    "--schedules gpipe -- --multirun": "after --: --multirun is no override, such as codec.backward=int8",
    "--method mine": "--method: there is no mine; say what it is: 'mine: schedule=...'",
    "--method 'mine: optim.lr=1'": "--method mine: a method needs one schedule=NAME among",
    "--method 'mine: schedule=gpipe seed=1'": "--method mine: a method cannot set seed;",
    "--method '+: schedule=gpipe'": "--method +: a method needs a name with letters or digits",
    "--method 'mine: schedule=1f2b'": "--method mine: there is no 1f2b; choose from 1f1b, ",
    "--method 'a b: schedule=gpipe' --method 'a+b: schedule=gpipe'": "2 methods would share the folder a_b;",
    "--method 'slow: schedule=gpipe optim.lr=0.1' optim.lr=1": "optim.lr is set by the method slow; leave ",
    "--experiment nothing": "--experiment: ",
    "--experiment no/such.yaml": "--experiment: no/such.yaml cannot be read: No such file or directory; "
    "choose from xdypipe, or FILE.yaml",
}
FOLDERS = {
    "": "default",
    "-- model=vgg16 data=digits epochs=5": "vgg16-digits-epochs_5",
    "--models vgg16 mlp -- ++optim.lr=0.1": "vgg16+mlp-optim.lr_0.1",
    "--nproc 4 -- partition=[3,6,9]": "partition_3_6_9_-nproc_4",
}


@pytest.mark.parametrize(("typed", "why"), REFUSED.items())
def test_what_cannot_be_meant_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, typed, why):
    monkeypatch.chdir(tmp_path)
    assert compare(*shlex.split(typed)) == 2
    assert capsys.readouterr().err.startswith(f"compare: {why}")
    assert not list(tmp_path.iterdir())


def test_the_folder_is_named_after_what_is_compared():
    for typed, folder in FOLDERS.items():
        out = request.read(["--schedules", "gpipe", *typed.split()]).out
        assert out == Path("comparisons") / folder


def test_runs_go_seed_by_seed_with_all_methods_of_a_seed_together():
    specs = asked("--schedules", "gpipe", "1f1b", "--models", "mlp", "vgg16", "--seeds", "3", "0")
    assert [spec.title for spec in specs] == [
        *("mlp gpipe seed 3", "mlp 1f1b seed 3", "vgg16 gpipe seed 3", "vgg16 1f1b seed 3"),
        *("mlp gpipe seed 0", "mlp 1f1b seed 0", "vgg16 gpipe seed 0", "vgg16 1f1b seed 0"),
    ]
    assert specs[0].name == "mlp-gpipe-seed3"


def test_the_command_that_makes_it_again_removes_nothing():
    made = request.read(["--fresh", "--schedules", "gpipe", "--out", "a b", "--fresh", "data=digits"])
    assert made.fresh
    assert made.typed == "--schedules gpipe --out 'a b' data=digits"


def test_a_run_has_the_words_that_a_user_would_type():
    (spec,) = asked("--schedules", "gpipe", "--", "stages=3", "epochs=2")
    assert spec.nproc == 3
    assert words(spec, Path("/a b/c")) == [
        *(
            "--nproc_per_node=3",
            "checkpoint.every=null",
            "stages=3",
            "epochs=2",
            "schedule=gpipe",
            "seed=0",
            "run_dir='/a b/c'",
        ),
    ]
    for path in ("/plain/path-1.0", "/it's", "/x=1,y", "/a\\'b", "/(1)"):
        assert OverridesParser.create().parse_override(f"run_dir={quoted(path)}").value() == path


@pytest.mark.processes
def test_the_comparison_never_imports_torch():
    code = (
        "import sys; from comparison import cli; from scipy.stats import ttest_ind; "
        "cli.request.read(['--schedules', 'gpipe', 'fbp']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", check=False).returncode == 0
