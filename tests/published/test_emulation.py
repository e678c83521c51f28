"""The emulation of a pipeline in one process trains as the pipeline itself, for each kind of schedule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from pipetrain.config.parameter_groups import KINDS
from published import stacked_optimizers as stacked
from published.emulation import Emulation, Feed, Pipeline
from published.stacked_optimizers import SGD, AdamW, Muon, Optimizer
from tests.support.cases import Case, make_run, run_in_threads
from tests.support.runs import Run

pytestmark = pytest.mark.slow

SEEDS = 0, 1
WORDS = ("partition=even", "batch_size=4", "epochs=2", "data.drop_last=true")
PLAIN = "model._target_=tests.support.models.without_norm"  # a bias before a norm has noise for a gradient
ADAMW = "optim=adamw", "optim.lr=0.01", PLAIN
MUON = "optim=muon", "optim.lr=0.01", "optim.groups.all_but_hidden.lr=0.02", PLAIN


def cases(schedule: str, ranks: int, *words: str) -> list[Case]:
    """A case for each seed."""
    own = *WORDS, *words
    return [Case(schedule, ranks, (*own, f"seed={seed}"), 28) for seed in SEEDS]  # seven batches an epoch


def optimizer_of(case: Case, runs: list[Run]) -> Optimizer:
    lr = torch.tensor([run.lr for run in runs], dtype=torch.float64)
    if ADAMW[0] in case.overrides:
        return AdamW(lr, 0.01)
    if MUON[0] in case.overrides:
        others = KINDS["all_but_hidden"].names(runs[0].take_network().model)
        return Muon(lr, 0.01, others, 0.02 * torch.ones_like(lr))
    return SGD(lr, 5e-4)


def emulated(of: list[Case]) -> list[dict[str, Tensor]]:
    """Train the cases at once; return the state of each."""
    runs = [make_run(case) for case in of]
    run, settings = runs[0], runs[0].settings
    program = run.plan.window.program  # an order made for the costs of these stages, where a schedule asks
    pipeline = Pipeline(
        lambda *size: program, of[0].ranks, settings.microbatches, run.plan.cuts, settings.window
    )
    models = [run.take_network().model for run in runs]
    rate, loss = settings.rate(run.updates), run.task.loss
    emulation = Emulation(models, loss, optimizer_of(of[0], runs), rate, settings.correction)
    feed = Feed(run.data.train, settings.batch_size, settings.microbatches, SEEDS)
    for epoch in range(settings.epochs):
        emulation.train(pipeline, feed.epoch(epoch), len(feed))
    state = emulation.weights | emulation.buffers
    return [{name: tensor[number] for name, tensor in state.items()} for number in range(len(SEEDS))]


def one_by_one(matrices: Tensor) -> Tensor:
    """What torch's Muon does, whose bfloat16 a product of several matrices rarely rounds otherwise."""
    own = stacked.NEWTON_SCHULZ, stacked.STEPS, stacked.EPS
    return torch.stack([_zeropower_via_newtonschulz(matrix, *own) for matrix in matrices])


@pytest.mark.parametrize("shape", [(4, 36), (36, 4), (8, 8)])
def test_matrices_are_made_orthogonal_as_by_torch(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    wanted = one_by_one(matrices)
    torch.testing.assert_close(stacked.orthogonal(matrices), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "of",
    [
        cases("1f1b", 2, "microbatches=2"),
        cases("pipedream", 4, "microbatches=1"),
        cases("pipedream", 3, "microbatches=2", *ADAMW),
        cases("pipedream_2bw", 2, "microbatches=2", *MUON),
        cases("v_async", 2, "microbatches=1"),
        cases("ssp", 3, "microbatches=2", "schedule.buffer=[3,2,1]", "window=6"),
        cases("pipedream", 4, "microbatches=1", "correction=[gap_aware,msnag]"),
        cases("pipedream", 3, "microbatches=2", "correction=[spectrain,gap_aware,pipemare]"),
        cases("pipedream_2bw", 2, "microbatches=2", "correction=nesterov", *ADAMW),
        cases("pipedream_2bw", 2, "microbatches=2", "correction=[gap_aware,msnag]", *MUON),
    ],
    ids=lambda of: str(of[0]),
)
def test_it_trains_as_the_pipeline(of: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "orthogonal", one_by_one)
    for case, state in zip(of, emulated(of), strict=True):
        wanted, _ = run_in_threads(case)
        assert wanted.keys() == state.keys()
        for name, tensor in wanted.items():
            says = f"{case}, {name}"
            torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-10, msg=says)
