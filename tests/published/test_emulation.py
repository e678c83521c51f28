"""The emulation of a pipeline in one process trains as the pipeline itself, for each kind of schedule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipetrain.config.parameter_groups import ChainedOptimizer
from published.emulation import Emulation, Feed, Pipeline
from tests.support.cases import Case, make_run
from tests.support.thread_ranks import run_in_threads

pytestmark = pytest.mark.slow

WORDS = ("partition=even", "batch_size=4", "epochs=2", "data.drop_last=true")
PLAIN = "model._target_=tests.support.models.without_norm"  # a bias before a norm has noise for a gradient
ADAMW = "optim=adamw", "optim.lr=0.01", PLAIN
MUON = "optim=muon", "optim.lr=0.01", "optim.groups.all_but_hidden.lr=0.02", PLAIN


def case(schedule: str, ranks: int, *words: str) -> Case:
    return Case(schedule, ranks, (*WORDS, *words), 28)  # seven batches an epoch


def emulated(case: Case) -> dict[str, Tensor]:
    """Train a case; return the state of its model."""
    run = make_run(case)
    settings, model = run.settings, run.take_network().model
    program = run.plan.window.program  # an order made for the costs of these stages, where a schedule asks
    pipeline = Pipeline(
        lambda *size: program, case.ranks, settings.microbatches, run.plan.cuts, settings.window
    )
    optimizer = ChainedOptimizer([run.optimizer([named]) for named in model.named_parameters()])
    rate, loss = settings.rate(run.updates), run.task.loss
    emulation = Emulation(model, loss, optimizer, rate, settings.correction)
    feed = Feed(run.data.train, settings.batch_size, settings.microbatches, settings.seed)
    for epoch in range(settings.epochs):
        emulation.train(pipeline, feed.epoch(epoch), len(feed))
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "case",
    [
        case("1f1b", 2, "microbatches=2"),
        case("pipedream", 4, "microbatches=1"),
        case("pipedream", 3, "microbatches=2", *ADAMW),
        case("pipedream_2bw", 2, "microbatches=2", *MUON),
        case("v_async", 2, "microbatches=1"),
        case("ssp", 3, "microbatches=2", "schedule.buffer=[3,2,1]", "window=6"),
        case("pipedream", 4, "microbatches=1", "correction=[gap_aware,msnag]"),
        case("pipedream", 3, "microbatches=2", "correction=[spectrain,gap_aware,pipemare]"),
        case("pipedream_2bw", 2, "microbatches=2", "correction=nesterov", *ADAMW),
        case("pipedream_2bw", 2, "microbatches=2", "correction=[gap_aware,msnag]", *MUON),
    ],
    ids=str,
)
def test_it_trains_as_the_pipeline(case: Case) -> None:
    wanted, _ = run_in_threads(case)
    state = emulated(case)
    assert wanted.keys() == state.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-10, msg=f"{case}, {name}")
