"""Running statistics of whole batches, against one process that sees each batch at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipetrain.model.tracing.trace import trace
from pipetrain.runtime.stage.batchnorm import BatchStatistics
from pipetrain.runtime.stage.microbatch import WHOLE, Batch, Microbatch
from tests.support import reference
from tests.support.cases import Case, expected
from tests.support.edge_case_models import Attending
from tests.support.thread_ranks import run_in_threads
from tests.support.traced_comparison import example, whole

MICROBATCHES = 3
WORDS = ("window=null", f"microbatches={MICROBATCHES}", "epochs=2", "batchnorm=batch")


class Reference:
    """Sees what enters each BatchNorm of a model, and moves its own statistics at each step by the batch."""

    def __init__(self, norms: dict[str, nn.Module]) -> None:
        self.seen: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.state = {
            f"{name}.{key}": t.clone() for name, norm in norms.items() for key, t in norm.named_buffers()
        }
        self._norms = norms
        for name, norm in norms.items():
            norm.register_forward_pre_hook(lambda norm, args, name=name: self._see(name, norm, args[0]))

    def _see(self, name: str, norm: nn.Module, x: Tensor) -> None:
        if norm.training:
            self.seen[name].append(x.detach().transpose(0, 1).flatten(1))

    def step(self, *optimizer_and_arguments: object) -> None:
        for name, norm in self._norms.items():
            values = torch.cat(self.seen[name][-MICROBATCHES:], 1)
            calls = self.state[f"{name}.num_batches_tracked"]
            calls += 1
            factor = 1 / int(calls) if norm.momentum is None else norm.momentum
            for key, new in (("mean", values.mean(1)), ("var", values.var(1))):
                running = self.state[f"{name}.running_{key}"]
                running.copy_((1 - factor) * running + factor * new)


@contextmanager
def referred() -> Iterator[list[Reference]]:
    """Let the reference move statistics by batches too."""
    made: list[Reference] = []
    train = reference.train

    def trained(net: nn.Module, *arguments: Any) -> reference.Outcome:
        kind = nn.modules.batchnorm._BatchNorm
        norms = {name: m for name, m in net.named_modules() if isinstance(m, kind) and m.track_running_stats}
        made.append(Reference(norms))
        handle = register_optimizer_step_pre_hook(made[-1].step)
        try:
            return train(net, *arguments)  # type: ignore[arg-type]
        finally:
            handle.remove()

    with patch.object(reference, "train", trained):
        yield made


@pytest.mark.parametrize(
    ("schedule", "ranks", "name", "words"),
    [
        ("interleaved_1f1b", 2, "models.with_norm", ()),  # with a short last batch
        ("fbp", 3, "models.with_norm", ()),
        ("zb_h2", 3, "models.with_norm", ()),
        ("pipedream", 3, "models.recomputing", ("recompute=selective",)),
        ("pipedream", 3, "edge_case_models.norms", ("+model.momentum=null",)),
        ("pipedream_2bw", 3, "edge_case_models.norms", ("+model.track_running_stats=false",)),
        ("zb_h1", 3, "edge_case_models.norms", ("+model.struck=true", "on_nan=skip")),
    ],
    ids=str,
)
def test_statistics_and_weights_are_those_of_one_process(schedule, ranks, name, words):
    """A forward that is run again counts once, and an update that is skipped takes its statistics along."""
    twin = "with_norm" if name == "models.recomputing" else ""
    words = (f"model._target_=tests.support.{name}", *words, *WORDS)
    case = Case(schedule, ranks, words, reference_model=twin)
    state, figures = run_in_threads(case)
    with referred() as made:
        wanted = expected(case, figures.ran).state | made[0].state
    assert made[0].state
    assert state.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-11, atol=1e-12, msg=key)
    skipped = sum(of.skipped for epoch in figures for of in epoch.stages.values())
    assert bool(skipped) == ("on_nan=skip" in words)


def moved(statistics: BatchStatistics, run: Callable[[Tensor], Any], x: Tensor) -> None:
    """Train a batch in two microbatches."""
    for mb, part in enumerate(x.split([5, 7])):
        with statistics.around_forward(Microbatch(mb, (), 0, WHOLE)):
            run(part)
    statistics.before_step(Batch([0, 1]))


def test_a_norm_that_is_called_twice_moves_twice_and_loses_no_digits():
    norm, plain = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    x = torch.randn(12, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 1e6
    moved(BatchStatistics(norm), lambda x: [norm(part) for part in x.unbind(1)], x)
    for part in x.unbind(1):
        plain(part)
    torch.testing.assert_close(norm.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)


def test_a_traced_model():
    model, x = Attending(), torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    part, plain = whole(trace(model, example((3, 32, 32)))), deepcopy(model)
    plain(x)
    moved(BatchStatistics(part), part, x)
    torch.testing.assert_close(model.norm.state_dict(), plain.norm.state_dict())
    assert not torch.equal(model.norm.running_mean, Attending().norm.running_mean)
