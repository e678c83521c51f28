"""How a program ends by an error: by one sentence if the error is ours, else by its traceback."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipetrain import ConfigError, Pipeline
from tests.support.processes import TWO, finished

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


def wrong_layer() -> None:
    pipe = pipeline()
    pipe.step(INPUTS, TARGETS)
    Own.wrong = True
    pipe.step(INPUTS, TARGETS)


def wrong_program() -> None:
    pipeline().step(INPUTS, TARGETS)
    raise KeyError("my program")


def after_others() -> None:
    """However many Pipelines there were."""
    for _ in range(2):
        pipeline().close()
    no_batch()


def shown(program: Callable[[], None], variable: str) -> str:
    """What a program that ends by an error shows."""
    said, wrong = io.StringIO(), Own.wrong
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.setenv("PIPETRAIN_TRACEBACK", variable)
        try:
            program()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        Own.wrong = wrong
    return said.getvalue()


def test_what_all_ranks_are_told_is_one_sentence_of_one_of_them(ranks):
    said = "".join(ranks(shown, no_batch, "0"))
    assert said.count("\n") == 1
    assert "pipetrain: the loader has no batch: give one that has" in said
    for said in ranks(shown, after_others, "1"):  # a traceback, whose lines name their rank once
        assert {line.count("[rank") for line in said.splitlines() if line} == {1}
        assert "Traceback" in said
        assert "in no_batch" in said


def test_a_mistake_in_a_layer_is_shown_where_it_is_and_the_ranks_that_lost_it_say_a_sentence(ranks):
    lost, failed = ranks(shown, wrong_layer, "")
    assert "KeyError: 'my layer'" in failed
    assert 'raise KeyError("my layer")' in failed
    assert "in wrong_layer" not in failed
    assert failed.splitlines()[-1].endswith("pipetrain: rank 1, stage 1, action 1F0@0: KeyError: 'my layer'")
    assert "pipetrain: rank 0 lost rank 1 at " in lost
    assert "Traceback" not in lost


def test_an_error_of_the_program_s_own_is_shown_as_python_shows_it(ranks):
    for said in ranks(shown, wrong_program, "0"):
        assert 'raise KeyError("my program")' in said
        assert "pipetrain: " not in said


@pytest.mark.processes
def test_under_torchrun_a_refusal_is_one_sentence_and_no_rank_s_traceback(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import pipetrain, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))\n"
        "pipetrain.Pipeline(model, torch.nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.1), microbatches=0)\n"
    )
    done = finished(tmp_path, [*TWO, "mine.py"])
    assert done.status == 1
    assert done.out.count("pipetrain: microbatches") == 1, done.out
    assert "Pipeline(model" not in done.out


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
