"""What the configuration may say, and that whatever else it says is refused in one sentence."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pipetrain.codec import Half
from pipetrain.config.choices import conf_dir
from pipetrain.config.settings import Settings, options
from tests.support.cases import options_of
from tests.support.refusals import JUNK, changed, outcome, refusal

SCALARS = ["stages", "partition", "microbatches", "window", "buffer_size", "timeout", "batch_size", "epochs"]
SCALARS += ["lr_schedule", "warmup", "label_smoothing", "seed", "device", "dtype", "threads"]
SCALARS += ["memory_limit", "data.workers", "data.drop_last", "trace", "codec", "codec.forward"]


def shrinking(update: int, by: float = 2.0) -> float:
    return by**-update


def test_settings_are_what_was_configured(monkeypatch):
    monkeypatch.setenv("WARMUP", "0.25")
    words = ["data=digits", "model=mlp", "partition=[2]", "seed=7", "warmup=${oc.env:WARMUP}"]
    rate = "lr_schedule._target_=tests.config.test_settings.shrinking"
    read = Settings.composed(options_of([*words, rate, "lr_schedule.by=4"]), "1f1b", 2)
    assert (read.model, read.schedule, read.ranks, read.partition) == ("mlp", "1f1b", 2, [2])
    assert (read.batch_size, read.microbatches, read.window, read.buffer_size) == (64, 4, 1, 2)
    assert (read.epochs, read.warmup, read.seed) == (6, 0.25, 7)
    assert (read.device, read.dtype, read.threads) == ("auto", torch.float32, None)
    assert (read.workers, read.drop_last, read.label_smoothing, read.timeout) == (0, False, 0.0, 300.0)
    assert [read.rate(3)(update) for update in range(3)] == [1, 0.25, 0.0625]


def test_ranks_are_the_processes_or_on_paper_the_stages():
    for stages, processes, ranks in ((None, 3, 3), (3, 3, 3), (5, None, 5), (None, None, 2)):
        assert Settings.composed(changed("stages", stages), "1f1b", processes).ranks == ranks


def test_no_more_layers_than_one_are_asked_for_while_the_replicas_are_to_be_chosen():
    assert Settings(ranks=4, replicas="auto").places == [(0, 1, 2, 3)]
    assert Settings(ranks=4, replicas=2).places == [(0, 1), (2, 3)]


def test_what_may_be_a_value_or_have_parts():
    for trace, windows in ((False, 0), (True, sys.maxsize), ({"windows": 3}, 3)):
        assert Settings.composed(changed("trace", trace), "1f1b", 2).trace == windows
    for word, chosen in (
        ("partition.profile=p.json", ("profile", "p.json")),
        ("partition=even", ("even", None)),
    ):
        read = Settings.composed(options_of([word]), "1f1b", 2)
        assert (read.partition, read.profile) == chosen


CODEC = {"_target_": "pipetrain.codec.TopK", "fraction": "x"}
CODECS = "tests.support.models"
STRATEGY = "must be one of even, params, flops, profile, the first layers of all stages but the first, such"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("codec.forward", None, "codec.forward needs a _target_: the dotted name of what builds it"),
        ("codec.forward", {"_target_": "builtins.dict"}, "codec.forward must be a pipetrain.codec.Codec"),
        ("codec.backward", CODEC, "codec.backward.fraction=x must be a number above 0 and at most 1"),
        ("codec.backward", {"_target_": f"{CODECS}.Raises"}, "[2, 3, 4]: ZeroDivisionError: mine"),
        ("codec.backward", {"_target_": f"{CODECS}.Lies"}, " encodes float32[2, 3, 4] to float32[2, 3, 4], "),
        ("codec.backward", {"_target_": f"{CODECS}.Forgets"}, " decodes float32[2, 3, 4] to float16[2, 3,"),
        ("microbatches", 65, "batch_size=64 cannot be cut into microbatches=65: choose fewer"),
        ("lr_schedule", "sine", "lr_schedule=sine must be one of constant, cosine, one_cycle, or lr_sched"),
        ("lr_schedule", {"_target_": "math.pi"}, "lr_schedule cannot be built: Expected a callable target"),
        ("trace", 3, "trace=3 must be true or false; trace.windows=4 traces the first 4 windows"),
        ("partition", "middle", f"partition=middle {STRATEGY}"),
        ("recompute", [["never"]], "recompute=[['never']] must be one of auto, never"),
        ("recompute", "except_last", "has two meanings: choose except_last_stage, by which"),
        ("buffer_size", [4], "buffer_size=[4] must be a whole number of at least 1, or one for activations"),
        ("buffer_size", [4, 0], "buffer_size=[4,0] must be a whole number of at least 1, or one for activ"),
    ],
)
def test_a_value_that_cannot_be_is_refused(key, value, says):
    assert says in refusal(lambda: Settings.composed(changed(key, value), "1f1b", None))


@pytest.mark.parametrize("name", sorted(options().keys() - {"profile"}))
def test_every_option_refuses_what_it_cannot_be_and_names_itself(name):
    assert refusal(lambda: Settings.read({name: object()})).startswith(name)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["build=stages", "partition=profile"], "partition=profile measures the whole model in each process"),
        (["weights=w.pt", "resume=runs/x"], "resume=runs/x begins with the weights of that"),
    ],
)
def test_weights_that_would_not_count_or_could_not_be_made_are_refused(words, says):
    assert says in refusal(lambda: Settings.composed(options_of(words), "1f1b", None))
    Settings.composed(options_of([words[0], "resume=auto"]), "1f1b", None)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sampled_from(SCALARS), JUNK)
def test_whatever_a_scalar_says_it_is_read_or_refused_in_one_line(key, value):
    read = outcome(lambda: Settings.composed(changed(key, value), "1f1b", None))
    if isinstance(read, str):
        assert "\n" not in read
    else:  # then it may be trusted
        assert read.batch_size >= read.microbatches
        assert min(read.batch_size, read.microbatches, read.buffer_size, read.epochs, read.ranks) >= 1
        assert 0 < read.timeout < float("inf")
        assert 0 < read.rate(10)(5) <= 1
        assert 0 <= read.label_smoothing < 1


@pytest.mark.parametrize("data", sorted(path.stem for path in (conf_dir() / "data").glob("*.yaml")))
def test_the_files_of_conf_have_the_defaults_of_the_dataclass(data):
    content = OmegaConf.merge(
        OmegaConf.load(conf_dir() / "config.yaml"), {"data": OmegaConf.load(conf_dir() / f"data/{data}.yaml")}
    )
    chosen = {key: name for line in content.defaults if line != "_self_" for key, name in line.items()}
    for name, (rule, key, null, _) in options().items():
        if key.startswith("codec."):
            written = chosen[f"codec@{key}"]
        elif OmegaConf.is_interpolation(content, key):  # by the data set's recipe
            continue
        else:
            written = OmegaConf.select(content, key, throw_on_missing=True)
        assert rule.read(key, written, null) == getattr(Settings(), name), key


def test_a_program_gives_the_options_by_name_with_numbers_of_python_or_numpy():
    read = Settings.read({"partition": (np.int64(2),), "codec_forward": "half", "timeout": np.float32(2)}, 3)
    assert (read.partition, str(read.codecs.forward), read.timeout, read.ranks) == ([2], "half", 2.0, 3)
    assert Settings.read({"dtype": torch.float64, "device": torch.device("cpu")}).device == "cpu"
    assert read.changed({"epochs": 3, "checkpoint.every": None}).checkpoint_every is None
    assert Settings.read({"codec_forward": Half("bf16")}).codec_forward == Half("bf16")
    assert "codec_forward=zip is unknown" in refusal(lambda: Settings.read({"codec_forward": "zip"}))
    assert "microbatches='4' must be a whole" in refusal(lambda: read.changed({"microbatches": "4"}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compile": True, "batchnorm": "batch"}, "operations, .*: leave batchnorm out, or compile$"),
        ({"compile": True, "recompute": "selective"}, "operations, .*: leave recompute out, or compile$"),
        ({"cuda_graphs": True, "device": "cpu"}, "^cuda_graphs needs a GPU: leave it out$"),
        (
            {"stages": 3},
            "start 3, by torchrun --nproc_per_node=3 or NPROC=3 pipetrain, or leave",
        ),
    ],
)
def test_a_program_and_a_command_line_can_follow_what_is_advised(options, says):
    assert re.search(says, refusal(lambda: Settings.read(options, 2)))
