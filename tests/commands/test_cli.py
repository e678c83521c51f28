"""The command line: what composes, and what a slip of the pen is answered with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from pipetrain.commands.cli import as_hydra, compose, contained, values_of
from pipetrain.config.settings import Settings
from pipetrain.errors import ConfigError
from pipetrain.model.specs import TensorSpec
from tests.support.cases import config
from tests.support.processes import finished

QUIET = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
SWEPT = ["--multirun", "hydra.sweep.dir=.", "hydra.sweep.subdir=.", *QUIET[1:]]


@pytest.fixture(autouse=True)
def _apart(monkeypatch, tmp_path) -> Iterator[None]:
    """Each test composes in a folder of its own, and leaves neither Hydra nor the environment changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    handlers = logging.getLogger().handlers[:]
    yield
    GlobalHydra.instance().clear()
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def command(monkeypatch):
    """Give a function that composes a command line and returns (status, configurations of its jobs)."""

    def run(*words: str, flags: tuple[str, ...] = tuple(QUIET)) -> tuple[int, list[DictConfig]]:
        jobs: list[DictConfig] = []
        monkeypatch.setattr("sys.argv", ["pipetrain", *flags, *words])
        return compose("config", jobs.append), jobs

    return run


def test_overrides_reach_the_job(command, tmp_path):
    status, (cfg,) = command("data=digits", "batch_size=128", "optim.lr=0.5", "schedule=pipedream")
    assert not any(tmp_path.iterdir())  # no folder was wanted
    assert (status, cfg.batch_size, cfg.optim.lr, cfg.data.name) == (0, 128, 0.5, "digits")
    assert cfg.schedule._target_ == "pipetrain.schedule.programs.pipedream"


def test_a_codec_of_one_s_own_is_a_class_and_a_yaml(command, tmp_path):
    (tmp_path / "codec").mkdir()
    (tmp_path / "codec" / "signs.yaml").write_text("_target_: tests.support.models.Signs\nscale: 0.5\n")
    status, (cfg,) = command("codec.backward=signs", "codec.backward.scale=2", f"--config-dir={tmp_path}")
    codecs = Settings.composed(values_of(cfg), "1f1b", 2).codecs
    assert (status, str(codecs.backward), str(codecs.forward)) == (0, "Signs", "identity")
    encoded = codecs.backward.encode(torch.tensor([3.0, -1.0]))
    assert codecs.backward.decode(encoded, TensorSpec((2,), torch.float32)).tolist() == [2, -2]


@pytest.mark.parametrize(
    "words",
    [
        ("+tag=x", "run_dir=runs/${tag}", "+trace.windows=2"),  # an interpolation reads the tag
        ("partition.profile=p.json", "model.width=16", "optim.nesterov=true", "schedule.colour=red"),
        ("data=cifar10", "data.source.timeout=3", "data.augment.crop=1", "codec.forward.fraction=1"),
    ],
)
def test_what_something_reads_and_what_a_target_takes_needs_no_plus(command, words):
    status, (cfg,) = command(*words)
    assert status == 0
    assert cfg.optim.get("nesterov", True) is True


@pytest.mark.parametrize(("given", "level"), [("warning", 30), ("error", 40), ("INFO", 20), ("7", 20)])
def test_a_level_decides_what_is_logged_and_a_wrong_one_is_left_to_its_rule(command, given, level):
    logger = logging.getLogger("pipetrain")
    before = logger.level
    status, (cfg,) = command(f"log_level={given}", flags=(*QUIET[:2], QUIET[3]))
    assert (status, logger.level) == (0, level)
    logger.setLevel(before)
    if level == 20:
        with pytest.raises(ConfigError, match=f"log_level={given} must be one of info, warning, error"):
            Settings.composed(values_of(cfg), "1f1b", 2)


def test_hydra_s_own_spelling_and_values_that_speak_of_codecs_are_left_alone():
    words = ["codec@codec.forward=int8", "run_dir='runs/codec.forward=int8'", "codec.backward=int8,topk"]
    assert as_hydra(words) == [*words[:2], "codec@codec.backward=int8,topk"]
    assert as_hydra(["-m", "run_dir=x", "~codec.backward=topk"])[1:] == [
        "hydra.sweep.dir=x",
        "~codec@codec.backward=topk",
    ]


def test_flags_of_hydra_are_its_own_business_and_may_stand_anywhere(command, capsys, tmp_path):
    assert command("--cfg", "job", "batch_size=128", flags=()) == (0, [])
    assert "batch_size: 128" in capsys.readouterr().out
    status, (cfg,) = command("batch_size=3", "--config-dir", str(tmp_path), "~optim.momentum", "seed=1")
    assert (status, cfg.batch_size, cfg.seed, "momentum" in cfg.optim) == (0, 3, 1, False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--epochs 3",
            "--epochs cannot be read: options are written as epochs=3, flags as --FLAG=VALUE; see --help",
        ),
        (
            "model=mlp --batch-size=64 seed=1",
            "--batch-size=64 cannot be read: options are written as batch_size=64,",
        ),
        ("--learning-rate 0.1", "options are written as optim.lr=0.1,"),
        ("--gpus seed=0", "options are written as stages=VALUE,"),
        ("num_epochs 3", "num_epochs cannot be read: options are written as epochs=3,"),
        (
            "--foo",
            "--foo cannot be read: options are written as OPTION=VALUE, flags as --FLAG=VALUE; see --help",
        ),
    ],
)
def test_a_word_that_is_no_override_is_answered_with_what_it_may_mean(command, words, says):
    with pytest.raises(ConfigError) as error:
        command(*words.split())
    assert says in str(error.value)


