"""What a program keeps that uses Pipeline: its own way to end by an error, its seeds, threads and signals."""

from __future__ import annotations

import io
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipetrain import ConfigError, Pipeline

MINE = Path(__file__).name
INPUTS, TARGETS = torch.ones(8, 4), torch.ones(8, 2)


class Own(nn.Module):
    """A layer with a mistake that shows in training."""

    wrong = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wrong:
            raise KeyError("my layer")
        return x


def pipeline() -> Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), Own(), nn.Linear(4, 2))
    return Pipeline(model, mse_loss, lambda p: torch.optim.SGD(p, 0.1), threads=1, partition=[1])


def no_batch() -> None:
    list(pipeline().train([]))


def wrong_shape() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(5, 2))
    Pipeline(model, mse_loss, lambda p: torch.optim.SGD(p, 0.1), threads=1).step(INPUTS, TARGETS)


def wrong_layer() -> None:
    pipe = pipeline()
    pipe.step(INPUTS, TARGETS)
    Own.wrong = True
    pipe.step(INPUTS, TARGETS)


def wrong_program() -> None:
    pipeline().step(INPUTS, TARGETS)
    raise KeyError("my program")


def shown(program: Callable[[], None]) -> str:
    """What a program that ends by an error shows."""
    said, wrong = io.StringIO(), Own.wrong
    with redirect_stderr(said):
        try:
            program()
        except Exception as error:
            if not isinstance(error, SystemExit):  # by which Python ends without a word
                sys.excepthook(type(error), error, error.__traceback__)
        Own.wrong = wrong
    return said.getvalue()


def test_a_program_ends_by_its_own_traceback_whose_last_line_is_our_sentence(ranks):
    for program, sentence in (
        (no_batch, "ConfigError: the loader has no batch: give one that has"),
        (wrong_shape, "ConfigError: layer 2 (2) of the model cannot take float32"),
    ):
        said, other = ranks(shown, program)
        assert f"in {program.__name__}" in said
        assert sentence in said.splitlines()[-1]
        assert files(said) == [MINE, MINE, "exit.py"]
        assert other == ""  # all ranks raise it, and one says it
    for said in ranks(shown, wrong_program):
        assert 'raise KeyError("my program")' in said
        assert "pipetrain.errors" not in said


class Torn:
    """A loader whose second batch cannot be read."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield INPUTS, TARGETS
        raise OSError("no such file")


def test_what_one_rank_shows_no_other_does_and_it_can_be_caught_there(ranks):
    assert ranks(caught) == [("OSError", "no such file"), ("TrainingStopped", "rank 0 stopped: no such file")]
    first, other = ranks(shown, torn)
    assert (files(first)[-1], first.splitlines()[-1], other) == (MINE, "OSError: no such file", "")


def torn() -> None:
    list(pipeline().train(Torn()))


def caught() -> tuple[str, str]:
    try:
        torn()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError


def test_a_mistake_in_a_layer_is_shown_where_it_is_and_the_ranks_that_lost_it_show_nothing(ranks):
    lost, failed = ranks(shown, wrong_layer)
    assert 'raise KeyError("my layer")' in failed
    assert files(failed) == [MINE, MINE, MINE, "exit.py"]  # the layer, and the program
    assert lost == ""
    assert failed.splitlines()[-1].endswith(
        "ActionFailed: rank 1, stage 1, action 1F0@0: KeyError: 'my layer'"
    )


def files(said: str) -> list[str]:
    """The files of the frames that are shown."""
    return [Path(name).name for name in re.findall(r'^  File "(.*)", line', said, re.MULTILINE)]


def changed() -> list[str]:
    """What of this process is another after a Pipeline has trained in it."""

    def now() -> dict[str, object]:
        hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
        random_states = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
        threads, modes = torch.get_num_threads(), (torch.is_grad_enabled(), torch.get_default_dtype())
        return {
            "hooks": hooks,
            "signals": handlers,
            "random": random_states,
            "threads": threads,
            "modes": modes,
        }

    torch.manual_seed(5)
    torch.set_num_threads(2)
    before = now()
    model = nn.Sequential(nn.Linear(4, 4), Own(), nn.Linear(4, 2))
    torch.manual_seed(5)
    with Pipeline(model, mse_loss, lambda p: torch.optim.SGD(p, 0.1), seed=3, partition=[1]) as pipe:
        list(pipe.train([(INPUTS, TARGETS)]))
        pipe.evaluate([(INPUTS, TARGETS)])
    return [name for name, value in now().items() if value != before[name]]


def test_a_pipeline_changes_nothing_of_the_process_that_uses_it(ranks):
    assert ranks(changed) == [[], []]


@pytest.mark.parametrize("chosen", [lambda model, p: model.parameters(), lambda model, p: [*p][1:]])
def test_a_function_for_an_optimizer_that_does_not_use_its_parameters_is_refused(chosen):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    before = {name: p.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    says = r"holds other parameters than .* was given.* as in lambda p: SGD\(p, \.\.\.\)"
    with pytest.raises(ConfigError, match=says):
        Pipeline(model, mse_loss, lambda p: torch.optim.SGD(chosen(model, p), 0.1))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
