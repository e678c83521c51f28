"""Running statistics of whole batches, against one process that sees each batch at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipetrain.runtime.microbatch import WHOLE, Batch, Microbatch
from pipetrain.runtime.statistics import BatchStatistics, Moments, joined
from tests.support import reference
from tests.support.cases import Case, Saved, expected, run_in_threads

V = {"interleaved_1f1b": 2}  # two stages a rank
SCHEDULES = ("fbp", "gpipe", "interleaved_1f1b", "pipedream", "pipedream_2bw", "v_async", "zb_h2")
OPTIONS = ("momentum=null", "momentum=0.7", "track_running_stats=false")
MICROBATCHES = 3
WORDS = (f"microbatches={MICROBATCHES}", "epochs=2", "batchnorm=batch")


def model(name: str) -> str:
    return f"model._target_=tests.support.{name}"


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
    ("schedule", "name", "words"),
    [
        *((name, "models.with_norm", ()) for name in SCHEDULES),  # with a short last batch
        *(("pipedream", "models.recomputing", (f"recompute={mode}",)) for mode in ("always", "selective")),
        *(("pipedream", "again.norms", (f"+model.{option}",)) for option in OPTIONS),
        *((name, "again.norms", ("+model.struck=true", "on_nan=skip")) for name in ("pipedream", "zb_h1")),
    ],
    ids=str,
)
def test_statistics_and_weights_are_those_of_one_process(schedule, name, words):
    """A forward that is run again counts once, and an update that is skipped takes its statistics along."""
    words = (model(name), "window=null", *words, *WORDS)
    by = {"reference_model": "with_norm"} if "recomputing" in name else {}
    case = Case(schedule, V.get(schedule, 3), words, **by)
    state, figures = run_in_threads(case)
    with referred() as made:
        wanted = expected(case, figures.ran).state | made[0].state
    assert made[0].state
    assert state.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-11, atol=1e-12, msg=key)
    skipped = sum(of.skipped for epoch in figures for of in epoch.stages.values())
    assert bool(skipped) == ("on_nan=skip" in words)


def test_a_traced_model():
    words = (model("again.attending"), "partition=even", *WORDS[:1], "epochs=1", "microbatches=2")
    moved, wanted = (
        run_in_threads(Case("1f1b", 2, (*words, f"batchnorm={which}")))[0]
        for which in ("batch", "microbatch")
    )
    other = {name for name, tensor in wanted.items() if not torch.equal(moved[name], tensor)}
    assert other == {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert (moved["norm.num_batches_tracked"], wanted["norm.num_batches_tracked"]) == (4, 8)


def test_a_resumed_run(tmp_path):
    case = Case("1f1b", 2, (model("models.with_norm"), "window=2", *WORDS))
    wanted, _ = run_in_threads(case, saved=Saved(tmp_path))
    state, _ = run_in_threads(case, source=sorted((tmp_path / "checkpoints").glob("update-*"))[0])
    assert all(state[name].equal(tensor) for name, tensor in wanted.items())


def test_moments_of_parts_are_joined():
    x = torch.randn(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 1e6
    parts = [Moments(part.mean(0), part.var(0), len(part), 0.1) for part in x.split([2, 11, 17])]
    torch.testing.assert_close(joined(parts), (x.mean(0), x.var(0)), rtol=1e-9, atol=1e-9)


def test_a_norm_that_is_called_twice_moves_twice():
    norm, plain = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    statistics = BatchStatistics(norm)
    first, second = torch.randn(2, 12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for mb, rows in enumerate((slice(0, 5), slice(5, 12))):
        with statistics.around_forward(Microbatch(mb, (), 0, WHOLE)):
            norm(first[rows])
            norm(second[rows])
    assert not norm.num_batches_tracked
    statistics.before_step(Batch([0, 1]))
    plain(first)
    plain(second)
    for (name, tensor), wanted in zip(norm.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12, msg=name)
