"""Epochs with records and checkpoints, from a program."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pipetrain import Pipeline, fit
from pipetrain.records.recorder import Recorder
from pipetrain.trainer import window_stop as early
from pipetrain.trainer.run import Run
from tests.support.process_ranks import Ranks
from tests.support.processes import checkpoints
from tests.users.programs import batch, ended, mlp, sgd

pytestmark = pytest.mark.processes


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    data: TensorDataset = TensorDataset(*batch(30))
    train = DataLoader(data, 8, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(7))
    return train, DataLoader(data, batch_size=16)


def pipe_of() -> Pipeline:
    pipe = Pipeline(mlp(nn.Dropout(0.2)), cross_entropy, sgd, microbatches=2, device="cpu", seed=3)
    torch.manual_seed(7)  # of the shuffling
    return pipe


def by_hand() -> tuple[list[float], list[float]]:
    """The mean losses of three epochs, and those of the evaluations, of a loop over pipe.train."""
    losses, evaluated = [], []
    with pipe_of() as pipe:
        train, test = loaders()
        for _ in range(3):
            losses.append(sum(found := list(pipe.train(train))) / len(found))
            evaluated.append(pipe.evaluate(test)["loss"])
    return losses, evaluated


def fitted(folder: str | None, epochs: int | None, resume: str | None = None, **options: Any) -> Any:
    with pipe_of() as pipe:
        return fit(pipe, *loaders(), epochs, folder, resume, name="dots", **options)


def unwritten(folder: str) -> tuple[int, str, list[str]]:
    """Fit in a thread, where no signal can be handled; what needs them is refused there."""
    os.chdir(folder)
    with ThreadPoolExecutor(1) as thread:
        rows = thread.submit(fitted, None, 1).result()
        told = ended(partial(thread.submit(fitted, "run", 1).result))
    return len(rows), told, os.listdir(folder)


def interrupted(folder: str, signalled: int = signal.SIGTERM) -> tuple[int, bool]:
    """Get a signal on rank 0 amid the first epoch; return how many rows there are."""
    train, test = loaders()

    class Interrupting:
        def __len__(self) -> int:
            return len(train)

        def __iter__(self) -> Iterator[Any]:
            handler = signal.getsignal(signal.SIGTERM)  # so data workers forked here are out of its reach
            assert getattr(handler, "__module__", "") == "pipetrain.signals"
            for number, one in enumerate(train):
                if number == 1:
                    os.kill(os.getpid(), signalled)
                    time.sleep(0.5)  # for the thread that hears it, on a busy machine
                yield one

    with pipe_of() as pipe:
        return len(fit(pipe, Interrupting(), test, 2, folder)), pipe.stopping


def interrupting(folder: str) -> str:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(folder, signal.SIGINT)
    return str(caught.value)


def test_ctrl_c_to_one_rank_interrupts_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(interrupting, str(tmp_path / "run"))
    assert first == second
    assert re.fullmatch(
        r'interrupted; update-0.*go on with fit\(\.\.\., run_dir="/.*", resume="auto"\)', first
    )


def orphaned(folder: str) -> str:
    """Train until the store of rank 1 is lost; return what the training ends with."""
    keeps = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    with pipe_of() as pipe:
        store = dist.TCPStore("127.0.0.1", keeps[0].port, is_master=False, wait_for_workers=False)
        pipe._training.groups.store = store
        lose = keeps.clear if pipe.rank else lambda: None
        return ended(partial(fit, pipe, *loaders(), 10**6, folder, after_epoch=lambda row: lose()))


def test_ranks_whose_torchrun_is_gone_save_and_end(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(orphaned, str(tmp_path))
    assert first == second
    said = r"^ChannelError: torchrun's store is lost, so whatever started this run is gone; (\S+) is saved: "
    (saved,) = re.findall(said, first)
    assert saved == next(iter(checkpoints(tmp_path)))


def losses_of(rows: Any) -> list[tuple[float, float]]:
    return [(row["train_loss"], row["val_loss"]) for row in rows]


def test_it_trains_as_a_loop_does_leaves_records_and_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    """From a stop amid an epoch; and for another epoch where a training has ended."""
    run, cut = tmp_path / "run", tmp_path / "cut"
    losses, evaluated = ranks(by_hand)[0]
    first, second = ranks(fitted, str(run), 3)
    assert first[0] | {"samples_per_s": 0, "seconds": 0} == second[0] | {"samples_per_s": 0, "seconds": 0}
    assert [row["epoch"] for row in first] == [1, 2, 3]
    assert losses_of(first) == [pytest.approx(pair) for pair in zip(losses, evaluated, strict=True)]
    with (run / "metrics.csv").open() as file:
        written = [float(row["val_loss"]) for row in csv.DictReader(file)]
    assert written == pytest.approx(evaluated, rel=1e-5)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["data"], summary["updates"], len(summary["per_stage"])) == ("dots", 9, 2)
    names = {path.name for path in run.iterdir()}
    assert {"plan.txt", "timeline.png", "config.yaml", "updates.csv", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)

    assert ranks(interrupted, str(cut)) == [(0, True)] * 2
    (saved,) = (cut / "checkpoints").glob("update-*")
    assert saved.name != "update-00000003"
    for epochs in (2, 3):
        assert losses_of(ranks(fitted, str(cut), epochs, "auto")[0]) == losses_of(first[:epochs])


def cut_short(folder: str) -> list[Any]:
    """Five updates of three in an epoch, again, and then three whole epochs."""
    one = fitted(folder, None, "auto", max_updates=5)
    known = json.loads(Path(folder, "summary.json").read_text())
    again = fitted(folder, 9, "auto", max_updates=5)
    return [one, again, fitted(folder, 3, "auto"), fitted(None, 3), known, fitted(None, None, max_updates=2)]


def test_a_training_of_so_many_updates_ends_amid_an_epoch_and_a_longer_one_goes_on_with_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    one, again, longer, whole, known, short = ranks(cut_short, str(tmp_path / "run"))[0]
    assert losses_of(one)[0] == losses_of(whole)[0]
    assert losses_of(one)[1] != losses_of(whole)[1]
    assert losses_of(again) == losses_of(one)
    assert losses_of(longer) == losses_of(whole)
    assert (known["updates"], known["epochs"], len(known["per_stage"]), len(short)) == (5, 2, 2, 1)
    assert known["epoch_s"] == pytest.approx(sum(row["seconds"] for row in one) * 3 / 5)
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names >= {"update-00000006", "update-00000009"}


def not_evaluated(folder: str) -> Any:
    train, test = loaders()
    with pipe_of() as pipe:
        fit(pipe, train, epochs=2, run_dir=folder)
    left = {path: Path(folder, path).read_text() for path in ("metrics.csv", "summary.json")}
    with pipe_of() as pipe:
        return left, fit(pipe, train, test, 3, folder, "auto")


def test_without_test_samples_no_epoch_is_evaluated_or_best_and_one_with_them_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "pipetrain"):
        left, rows = not_evaluated(str(tmp_path))
    assert [("val_loss" in row, "train_loss" in row) for row in rows] == [(False, True)] * 2 + [(True, True)]
    summary = json.loads(left["summary.json"])
    assert [key for key in summary if "val" in key] == []
    assert (summary["best_epoch"], summary["test_samples"]) == (None, 0)
    assert "val_loss" not in left["metrics.csv"]
    first, *_, last = csv.DictReader((tmp_path / "metrics.csv").open())
    assert (first["val_loss"], float(last["val_loss"])) == ("", pytest.approx(rows[-1]["val_loss"], rel=1e-5))
    assert "no test samples" in caplog.text
    assert re.search(r"train loss \S+ \(not evaluated\) in", caplog.text)
    table, mixed = re.findall(r"\n(epoch  .*)\n((?:.*\d.*\n)+)", caplog.text)
    assert (table[0].split()[1:3], "best" in table[1]) == (["train", "loss"], False)
    assert [line.split()[-1] for line in mixed[1].splitlines()][2] == "best"


def test_without_a_folder_nothing_is_written_and_any_thread_trains(ranks: Ranks, tmp_path: Path) -> None:
    rows, told, left = ranks(unwritten, str(tmp_path))[0]
    assert (rows, left) == (1, [])
    assert "main thread" in told


POINTS: TensorDataset = TensorDataset(*batch(30))
SHARE: Any = DistributedSampler(POINTS, 2, 0)
WRONG: dict[str, dict[str, Any]] = {
    "epochs=0 must be a whole number of at least 1": {"epochs": 0},
    "checkpoint has no often": {"checkpoint": {"often": 1}},
    "checkpoint.unit=weeks must be one of epochs, updates": {"checkpoint": {"unit": "weeks"}},
    "loggers=paper is unknown": {"loggers": ["paper"]},
    "the test loader has no batch": {"test": []},
    "trace=x must be a whole number": {"trace": "x"},
    "run_dir=3 must be the path": {"run_dir": 3},
    "resume=5 must be auto, the folder of a checkpoint": {"resume": 5},
    "loggers=5 must be names, or options by name": {"loggers": 5},
    "loggers={'wandb': 5} must be names, or options by name": {"loggers": {"wandb": 5}},
    "resume= goes on in a run's folder: give run_dir= too": {"resume": "auto", "run_dir": None},
    "the train loader has no batch or no length": {"train": iter(())},
    "a batch of 1 sample cannot be cut into microbatches=2": {"train": DataLoader(POINTS, 29)},
    "the loader's DistributedSampler gives": {"test": DataLoader(POINTS, sampler=SHARE)},
}


def refused(folder: str) -> list[str]:
    train, test = loaders()
    with pipe_of() as pipe:
        given = [{"train": train, "test": test, "run_dir": folder, **options} for options in WRONG.values()]
        return [ended(partial(fit, pipe, **options)) for options in given]


def test_wrong_options_are_refused_in_a_sentence_and_leave_no_folder(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(refused, str(tmp_path / "run")):
        for said, wanted in zip(told, WRONG, strict=True):
            assert re.match(rf"(ConfigError|Misfit): (rank 0 stopped: )?{re.escape(wanted)}", said), said
    assert not (tmp_path / "run").exists()


class Signalling(TensorDataset):
    """Its 50th sample brings SIGTERM to rank 0."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads == 50:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # for the thread that hears it, on a busy machine
        return super().__getitem__(index)