@pytest.mark.parametrize(
    "name", ["größe", "a,b", "it's", 'a "b"', "a[b", "(1)", "1e3", "true", "a=b;c", "tail\\", "a\\'b"]
)
def test_a_folder_may_have_any_name_and_a_text_any_letters(command, tmp_path, name):
    other = f"x{name.replace(',', ';')}"  # which may be a sweep
    status, (cfg,) = command(f"run_dir={name}", "data=cifar10", f"data.root={other}")
    assert (status, cfg.run_dir, cfg.data.root) == (0, name, other)


def test_a_path_may_begin_at_home(command, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    _, (cfg,) = command("weights=~/it")
    assert cfg.weights == "/home/somebody/it"


@pytest.mark.parametrize("error", [ConfigError("mine"), ZeroDivisionError("mine")])
def test_a_job_s_error_comes_as_it_is_and_ends_the_sweep(monkeypatch, capsys, error):
    seen: list[int] = []

    def fail(cfg: DictConfig) -> None:
        seen.append(cfg.seed)
        raise error

    monkeypatch.setattr("sys.argv", ["pipetrain", *SWEPT, "seed=1,2"])
    with pytest.raises(type(error), match="mine"):
        compose("config", fail)
    assert (seen, capsys.readouterr()) == ([1], ("", ""))
    GlobalHydra.instance().clear()
    monkeypatch.setattr("sys.argv", ["pipetrain", *SWEPT, "seed=1,2"])
    assert compose("config", fail, lambda failed: failed is error) == 0  # unless it is to go on
    assert seen == [1, 1, 2]


def test_a_folder_that_cannot_be_made_is_one_sentence(command, tmp_path):
    (tmp_path / "file").touch()
    says = r"the folder of the run cannot be made: file/run: Not a directory; choose another run_dir$"
    with pytest.raises(ConfigError, match=says):
        command("run_dir=file/run", flags=tuple(QUIET[1:]))


UNREAD = """
import os, runpy, sys
from pipetrain.commands import plan
plan.SILENCE_S = 1e6  # on a slow machine too
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.argv = ["plan", "model=mlp", "data=digits"]
runpy.run_module("pipetrain.plan", run_name="__main__", alter_sys=True)
"""


@pytest.mark.processes
def test_a_pipe_that_nobody_reads_ends_a_plan_without_a_word(tmp_path):
    ended = finished(tmp_path, ["-c", UNREAD])
    assert (ended.status, ended.out) == (1, "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("batchsize=3", "there is no batchsize in the configuration; did you mean batch_size; --cfg job"),
        ("codec.backwards=int8", "there is no codec.backwards in the configuration; did you mean codec.back"),
        ("++precison=bf16", "nothing reads precison; did you mean precision;"),
        ("codec=int8", "there is no codec in the configuration; did you mean codec.backward or codec.forwar"),
        ("+batches=3", "nothing reads batches; "),  # the plan's
        ("codec.forward=zip", "there is no codec/zip: choose one of half, identity, int8, "),
        ("checkpoint=5", "checkpoint must be given by its parts: checkpoint.every=, checkpoint.keep=, check"),
        ("logger=null", "logger=null must be a name; choose one of: "),
        ("logger=[wandb,csv]", "there is no logger/csv"),
        ("logger.wandb.mode=offline", "there is no logger.wandb.mode in the configuration; it belongs to an"),
        ("model=[1]", "model=[1] must be a name; choose one of: alexnet, gpt, "),
        ("+batch_size=3", "Could not append to config. An item is already at 'batch_size'"),
        ("größe=3", "größe=3 cannot be read: write OPTION=VALUE, with an option of --help"),
        ("lr=0.1", "there is no lr in the configuration; did you mean optim.lr;"),
        ("per_device_train_batch_size=3", "did you mean batch_size;"),
        ("model=my.Net", "vgg19, or your own by model._target_=my.Net"),
        ("optim=Adam", "there is no optim/Adam: did you mean nadam or adamw? choose one of adamw, muon,"),
        ("seed=1,2", "Ambiguous value for argument 'seed=1,2'"),
        ("experiment=mine", "nothing reads epoch; did you mean epochs;"),  # in a file of one's own
    ],
)
def test_a_slip_is_answered_in_one_sentence(command, tmp_path, words, says):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nepoch: 3\n")
    with pytest.raises(ConfigError) as error:
        command(words, f"--config-dir={tmp_path}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert "HYDRA_FULL_ERROR" not in str(error.value)


def test_contained_stands_by_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/somebody")
    for given, wanted in [("here", str(tmp_path / "here")), ('"~/sets"', "/home/somebody/sets")]:
        cfg = config(["data=cifar10", f"data.root={given}"])
        whole = contained(cfg, Path("/some/run"))
        assert (whole.run_dir, whole.data.root, whole.data.source.root) == ("/some/run", wanted, wanted)
        assert cfg.data.root == given.strip('"')  # the one that was given is left alone
    assert contained(config(["data=digits"]), tmp_path).data.root is None
