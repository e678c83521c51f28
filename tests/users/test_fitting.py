"""Epochs with records and checkpoints, from a program."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pipetrain import ConfigError, Pipeline, fit
from tests.support.ranks import Ranks

pytestmark = pytest.mark.processes


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)
    return nn.Sequential(*layers).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (50,), generator=generator)
    data = TensorDataset(x, y)
    return DataLoader(data, batch_size=8, shuffle=True, drop_last=True), DataLoader(data, batch_size=16)


def pipe_of(schedule: str = "1f1b") -> Pipeline:
    pipe = Pipeline(model(), functional.cross_entropy, sgd, schedule, microbatches=2, device="cpu", seed=3)
    torch.manual_seed(7)  # of the shuffling
    return pipe


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def plainly(epochs: int) -> tuple[list[float], list[float]]:
    """Losses of all updates, and those of the evaluations, of a loop over pipe.train."""
    pipe = pipe_of()
    train, test = loaders()
    losses, evaluated = [], []
    for _ in range(epochs):
        losses.append(sum(found := list(pipe.train(train))) / len(found))
        evaluated.append(pipe.evaluate(test)["loss"])
    pipe.close()
    return losses, evaluated


def fitted(folder: str, resume: str | None = None) -> Any:
    pipe = pipe_of()
    rows = fit(pipe, *loaders(), 2, folder or None, resume, name="dots")
    pipe.close()
    return rows


def test_it_trains_as_a_loop_does_and_leaves_records(ranks: Ranks, tmp_path: Path) -> None:
    (losses, evaluated), _ = ranks(plainly, 2)
    first, second = ranks(fitted, str(tmp_path / "run"))
    assert first[0] | {"samples_per_s": 0, "seconds": 0} == second[0] | {"samples_per_s": 0, "seconds": 0}
    assert [row["epoch"] for row in first] == [1, 2]
    assert [row["train_loss"] for row in first] == pytest.approx(losses, rel=1e-12)
    assert [row["val_loss"] for row in first] == pytest.approx(evaluated, rel=1e-12)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        written = [float(row["val_loss"]) for row in csv.DictReader(file)]
    assert written == pytest.approx(evaluated, rel=1e-5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["data"], summary["updates"], len(summary["per_stage"])) == ("dots", 12, 2)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"plan.txt", "timeline.png", "config.yaml", "updates.csv", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)


def test_without_a_folder_nothing_is_written(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks(unwritten, str(tmp_path))
    assert first == [2, []]


def unwritten(folder: str) -> Any:
    os.chdir(folder)
    return [len(fitted("")), os.listdir(folder)]


def stopped(folder: str, batches: int) -> Any:
    """Get SIGTERM on rank 0 while batch number `batches` is read; return how many rows there are."""
    pipe = pipe_of()
    train, test = loaders()

    class Interrupting:
        def __len__(self) -> int:
            return len(train)

        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(train):
                if number == batches:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

    rows = fit(pipe, Interrupting(), test, 2, folder)
    stopping = pipe.stopping
    pipe.close()
    return [len(rows), stopping]


@pytest.mark.parametrize("batches", [1, 2])
def test_a_stop_amid_an_epoch_saves_and_it_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, batches: int
) -> None:
    whole, _ = ranks(fitted, str(tmp_path / "whole"))
    assert ranks(stopped, str(tmp_path / "run"), batches) == [[0, True]] * 2
    (saved,) = (tmp_path / "run" / "checkpoints").glob("update-*")
    assert saved.name != "update-00000006"
    resumed, _ = ranks(fitted, str(tmp_path / "run"), "auto")
    for one, other in zip(whole, resumed, strict=True):
        assert one["val_loss"] == other["val_loss"]
        assert one["train_loss"] == other["train_loss"]


def test_more_epochs_go_on_where_a_finished_training_ended(ranks: Ranks, tmp_path: Path) -> None:
    whole, _ = ranks(longer, str(tmp_path / "whole"), None, 3)
    ranks(longer, str(tmp_path / "run"), None, 2)
    resumed, _ = ranks(longer, str(tmp_path / "run"), "auto", 3)
    assert [row["val_loss"] for row in resumed] == [row["val_loss"] for row in whole]


def longer(folder: str, resume: str | None, epochs: int) -> Any:
    pipe = pipe_of()
    rows = fit(pipe, *loaders(), epochs, folder, resume)
    pipe.close()
    return rows


WRONG: dict[str, dict[str, Any]] = {
    "epochs=0 must be a whole number of at least 1": {"epochs": 0},
    "checkpoint has no often": {"checkpoint": {"often": 1}},
    "checkpoint.unit=weeks must be one of epochs, updates": {"checkpoint": {"unit": "weeks"}},
    "loggers has an unknown paper": {"loggers": ["paper"]},
    "the test loader has no batch": {"test": []},
    "fit needs a test loader": {"test": None},
    "trace=-1 must be a whole number": {"trace": -1},
    "trace=x must be a whole number": {"trace": "x"},
    "loggers=3 must be a list of names": {"loggers": 3, "run_dir": "run"},
    "loggers={'tensorboard': None} must be a list": {"loggers": {"tensorboard": None}, "run_dir": "run"},
    "run_dir=3 must be the path": {"run_dir": 3},
    "resume= goes on in a run's folder: give run_dir= too": {"resume": "auto", "run_dir": None},
}


def refused(folder: str) -> list[str]:
    pipe, found = pipe_of(), []
    for options in WRONG.values():
        train, test = loaders()
        with pytest.raises(ConfigError) as caught:
            fit(pipe, train, **{"test": test, "run_dir": folder, **options})
        found.append(str(caught.value))
    train, test = loaders()
    with pytest.raises(ConfigError) as caught:
        fit(pipe, (batch for batch in train), test)
    with pytest.raises(ConfigError, match="fit needs a Pipeline, not Linear"):
        fit(nn.Linear(2, 2), train, test)  # type: ignore[arg-type]
    pipe.close()
    return [*found, str(caught.value)]


def test_wrong_options_are_refused_in_a_sentence_and_leave_no_folder(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(refused, str(tmp_path / "run"))
    for said, wanted in zip(first, [*WRONG, "the train loader has no length"], strict=True):
        assert said.startswith(wanted), said
    assert [said.removeprefix("rank 0 stopped: ") for said in second] == first
    assert not (tmp_path / "run").exists()