def with_replicas(folder: str, max_updates: int | None, stops: bool = False) -> bool:
    """Train an epoch of 60 batches in one window, of stages on 2 ranks and 1; return whether it stops."""
    torch.manual_seed(7)
    train = DataLoader((Signalling if stops else TensorDataset)(*batch(240)), batch_size=4, shuffle=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        Pipeline(
            mlp(), cross_entropy, sgd, "pipedream", microbatches=1, replicas=[2, 1], device="cpu"
        ) as pipe,
    ):
        patch.setattr(early, "MOST_LEFT_S", 0.0)
        fit(pipe, train, None, 1, folder, "auto", loggers=(), max_updates=max_updates)
        return pipe.stopping


def test_a_window_of_replicas_ends_early_on_all_ranks_and_the_rest_is_trained_later(
    three: Ranks, tmp_path: Path
) -> None:
    """As after a training whose window was to end there."""
    assert three(with_replicas, str(tmp_path / "cut"), None, True) == [True] * 3
    (saved,) = (tmp_path / "cut" / "checkpoints").glob("update-*")
    updates = int(saved.name.removeprefix("update-"))
    assert 0 < updates < 60
    for most in (updates, None):
        assert three(with_replicas, str(tmp_path / "whole"), most) == [False] * 3
    assert three(with_replicas, str(tmp_path / "cut"), None) == [False] * 3
    for stage in range(2):
        ends = [tmp_path / of / "checkpoints/update-00000060" for of in ("cut", "whole")]
        cut, whole = (load_file(end / f"stage-{stage}.safetensors") for end in ends)
        assert all(torch.equal(cut[name], whole[name]) for name in cut | whole)


