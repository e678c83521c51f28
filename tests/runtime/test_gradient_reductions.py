"""Weights that several stages share, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline
from tests.support.cases import Case, compare, make_run
from tests.support.thread_ranks import Saved, run_in_threads

TIED, COMPLEX = (
    f"model._target_=tests.support.{name}" for name in ("models.tied", "edge_case_models.fourier_shared")
)
VIRTUAL = (TIED, "schedule.virtual=2", "partition=[2]")
CLIPPED = ("clip_grad_norm=0.25", "clip_grad_norm_over=model")


@pytest.mark.parametrize(
    "case",
    [
        # Once the gradients of two stages of a rank were views of one tensor, which both clipped in place.
        Case("interleaved_1f1b", 1, (*VIRTUAL, "microbatches=4", "epochs=1", *CLIPPED)),
        Case("zbv", 2, (TIED, "partition=[2,3,4]", "microbatches=4", "window=2", "epochs=2")),
        Case("1f1b", 2, (COMPLEX, "partition=[2]", "microbatches=4", "optim.lr=0.01")),
    ],
    ids=str,
)
def test_a_weight_of_two_stages_trains_as_one(case):
    assert len(make_run(case).plan.cut.ties) == 1
    compare(case, *run_in_threads(case))


def test_two_stages_of_one_rank_go_on_with_a_state_each(tmp_path):
    """Once both read AdamW's step count in one piece of memory, and each counted it up."""
    case = Case("interleaved_1f1b", 1, (*VIRTUAL, "optim=adamw", "optim.lr=0.01", "window=2"))
    wanted, _ = run_in_threads(case, saved=Saved(tmp_path))
    state, _ = run_in_threads(case, source=sorted((tmp_path / "checkpoints").glob("update-*"))[0])
    assert all(state[name].equal(tensor) for name, tensor in wanted.items())


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last, nn.Linear(4, 3)).double()


def halve(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_1f1b"])
def test_what_a_program_does_to_a_shared_weight_reaches_both_stages_of_its_rank(schedule):
    """One process has both stages, each with a copy."""
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    model, plain = tied(), tied()
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    options = {"microbatches": 4, "partition": [2], "device": "cpu", "threads": 1}
    with Pipeline(model, cross_entropy, partial(torch.optim.SGD, lr=0.1), schedule, **options) as pipe:
        for update in range(4):
            if update % 2:
                halve(model)
                halve(plain)
            sgd.zero_grad()
            loss = cross_entropy(plain(x), y)
            loss.backward()
            sgd.step()
            assert pipe.step(x, y) == pytest.approx(loss.item(), abs=1e-14)
        halve(model)
        halve(plain)
        wanted = cross_entropy(plain(x), y).item()
        assert pipe.evaluate([(x, y)])["loss"] == pytest.approx(wanted, abs=1e-14)
