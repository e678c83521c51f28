"""Every file in conf/ composes, and what it names can be built: a new file is a new case, with no edit."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import nn

from pipetrain.commands import cli as commands
from pipetrain.commands.cli import values_of
from pipetrain.config.build import make_model, make_optimizer, make_schedule
from pipetrain.config.choices import conf_dir
from pipetrain.config.rate import SHAPES
from pipetrain.config.settings import Settings
from pipetrain.correction import Correction
from pipetrain.data import load_augment
from pipetrain.instantiate import make
from pipetrain.runtime.stage.optimizer_trial import try_optimizer
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from tests.support.cases import config

pytestmark = pytest.mark.slow

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir()
}
TOP = sorted(path.stem for path in CONF.glob("*.yaml"))


def composed(*overrides: str, name: str = "config") -> DictConfig:
    """Compose as the command line does, Hydra's own node included."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides=list(overrides), return_hydra_config=True)


def options(group: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("option", OPTIONS[group])


def test_every_group_is_tested_here_and_each_command_s_config_resolves_whole():
    assert set(OPTIONS) == {
        "codec",
        "correction",
        "data",
        "experiment",
        "logger",
        "model",
        "optim",
        "schedule",
        "task",
    }
    assert TOP == ["config", "plan"]
    assert conf_dir() == CONF
    for name in TOP:
        cfg = composed(name=name)
        cfg.run_dir = "."  # the one value that only a running job knows
        mine = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
        assert OmegaConf.to_container(mine, resolve=True, throw_on_missing=True)


@options("correction")
def test_each_correction_can_be_made(option):
    cfg = composed(f"correction={option}", "schedule=pipedream")
    chosen = Settings.composed(values_of(cfg), "pipedream", 2).correction
    assert (chosen == Correction()) == (option == "none")


@options("schedule")
def test_each_schedule_makes_a_sound_program_and_comes_before_the_experiment_s(option):
    cfg = composed("experiment=quickstart", f"schedule={option}", "microbatches=8", "window=2")
    assert cfg.hydra.runtime.choices["schedule"] == option
    assert (cfg.microbatches, cfg.window) == (8, 2)
    for ranks, batches in product((1, 2), (1, 3)):
        check(lower(make_schedule(values_of(cfg))(ranks, batches, 8)), batches, 8)
    words = [f"schedule={option}", "optim=adamw", "model=gpt_medium", "codec.forward=half", "logger=[]"]
    words += ["correction=[gap_aware,msnag]", "task=language_modelling", "data=text"]
    ours, theirs = config(words), commands.composed("config", words)
    ours.run_dir = theirs.run_dir = "."  # which has the time, if a job has run here
    assert ours == theirs


@options("optim")
def test_each_optimizer_is_built_with_the_data_set_s_rate(option):
    cfg = composed(f"optim={option}", "data=shapes")
    model = nn.Linear(1, 1)
    optimizer = try_optimizer(make_optimizer(values_of(cfg)), model, 1)(model.named_parameters())
    assert optimizer.defaults["lr"] == cfg.data.recipe["sgd_lr" if option == "sgd" else "adamw_lr"]


@options("data")
def test_each_data_set_can_be_asked_for(option):
    cfg = composed(f"data={option}")
    assert cfg.data.name == option
    for part in ("source", "train", "test"):
        if cfg.data.get(part) is not None:
            assert callable(make(values_of(cfg.data[part]), later=True))  # found, and not loaded
    assert (load_augment(values_of(cfg.data)) is None) == (cfg.data.get("augment") is None)
    assert cfg.data.fallback in {None, *OPTIONS["data"]}
    assert cfg.data.recipe.lr_schedule in SHAPES
    assert cfg.epochs == cfg.data.recipe.epochs
    assert all(cfg.data.recipe[f"{optim}_lr"] > 0 for optim in ("sgd", "adamw"))


@options("codec")
def test_each_codec_is_built_for_the_direction_that_is_named(option):
    ways = ("forward", "backward") if option == "half" else ("backward", "forward")
    codecs = Settings.composed(composed(f"codec@codec.{ways[0]}={option}"), "1f1b", 2).codecs
    assert [str(getattr(codecs, way)) for way in ways] == [option, "identity"]


@options("experiment")
def test_each_experiment_is_a_run(option):
    cfg = composed(f"experiment={option}", "placement=null")
    choices = cfg.hydra.runtime.choices
    read = Settings.composed(values_of(cfg), choices["schedule"], 2)
    with torch.device("meta"):
        assert len(make_model(values_of(cfg), read.seed, read.dtype)) >= 2
    try_optimizer(make_optimizer(values_of(cfg)), nn.Linear(1, 1), 2)
    check(lower(make_schedule(values_of(cfg))(2, 2, read.microbatches)), 2, read.microbatches)
    if option == "quickstart":  # as the README promises
        assert [choices[key] for key in ("model", "data", "schedule")] == ["vgg16", "digits", "1f1b"]


@options("logger")
def test_each_logger_can_be_chosen_with_another(option):
    loggers = list(composed(f"logger=[tensorboard,{option}]").logger)
    assert loggers == list(dict.fromkeys(["tensorboard", option]))


def test_the_run_s_folder_says_what_ran():
    cfg = composed("data=digits", "model=resnet18", "schedule=gpipe")
    assert (cfg.hydra.job.chdir, cfg.hydra.job.name) == (False, "pipetrain")
    folder = OmegaConf.to_container(cfg, resolve=False)["run_dir"]
    assert folder.startswith("runs/${data.name}-${name_of:${model._target_}}-")
    assert composed("data=digits", "run_dir=elsewhere/x").hydra.run.dir == "elsewhere/x"
