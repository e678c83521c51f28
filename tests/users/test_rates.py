"""Learning rates that a program sets, as it would in a loop of plain PyTorch."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from pipetrain import Pipeline, fit
from tests.support.process_ranks import Ranks
from tests.users.programs import batch, mlp, sgd

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:Detected call of")]

BATCHES = [batch(8, seed) for seed in range(4)]
Change = Callable[[Optimizer, list[Any], float], None]
"""Gets an optimizer, what the program keeps of it, and the last loss."""


def stepped(optimizer: Optimizer, kept: list[Any], loss: float) -> None:
    if not kept:
        kept.append(StepLR(optimizer, 3, 0.5))
    kept[0].step()


def by_the_loss(optimizer: Optimizer, kept: list[Any], loss: float) -> None:
    if not kept:
        kept.append(ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5))
    kept[0].step(loss)


def by_hand(optimizer: Optimizer, kept: list[Any], loss: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


EACH: dict[str, tuple[Change, bool]] = {  # and whether it is called after each update, or after a pass
    "a scheduler": (stepped, True),
    "a scheduler of the loss": (by_the_loss, True),
    "by hand": (by_hand, False),
}


def plainly(change: Change, often: bool, scheduler: Any = None) -> tuple[list[float], list[float]]:
    """The losses, and the rate of the last update of each of two passes, of a plain loop."""
    model, kept, losses, rates = mlp(), list[Any](), list[float](), list[float]()
    optimizer = sgd(model.parameters())
    if scheduler:
        kept.append(scheduler(optimizer))
    for _ in range(2):
        for x, y in BATCHES:
            loss = cross_entropy(model(x), y)
            loss.backward()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if often:
                change(optimizer, kept, losses[-1])
        rates.append(rate)
        if not often:
            change(optimizer, kept, losses[-1])
    return losses, rates


def by_schedule(goes_on: str | None = None, saved: str | None = None) -> tuple[list[float], list[float]]:
    """The same with schedulers given as lr_schedule=, which change the momentum too; with a stop or not."""
    with Pipeline(mlp(), cross_entropy, sgd, microbatches=2, device="cpu", lr_schedule=several) as pipe:
        losses, rates = list[float](), list[float]()
        if goes_on:
            pipe.load(goes_on)
        for number in range(pipe.updates // 4, 2):
            losses += pipe.train(BATCHES)
            rates.append(pipe.metrics["learning_rate"])
            if saved and not number:
                pipe.save(saved)
        return losses, rates


def several(optimizer: Optimizer) -> SequentialLR:
    first, then = StepLR(optimizer, 2, 0.5), OneCycleLR(optimizer, 0.2, total_steps=8)
    return SequentialLR(optimizer, [first, then], [3])


def stepped_several(optimizer: Optimizer, kept: list[Any], loss: float) -> None:
    kept[0].step()


def followed() -> dict[str, tuple[list[float], list[float]]]:
    """The same of a Pipeline, whose ranks each change the optimizers of their stages."""
    found = {}
    for name, (change, often) in EACH.items():
        made, losses, rates = list[tuple[Optimizer, list[Any]]](), list[float](), list[float]()

        def optimizer(parameters: Any, made: Any = made) -> Optimizer:
            made.append((sgd(parameters), []))
            return made[-1][0]

        with Pipeline(mlp(), cross_entropy, optimizer, microbatches=2, device="cpu") as pipe:
            for _ in range(2):
                for loss in pipe.train(BATCHES):
                    losses.append(loss)
                    for one, kept in made if often else ():
                        change(one, kept, loss)
                rates.append(pipe.metrics["learning_rate"])
                for one, kept in () if often else made:
                    change(one, kept, loss)
        found[name] = losses, rates
    return found


def test_a_program_s_schedulers_and_changes_are_followed(ranks: Ranks) -> None:
    first, second = ranks(followed)
    assert first == second
    for name, how in EACH.items():
        losses, rates = plainly(*how)
        assert first[name][0] == pytest.approx(losses, rel=1e-12), name
        assert first[name][1] == rates, name
        assert rates[0] != rates[1]


def test_a_torch_scheduler_of_each_stage_s_optimizer_is_as_one_of_all_and_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    (losses, rates), other = ranks(by_schedule, None, str(tmp_path))
    assert (losses, rates) == other
    wanted, of_these = plainly(stepped_several, True, several)
    assert (losses, rates) == (pytest.approx(wanted, rel=1e-12), of_these)
    assert ranks(by_schedule, str(tmp_path))[0] == (losses[4:], rates[1:])


def halving(folder: str | None, epochs: int, max_updates: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Fit with a rate that is halved after each epoch; return the rows and the weights."""
    data = DataLoader(TensorDataset(*batch(32)), batch_size=8)
    made = list[Optimizer]()

    def optimizer(parameters: Any) -> Optimizer:
        made.append(torch.optim.SGD(parameters, 0.5, momentum=0.9))
        return made[-1]

    def halve(row: Any) -> None:
        for one in made:
            by_hand(one, [], 0.0)

    with Pipeline(
        mlp(), cross_entropy, optimizer, "pipedream", window=2, device="cpu", correction="msnag"
    ) as pipe:
        options: Any = {"log_every": 1, "loggers": (), "max_updates": max_updates, "after_epoch": halve}
        rows = fit(pipe, data, None, epochs, folder, "auto" if folder else None, **options)
        return rows, pipe.state_dict()


def test_rates_are_in_the_records_and_go_on_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """From the end of an epoch and from amid one, bit for bit, with the step that a correction keeps."""
    (rows, wanted), (others, _) = ranks(halving, None, 3)
    assert [row["lr"] for row in rows] == [row["lr"] for row in others] == [0.5, 0.25, 0.125]
    for epochs, updates in ((1, None), (2, 6), (3, None)):
        (rows, state), _ = ranks(halving, str(tmp_path), epochs, updates)
    assert [row["lr"] for row in rows] == [0.5, 0.25, 0.125]
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    with (tmp_path / "updates.csv").open() as file:
        written = [float(row["lr"]) for row in csv.DictReader(file)]
    assert written == [0.5] * 4 + [0.25] * 4 + [0.125] * 4