def stopped_early(folder: str) -> list[tuple[int, list[float], bool]]:
    """Train until the third epoch is enough, and again; rank 1 alone says so."""
    found, (train, test) = [], loaders()
    for _ in range(2):
        seen: list[float] = []

        def enough(row: dict[str, float]) -> str | None:
            seen.append(row["epoch"])  # noqa: B023
            return "stop" if len(seen) == 3 and os.environ["RANK"] == "1" else None  # noqa: B023

        with pipe_of() as pipe:
            rows = fit(pipe, train, test, 9, folder, "auto", after_epoch=enough)
            found.append((len(rows), seen, pipe.stopping))
    return found


def test_a_function_of_the_row_ends_it_well_and_one_that_goes_on_knows_the_epochs_before(
    ranks: Ranks, tmp_path: Path
) -> None:
    for told in ranks(stopped_early, str(tmp_path / "run")):
        assert told == [(3, [1, 2, 3], False)] * 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 3 * len(loaders()[0])


def started_late(folder: Path) -> bool:
    """Rank 0 has much to do before the first epoch: return whether that was over when this rank began it."""
    begun, over = folder / "begun", []
    windows = Run.windows

    def begin(self: Recorder, *given: object) -> None:
        time.sleep(0.2)
        begun.touch()

    def noted(self: Run, epoch: int) -> Any:
        over.append(begun.exists())
        return windows(self, epoch)

    with pytest.MonkeyPatch.context() as patch, pipe_of() as pipe:
        patch.setattr(Recorder, "begin", begin)
        patch.setattr(Run, "windows", noted)
        fit(pipe, *loaders(), 1)
    return all(over)


def test_what_a_rank_does_before_the_first_epoch_is_no_time_of_it(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(started_late, tmp_path) == [True, True]


def test_one_more_epoch_of_the_same_pipeline_says_its_line_and_no_tables(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = []
    with pipe_of() as pipe, caplog.at_level("INFO", "pipetrain"):
        for epochs in (1, 1, 2):
            fit(pipe, *loaders(), epochs)
            told.append(("updates late" in caplog.text, "epoch 1/" in caplog.text))
            caplog.clear()
    assert told == [(True, True), (False, True), (True, True)]
