"""Weights that several stages share, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipetrain.errors import TrainingStopped
from pipetrain.runtime.tied import Shared
from tests.support.cases import Case, Saved, compare, make_run, run_in_threads

TIE = (0, 1)
TIED = "model._target_=tests.support.models.tied"
CLIPPED = ("clip_grad_norm=0.25", "clip_grad_norm_over=model")


def both(case: Case) -> None:
    plan = make_run(case).plan
    assert len(plan.cut.ties) == 1
    compare(case, *run_in_threads(case))


def test_two_stages_of_one_rank_clip_their_own_copies():
    """Once their gradients were views of one tensor, which both scaled in place."""
    words = (TIED, "schedule.virtual=2", "partition=[2]", "microbatches=4", "epochs=1")
    both(Case("interleaved_1f1b", 1, (*words, *CLIPPED)))


def test_the_first_and_the_last_stage_of_a_v_share_on_one_rank():
    both(Case("zbv", 2, (TIED, "partition=[2,3,4]", "microbatches=4", "window=2", "epochs=2")))


def test_complex_weights_are_shared_as_pairs_of_numbers():
    model = "model._target_=tests.support.edges.fourier_shared"
    both(Case("1f1b", 2, (model, "partition=[2]", "microbatches=4", "optim.lr=0.01")))


def test_gradients_are_added_and_one_that_no_stage_has_stays_none():
    of = {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4, dtype=torch.complex64))}
    other = {name: nn.Parameter(p.detach().clone()) for name, p in of.items()}
    stages = [Shared(stage, {"a": TIE, "b": TIE}, weights) for stage, weights in enumerate((of, other))]
    assert stages[0].packed(TIE, skip=False).tolist() == [0] * 16
    of["b"].grad = torch.full((4,), 1 + 2j)
    other["b"].grad = torch.full((4,), 3j)
    sums = stages[0].packed(TIE, skip=False) + stages[1].packed(TIE, skip=False)
    for stage, weights in zip(stages, (of, other), strict=True):
        stage.unpack(TIE, sums)
        assert weights["a"].grad is None
        assert weights["b"].grad.tolist() == [1 + 5j] * 4
    assert of["b"].grad.data_ptr() != other["b"].grad.data_ptr()
    assert not stages[0].packed(TIE, skip=True).isfinite().all()


def test_a_sparse_gradient_is_refused():
    layer = nn.Embedding(3, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(TrainingStopped, match=r"of e, which stages share, is sparse: .*sparse=False"):
        Shared(0, {"e": TIE}, {"e": layer.weight}).packed(TIE, skip=False)


def test_two_stages_of_one_rank_go_on_with_a_state_each(tmp_path):
    """Once both read AdamW's step count in one piece of memory, and each counted it up."""
    words = (TIED, "schedule.virtual=2", "partition=[2]", "optim=adamw", "optim.lr=0.01", "window=2")
    case = Case("interleaved_1f1b", 1, words)
    wanted, _ = run_in_threads(case, saved=Saved(tmp_path))
    state, _ = run_in_threads(case, source=sorted((tmp_path / "checkpoints").glob("update-*"))[0])
    assert all(state[name].equal(tensor) for name, tensor in wanted.items())
