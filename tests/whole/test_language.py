"""Language modelling over padded tokens equals one plain process, with inputs that are tuples."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.data import Data, Draw, Sampler
from tests.support import reference
from tests.support.cases import Case, config, run_in_threads
from tests.support.runs import Run, prepare

TOKENS, LENGTH, WIDTH = 12, 7, 8
PADDING = -100
WORDS = (
    f"model._target_={__name__}.model",
    "data=digits",
    "task=language_modelling",
    "batch_size=12",
    "microbatches=4",
    "epochs=1",
    "lr_schedule=constant",
    "optim.lr=0.5",
    "dtype=float64",
    "seed=0",
    "device=cpu",
)
EMPTY = Sampler(36, 12, 4, seed=0).epoch(0)[1][2].tolist()  # a whole microbatch of update 2


class Embed(nn.Module):
    """(tokens [n, t], mask [n, t]) -> [n, t, width], causal."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        tokens, mask = pair
        return (self.table(tokens) * mask.unsqueeze(-1)).cumsum(1)


def model() -> nn.Sequential:
    return nn.Sequential(
        Embed(), nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH), nn.Linear(WIDTH, TOKENS)
    )


@dataclass(frozen=True)
class Sentences:
    """Sentences of 0 to 6 tokens, padded; the target of each token is the next one."""

    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def _tokens(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        made = (ids[:, None] * 5 + torch.arange(LENGTH + 1) * (ids[:, None] % 3 + 1)) % TOKENS
        return made, torch.arange(LENGTH) < torch.tensor(self.lengths)[ids][:, None]

    def inputs(self, ids: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor]:
        tokens, known = self._tokens(ids)
        return tokens[:, :-1], known.double()

    def targets(self, ids: Tensor, draw: Draw | None) -> Tensor:
        tokens, known = self._tokens(ids)
        return tokens[:, 1:].where(known, PADDING)

    def first(self, n: int) -> Sentences:
        return Sentences(self.lengths[:n])

    def checksum(self) -> int:
        return sum(self.lengths)


def data(lengths: tuple[int, ...]) -> Data:
    return Data("sentences", Sentences(lengths), Sentences((1, 6, 0, 3, 2)), TOKENS)


PADDED = data(tuple(0 if sample in EMPTY else sample * 7 % 7 + sample % 6 for sample in range(36)))


def run_of(case: Case, samples: Data = PADDED) -> Run:
    cfg = config([*WORDS, *case.overrides, f"schedule={case.schedule}"])
    return prepare(cfg, case.schedule, case.ranks, samples.facts, samples)


def plain(run: Run) -> tuple[dict[str, Tensor], float]:
    """One process, each update over its whole batch; the state, and the mean loss of all tokens."""
    made = run.take_network().model
    optimizer = run.optimizer(made.named_parameters())
    total = counted = 0.0
    for batch in run.sampler.epoch(0):
        ids = torch.cat(batch)
        targets = PADDED.train.targets(ids, None).flatten()
        loss = functional.cross_entropy(made(PADDED.train.inputs(ids, None)).flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counting = int((targets != PADDING).sum())
        total, counted = total + loss.item() * counting, counted + counting
    return made.state_dict(), total / counted


def by_versions(run: Run) -> tuple[dict[str, Tensor], float]:
    """The reference that gives each stage the weight version of the theory."""
    recipe = reference.Recipe(
        data=PADDED,
        seed=0,
        sampler=run.sampler,
        epochs=1,
        microbatches=4,
        window=None,
        early={},
        cuts=run.plan.cuts,
        optimizer=run.optimizer,
        rate=run.settings.rate(run.updates),
    )
    delay = reference.DELAYS[run.settings.schedule](run.plan.stages, 4)
    outcome = reference.train(run.take_network().model, recipe, [delay])
    return outcome.state, outcome.epochs[0][0]


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (Case("1f1b", 2, ("partition=[2]",)), plain),
        (Case("pipedream", 2, ("partition=[1]",)), by_versions),
        (Case("1f1b", 3, ("partition=[2,4]",)), plain),
    ],
    ids=["1f1b on 2", "pipedream on 2", "1f1b on 3"],
)
def test_padded_tokens_count_for_nothing_however_unevenly_they_lie(case, wanted):
    """The rank in the middle has no data at all."""
    run = run_of(case)
    assert run.updates == 3
    ends = {run.plan.placement[0], run.plan.placement[-1]}
    runs = [run if rank in ends else replace(run, data=None) for rank in range(case.ranks)]
    state, (figures,) = run_in_threads(case, runs=runs)
    expected, loss = wanted(run)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            state[name], tensor, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert figures.trained["loss"] == pytest.approx(loss, rel=1e-12)
    assert figures.samples == 36
    assert figures.score == -math.exp(figures.evaluated["loss"])

    made = run.take_network().model.eval()
    made.load_state_dict(state)
    ids = torch.arange(5)
    scores, targets = made(PADDED.test.inputs(ids, None)), PADDED.test.targets(ids, None)
    whole = functional.cross_entropy(scores.flatten(0, 1), targets.flatten()).item()
    assert figures.evaluated["loss"] == pytest.approx(whole, rel=1e-12)
    right = (scores.argmax(-1) == targets)[targets != PADDING].double().mean().item()
    assert figures.evaluated["acc"] == pytest.approx(right, rel=1e-12)
