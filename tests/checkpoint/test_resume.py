"""A run that goes on from a checkpoint ends as one that was never stopped, and a wrong one is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipetrain.checkpoint import files
from pipetrain.checkpoint.files import CHECKPOINTS, Manifest, Position, Tensors, read_whole
from pipetrain.checkpoint.progress import best_epoch
from pipetrain.checkpoint.resume import refuse_other, tensors_of, with_cuts_of
from pipetrain.checkpoint.source import Source, find_source, refuse_older
from pipetrain.cli import contained
from pipetrain.errors import ConfigError
from pipetrain.records.folder import lengthens
from pipetrain.settings import Settings
from pipetrain.train import conditions_of
from pipetrain.untrusted import DamagedCheckpoint
from tests.support.cases import Case, Epochs, Saved, compare, config, make_run, run_in_threads
from tests.support.damage import forge, put
from tests.support.runs import Run

pytestmark = pytest.mark.slow

ONE_OF_A_KIND = ("1f1b", "fbp", "interleaved_1f1b", "pipedream", "pipedream_2bw", "v_async", "zb_h2")
WINDOWS = dict.fromkeys(("pipedream", "pipedream_2bw", "v_async", "zb_h2"), "window=2")


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / CHECKPOINTS).glob("update-*"))


def losses(epochs):
    return [(f.trained, f.evaluated, f.lr) for f in epochs]


def a_case(schedule: str, ranks: int, *overrides: str) -> Case:
    m = max(2, ranks) if schedule != "pipedream" else 1
    return Case(schedule, ranks, (f"microbatches={m}", WINDOWS.get(schedule, "window=1"), *overrides), 48)


@dataclass(frozen=True)
class Whole:
    """A run that was never stopped, saved at every update: its folder, its weights at the end, its epochs."""

    folder: Path
    state: dict[str, Tensor]
    epochs: Epochs

    def ends_alike(self, state: dict[str, Tensor], epochs: Epochs) -> bool:
        """Whether a run that was stopped has ended as this one, bit for bit."""
        same = all(torch.equal(state[name], tensor) for name, tensor in self.state.items())
        return same and losses(epochs) == losses(self.epochs)


def whole(case: Case, folder: Path) -> Whole:
    return Whole(folder, *run_in_threads(case, saved=Saved(folder)))


PLAIN, OWING = a_case("1f1b", 2), a_case("1f1b", 2, "codec.backward=topk")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Whole:
    return whole(PLAIN, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def owing(tmp_path_factory) -> Whole:
    return whole(OWING, tmp_path_factory.mktemp("owing"))


@pytest.mark.parametrize(
    ("schedule", "ranks", "optimizer"),
    [
        *((schedule, 2, "optim=sgd") for schedule in ONE_OF_A_KIND),
        ("1f1b", 1, "optim=sgd"),
        ("pipedream", 3, "optim=adamw"),
        ("1f1b", 2, "optim._target_=tests.runtime.test_optimizer.Rich"),
        ("pipedream", 2, "ema=0.9"),
    ],
)
def test_a_resumed_run_is_bit_equal_from_every_checkpoint(schedule, ranks, optimizer, tmp_path):
    case = a_case(schedule, ranks, optimizer)
    wanted = whole(case, tmp_path)
    found = checkpoints(tmp_path)
    assert len(found) == 3 * (2 if schedule in WINDOWS else 4)
    for source in (found[1], found[-4]):
        again = run_in_threads(case, saved=Saved(tmp_path / "again"), source=source)
        assert wanted.ends_alike(*again), source.name


@pytest.mark.parametrize(("schedule", "ranks"), [("pipedream", 3), ("interleaved_1f1b", 2)])
def test_what_codecs_still_owe_goes_on_where_it_was(schedule, ranks, tmp_path):
    codecs = ("codec.forward=int8", "codec.backward=topk", "codec.backward.fraction=0.1")
    case = a_case(schedule, ranks, *codecs, "codec.forward.error_feedback=true")
    wanted = whole(case, tmp_path)
    found = checkpoints(tmp_path)
    for source in (found[1], found[-4]):
        assert len(residuals(source)) >= 2 * (ranks - 1)
        state, resumed = run_in_threads(case, saved=Saved(tmp_path / "again"), source=source)
        assert wanted.ends_alike(state, resumed), source.name
        assert sent(resumed) == sent(wanted.epochs), source.name


def sent(epochs) -> list[tuple[int, int, int]]:
    return [
        (stage, record.bytes_sent, record.raw_bytes)
        for figures in epochs
        for stage, record in sorted(figures.stages.items())
    ]


def residuals(source: Path) -> list[str]:
    return Tensors(source, list(read_whole(source).parts)).names("residual/")


@pytest.mark.parametrize(
    ("ranks", "override", "owes"),
    [
        (2, "codec.backward.error_feedback=false", False),
        (2, "codec.forward=topk", True),
        (2, "microbatches=1", True),
        (3, "seed=0", True),
        (1, "seed=0", False),
    ],
)
def test_codecs_may_differ_and_a_residual_that_does_not_fit_is_left_out(
    ranks, override, owes, owing, tmp_path
):
    """Without what is owed a run ends elsewhere, so the test above would notice a residual that is lost."""
    other = a_case("1f1b", ranks, "codec.backward=topk", override)
    again = run_in_threads(other, saved=Saved(tmp_path), source=checkpoints(owing.folder)[5])
    assert len(again[1]) == 3
    assert bool(residuals(checkpoints(tmp_path)[-1])) == owes
    assert not owing.ends_alike(*again)


def test_saving_changes_nothing(tmp_path):
    case = a_case("pipedream", 2)
    assert whole(case, tmp_path).ends_alike(*run_in_threads(case))


def test_random_numbers_go_on_where_they_were(tmp_path):
    case = a_case("1f1b", 1, "model._target_=tests.support.models.dropping")
    wanted = whole(case, tmp_path)
    assert wanted.ends_alike(*run_in_threads(case, source=checkpoints(tmp_path)[5]))


@pytest.mark.parametrize(
    ("schedule", "ranks", "partition"),
    [("1f1b", 1, "flops"), ("gpipe", 3, "even"), ("interleaved_1f1b", 2, "even")],
)
def test_another_partition_and_synchronous_schedule_ends_the_same(schedule, ranks, partition, plain):
    other = a_case(schedule, ranks, f"partition={partition}", "microbatches=2")
    state, resumed = run_in_threads(other, source=checkpoints(plain.folder)[5])
    for name, tensor in plain.state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)
    assert [f.evaluated["acc"] for f in resumed] == [f.evaluated["acc"] for f in plain.epochs]


def test_groups_and_the_moving_average_go_with_their_parameters_to_other_stages(tmp_path):
    words = ["optim=adamw", "optim.lr=0.01", "optim.groups.norms_and_biases.weight_decay=0", "ema=0.5"]
    words += ["optim.groups.late.params='^[5-9]'", "optim.groups.late.lr=0.02"]
    wanted = whole(a_case("1f1b", 2, "partition=[3]", *words), tmp_path)
    for ranks, partition in ((1, "flops"), (3, "[2,8]")):
        other = a_case("gpipe", ranks, f"partition={partition}", "microbatches=2", *words)
        state, resumed = run_in_threads(other, source=checkpoints(tmp_path)[5])
        for name, tensor in wanted.state.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)
        ended, evaluated = ([f.evaluated["loss"] for f in epochs] for epochs in (wanted.epochs, resumed))
        torch.testing.assert_close(ended, evaluated, rtol=1e-12, atol=1e-12)


def test_a_moving_average_may_begin_and_end_with_a_restart(tmp_path, plain):
    began = run_in_threads(a_case("1f1b", 2, "ema=0.5"), source=checkpoints(plain.folder)[5])
    assert all(torch.equal(began[0][name], tensor) for name, tensor in plain.state.items())
    assert began[1][-1].evaluated != plain.epochs[-1].evaluated
    averaged = whole(a_case("1f1b", 2, "ema=0.5"), tmp_path)
    again = run_in_threads(PLAIN, source=checkpoints(averaged.folder)[5])
    assert again[1][-1].evaluated == plain.epochs[-1].evaluated


def test_epochs_before_another_metric_have_no_value_of_it(plain):
    words = ["+metrics.far._target_=pipetrain.tasks.Accuracy", "+metrics.far.top=3"]
    _, resumed = run_in_threads(a_case("1f1b", 2, *words), source=checkpoints(plain.folder)[5])
    assert [record.as_row().keys() for record in resumed] == [resumed[-1].as_row().keys()] * len(resumed)
    assert math.isnan(resumed[0].evaluated["top3"])
    assert resumed[-1].evaluated["top3"] > 0


@pytest.mark.parametrize(
    ("at", "epochs_done", "position"), [(6, 1, Position(1, 2, 6)), (12, 2, Position(2, 4, 12))]
)
def test_a_run_that_is_asked_to_stop_saves_at_that_window_and_goes_on_later(
    at, epochs_done, position, plain, tmp_path
):
    """At the end of the last epoch's training too: its evaluation is left for later."""
    _, some = run_in_threads(PLAIN, saved=Saved(tmp_path, every=None, at=at, asked="stop"))
    assert len(some) == epochs_done
    (source,) = checkpoints(tmp_path)
    assert read_whole(source).position == position
    assert plain.ends_alike(*run_in_threads(PLAIN, source=source))


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [*((schedule, 3) for schedule in ONE_OF_A_KIND), ("pipedream", 1)]
)
def test_a_window_that_ends_early_trains_as_two_windows(schedule, microbatches, tmp_path):
    """Held against the reference, which drains there too; of fbp nobody knows what it has read before."""
    words = (f"microbatches={microbatches}", "window=null", "batch_size=6", "epochs=2", "buffer_size=1")
    case = Case(schedule, 3, words, 48, early=(1, 5))
    _, some = run_in_threads(case, saved=Saved(tmp_path, every=None, ends=(3, 5)))
    assert len(some) == 1
    (source,) = checkpoints(tmp_path)
    assert read_whole(source).position == Position(1, 5, 13)
    state, epochs = run_in_threads(case, source=source)
    if schedule == "fbp":
        assert len(epochs) == 2
    else:
        compare(case, state, epochs)


def test_an_evaluation_that_ends_early_is_made_again(tmp_path):
    case = Case("pipedream", 2, ("batch_size=3", "epochs=2", "buffer_size=1"), 12)
    wanted = whole(case, tmp_path / "whole")
    _, some = run_in_threads(case, saved=Saved(tmp_path, every=None, ends=(2, 3)))
    assert some == []
    (source,) = checkpoints(tmp_path)
    assert read_whole(source).position == Position(0, 4, 4)
    assert wanted.ends_alike(*run_in_threads(case, source=source))


def test_epochs_between_checkpoints_and_how_many_are_kept(tmp_path):
    run_in_threads(a_case("1f1b", 2, "epochs=5"), saved=Saved(tmp_path, every=2, unit="epochs", keep=1))
    names = {path.name for path in checkpoints(tmp_path)}
    best = files.best(tmp_path / CHECKPOINTS)
    assert names == {"update-00000020", best} - {None}


# The best one

ONE_BEST = a_case("1f1b", 1, "epochs=5", "seed=1")  # of which epoch 3 is the best, and two others equal it


def named_best(folder: Path) -> Position:
    name = files.best(folder / CHECKPOINTS)
    assert name is not None
    return read_whole(folder / CHECKPOINTS / name).position


@pytest.mark.parametrize(("every", "unit"), [(5, "epochs"), (3, "updates")])
def test_the_best_epoch_is_saved_even_where_no_checkpoint_is_due(every, unit, tmp_path):
    _, epochs = run_in_threads(ONE_BEST, saved=Saved(tmp_path, every=every, unit=unit, keep=1))
    assert [round(11 * record.evaluated["acc"]) for record in epochs] == [1, 1, 4, 4, 4]
    assert named_best(tmp_path) == Position(3, 0, 12)
    assert [path.name for path in checkpoints(tmp_path)] == ["update-00000012", "update-00000020"]


def test_all_ranks_save_the_best_epoch_alike(tmp_path):
    case = replace(ONE_BEST, ranks=3)
    _, epochs = run_in_threads(case, saved=Saved(tmp_path, every=1000, keep=1))
    assert named_best(tmp_path).epoch == best_epoch(epochs).epoch < 5


def test_without_checkpoints_the_best_epoch_is_not_saved_either(tmp_path):
    run_in_threads(ONE_BEST, saved=Saved(tmp_path, every=None))
    assert not (tmp_path / CHECKPOINTS).exists()


def test_a_best_checkpoint_that_its_run_could_not_mark_any_more_is_marked_when_it_goes_on(tmp_path):
    run_in_threads(ONE_BEST, saved=Saved(tmp_path, every=1, unit="epochs"))
    for newer in checkpoints(tmp_path)[3:]:
        shutil.rmtree(newer)
    (tmp_path / CHECKPOINTS / "best").write_text("update-00000004\n")
    saved = Saved(tmp_path, every=1, unit="epochs", keep=1)
    run_in_threads(ONE_BEST, saved=saved, source=checkpoints(tmp_path)[-1])
    assert named_best(tmp_path) == Position(3, 0, 12)
    assert len(checkpoints(tmp_path)) == 2


# Which checkpoint


@pytest.fixture
def folder(plain, tmp_path) -> Path:
    """That of a run, to be harmed."""
    shutil.copytree(plain.folder, tmp_path / "run")
    return tmp_path / "run"


def test_the_newest_whole_one_is_taken_and_damage_is_named(folder, caplog):
    newest = checkpoints(folder)[-1]
    part = newest / "stage-1.safetensors"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    source = find_source("auto", folder)
    assert source is not None
    assert source.folder == checkpoints(folder)[-2]
    assert "update-00000012 is damaged" in caplog.text
    assert "stage-1.safetensors has another checksum" in caplog.text
    with pytest.raises(ConfigError, match=r"is damaged: .* has another checksum"):
        find_source(str(newest), folder)


def test_an_older_one_is_gone_on_from_in_another_folder(folder, tmp_path):
    older, newest = (find_source(str(path), folder) for path in checkpoints(folder)[-2:])
    assert older is not None
    assert newest is not None
    (tmp_path / "link").symlink_to(folder)
    for same in (folder, tmp_path / "link"):
        says = f"is older than {newest.folder.name} in the same run_dir, from which resume=auto would go on"
        with pytest.raises(ConfigError, match=says):
            refuse_older(older, same)
    refuse_older(older, tmp_path / "another")
    refuse_older(newest, folder)
    (newest.folder / "manifest.json").unlink()  # from what is damaged nobody would go on
    refuse_older(older, folder)


def test_nothing_to_go_on_from(tmp_path):
    assert find_source("auto", tmp_path) is None
    with pytest.raises(ConfigError, match="is no checkpoint: give auto, the folder of a run"):
        find_source(str(tmp_path), tmp_path)
    (tmp_path / CHECKPOINTS).mkdir()
    with pytest.raises(ConfigError, match="has saved no checkpoint"):
        find_source(str(tmp_path), tmp_path)


def test_all_damaged_is_refused_rather_than_begun_anew(folder):
    for path in checkpoints(folder):
        (path / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint of .* is whole"):
        find_source("auto", folder)


# What cannot be trusted, although its checksums are right

HARMED = a_case("1f1b", 2, "optim=adamw", "epochs=2", "codec.backward=topk", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    run_in_threads(HARMED, saved=Saved(folder))
    return folder


@pytest.fixture
def harmed(intact, tmp_path) -> Path:
    """A run's folder; its newest checkpoint, to be harmed, is that of batch 3 of epoch 2."""
    shutil.copytree(intact, tmp_path / "run")
    shutil.rmtree(checkpoints(tmp_path / "run")[-1])
    return tmp_path / "run"


def on(*keys: str | int) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    return lambda to: put("progress", *keys, to=to)  # type: ignore[arg-type]


def without(*keys: str | int) -> Callable[[dict[str, Any]], object]:
    def change(data: dict[Any, Any]) -> None:
        for key in ("progress", *keys[:-1]):
            data = data[key]
        del data[keys[-1]]

    return change


FIRST = ("history", 0)
PROGRESS: dict[str, Callable[[dict[str, Any]], object]] = {
    "none": put("progress", to={}),
    "of no epoch": on("history")([]),
    "without its times": without(*FIRST, "train_s"),
    "without a stage": without(*FIRST, "stages", "1"),
    "with a loss less": lambda data: data["progress"]["losses"].pop(),
    "without the rates": lambda data: data["progress"]["history"][0]["rates"].clear(),
    "with a stage more": lambda data: data["progress"]["stages"].update(
        {"2": data["progress"]["stages"]["0"]}
    ),
    "without a stage's waits": without(*FIRST, "stages", "0", "wait_s"),
    "of another epoch": on(*FIRST, "epoch")(2),
    "of no time": on(*FIRST, "train_s")(0.0),
    "of endless time": on("elapsed_s")(math.inf),
    "of a time that is none": on(*FIRST, "stages", "0", "busy_s")(math.nan),
    "of negative samples": on("trained", "samples")(-1),
    "of huge samples": on("trained", "correct")(10**300),
    "of more updates": on("stages", "0", "updates")(99),
    "later than it is": on(*FIRST, "stages", "0", "staleness")({"8": 1}),
    "late by a word": on("stages", "0", "staleness")({"late": 1}),
    "a history by name": on("history")({"0": 1}),
}


@pytest.mark.parametrize("name", PROGRESS)
def test_progress_that_no_run_can_go_on_from_is_damage_and_the_one_before_is_found(name, harmed, caplog):
    *_, earlier, newest = checkpoints(harmed)
    forge(newest, PROGRESS[name])
    source = find_source("auto", harmed)
    assert source is not None
    assert source.folder == earlier
    assert "update-00000007 is damaged: its progress" in caplog.text
    with pytest.raises(ConfigError, match="is damaged: its progress"):
        find_source(str(newest), harmed)
    with pytest.raises(DamagedCheckpoint, match="its progress"):
        run_in_threads(HARMED, source=newest)


def test_losses_may_be_infinite(harmed):
    newest = checkpoints(harmed)[-1]
    forge(newest, on(*FIRST, "evaluated", "loss")(math.nan))
    run_in_threads(HARMED, source=newest)


@pytest.mark.parametrize("batch", [5, 2**62])
def test_more_batches_than_an_epoch_has_are_refused(batch):
    with pytest.raises(ConfigError, match=f"stands after batch {batch} of an epoch, which has 4 here; give"):
        make_run(HARMED, batch)


def test_a_checkpoint_that_does_not_say_its_cuts_is_profiled_anew():
    manifest = replace(source_of().manifest, pipeline={"placement": [0, 1]})
    assert (
        with_cuts_of(config([*CFG, "partition=profile"]), Source(Path("c"), manifest), 2).partition
        == "profile"
    )


def rewrite(folder: Path, name: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change a part, and let the manifest have its checksum."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
    vouch(folder, name)


def vouch(folder: Path, name: str) -> None:
    size = (folder / name).stat().st_size
    forge(folder, put("parts", name, to={"sha256": files._checksum(folder / name), "nbytes": size}))


def first(tensors: dict[str, Tensor], prefix: str) -> str:
    return min(name for name in tensors if name.startswith(prefix))


def drop(prefix: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(first(tensors, prefix))


def turn(
    prefix: str, change: Callable[[Tensor], Tensor], like: Callable[[Tensor], bool] = lambda t: True
) -> Callable[[dict[str, Tensor]], object]:
    def turned(tensors: dict[str, Tensor]) -> None:
        name = first({name: tensor for name, tensor in tensors.items() if like(tensor)}, prefix)
        tensors[name] = change(tensors[name])

    return turned


def average(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0


def steps(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.dim()


def one_more(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.flatten(), tensor.flatten()[:1]])


MISSING, OTHER, RANDOM = "has no tensor ", " here$", "the random state of rank 0 cannot be set"
PARTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no weight": (drop("model/"), MISSING),
    "a weight of another shape": (turn("model/", one_more), OTHER),
    "a weight that would be spread": (turn("model/", lambda t: t.flatten()[0]), OTHER),
    "a weight of another dtype": (turn("model/", Tensor.float), OTHER),
    "half an optimizer": (drop("optimizer/"), "checkpoint"),
    "an average of another shape": (turn("optimizer/", one_more, average), OTHER),
    "an average that would be spread": (turn("optimizer/", lambda t: t.flatten()[0], average), OTHER),
    "steps of another shape": (turn("optimizer/", lambda t: torch.stack([t, t]), steps), OTHER),
    "no random state": (drop("random/"), MISSING),
    "another random state": (turn("random/", one_more), RANDOM),
    "a random state of numbers": (turn("random/", Tensor.float), RANDOM),
    "no such random state": (turn("random/", torch.zeros_like), RANDOM),
}


@pytest.mark.parametrize("name", PARTS)
def test_tensors_that_do_not_fit_are_damage(name, harmed):
    change, says = PARTS[name]
    newest = checkpoints(harmed)[-1]
    rewrite(newest, "stage-0.safetensors", change)
    assert find_source("auto", harmed) is not None
    with pytest.raises(DamagedCheckpoint, match=says):
        run_in_threads(HARMED, source=newest)


def test_whatever_a_stage_says_of_what_it_is_to_load_is_a_sentence(harmed, monkeypatch):
    def restore(*_: object) -> None:
        raise KeyError("exp\navg")

    monkeypatch.setattr("pipetrain.checkpoint.state._restore", restore)
    with pytest.raises(DamagedCheckpoint, match=r"^stage 0 cannot go on from the checkpoint: KeyError: 'exp"):
        run_in_threads(HARMED, source=checkpoints(harmed)[-1])


@pytest.mark.parametrize("change", [one_more, Tensor.float])
def test_residuals_that_do_not_fit_are_damage(change, harmed):
    newest = checkpoints(harmed)[-1]
    rewrite(newest, "stage-1.safetensors", turn("residual/", change))
    with pytest.raises(DamagedCheckpoint, match=r"as residual/1-0/.* here$"):
        run_in_threads(HARMED, source=newest)


def test_a_tensor_of_two_stages_and_a_part_that_is_none_are_damage(harmed):
    *_, earlier, newest = checkpoints(harmed)
    theirs = load_file(newest / "stage-0.safetensors")
    rewrite(newest, "stage-1.safetensors", lambda tensors: tensors.update(theirs))
    with pytest.raises(DamagedCheckpoint, match="which another file has too"):
        run_in_threads(HARMED, source=newest)
    (earlier / "stage-1.safetensors").write_bytes(b"nothing that anybody knows")
    vouch(earlier, "stage-1.safetensors")
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        run_in_threads(HARMED, source=earlier)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["optim=adamw", "optim._target_=torch.optim.Adafactor"], []),  # sums of rows and columns
        (["optim.momentum=0"], ["optim.momentum=0.9"]),
        (["optim=adamw", "+optim.amsgrad=true", "optim.fused=true"], ["+optim.amsgrad=false"]),
        (["optim=adamw", "optim.fused=false"], ["optim.fused=true"]),
    ],
)
def test_optimizers_remember_what_they_like_and_settings_may_change(before, after, tmp_path):
    run_in_threads(a_case("1f1b", 1, *before, "epochs=1"), saved=Saved(tmp_path))
    words = [word for word in before if word.split("=")[0] not in {new.split("=")[0] for new in after}]
    _, resumed = run_in_threads(a_case("1f1b", 1, *words, *after), source=checkpoints(tmp_path)[1])
    assert len(resumed) == 3


def test_what_an_optimizer_needs_and_did_not_remember_is_said(tmp_path):
    run_in_threads(a_case("1f1b", 1, "optim=adamw", "epochs=1"), saved=Saved(tmp_path))
    case = a_case("1f1b", 1, "optim=adamw", "+optim.amsgrad=true")
    with pytest.raises(
        ConfigError, match=r"the optimizer's max_exp_avg_sq of \S+ is missing in the checkpoint, and float"
    ):
        run_in_threads(case, source=checkpoints(tmp_path)[1])


NORM = "model._target_=tests.support.models.with_norm"
CFG = ["data=digits", "device=cpu", "batch_size=12"]


def run_with(*overrides: str):
    return make_run(Case("1f1b", 1, overrides))


ONE_EPOCH = Position(1, 0, 4)


def terms(cfg: DictConfig, run: Run) -> dict[str, Any]:
    """What a run and its checkpoint must agree in."""
    return conditions_of(cfg, run.settings, run.facts) | tensors_of(run.take_network().model)


def source_of(*overrides: str, position: Position = ONE_EPOCH) -> Source:
    mine = json.loads(json.dumps(terms(config([NORM, *CFG, *overrides]), run_with(*overrides))))
    return Source(Path("c"), Manifest("r", position, mine, {"cuts": [1], "placement": [0, 1]}, {}, {}, {}))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=1", "it has seed=0, and this run has seed=1"),
        ("batch_size=24", "it has batch_size=12, and this run has batch_size=24"),
        (
            "model._target_=tests.support.models.without_norm",
            "it has model._target_=tests.support.models.with_norm, and",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_differs(override, says):
    mine = terms(config([NORM, *CFG, override]), run_with(override))
    with pytest.raises(ConfigError) as refusal:
        refuse_other(source_of(), mine, epochs=3)
    assert says in str(refusal.value)
    assert "this run cannot go on from c" in str(refusal.value)


@pytest.mark.parametrize(
    "theirs", [{}, {"model": 1}, {"tensors": [1]}, {"tensors": {"0.weight": 3}}, {"": {"": {}}}]
)
def test_conditions_of_other_types_differ(theirs):
    source = source_of()
    source = replace(source, manifest=replace(source.manifest, conditions=theirs))
    with pytest.raises(ConfigError, match="this run cannot go on from c: it has "):
        refuse_other(source, terms(config([NORM, *CFG]), run_with()), epochs=3)


def test_what_may_differ():
    mine = terms(config([NORM, *CFG]), run_with("microbatches=1", "optim.lr=0.01"))
    refuse_other(source_of(), mine, epochs=3)


def test_a_run_that_is_done_is_not_begun():
    mine = terms(config([NORM, *CFG]), run_with())
    source = source_of(position=Position(3, 0, 12))
    with pytest.raises(ConfigError, match="has all of its 3 epochs done; give epochs= more"):
        refuse_other(source, mine, epochs=3)


# More epochs than a finished run had

FINISHED = '{"updates": 8, "epochs": 2}'
NONE = ["", "[]", "{}", '{"updates": 8, "epochs": 0}', '{"updates": [], "epochs": 2}']


@pytest.fixture
def lengthened(tmp_path):
    """Make the records of a run of two epochs, four updates each, and say whether another lengthens it."""

    def asked(*overrides: str, more: str = "epochs=3", summary: str = FINISHED, saved: bool = True) -> bool:
        shutil.rmtree(tmp_path / CHECKPOINTS, ignore_errors=True)
        if saved:
            (tmp_path / CHECKPOINTS / "update-00000008").mkdir(parents=True)
        mine = ["data=digits", "lr_schedule=constant", "warmup=0", *overrides]
        cfg = contained(config([*mine, "epochs=2"]), tmp_path)
        OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
        (tmp_path / "summary.json").write_text(summary)
        cfg = contained(config([*mine, more, "resume=auto"]), tmp_path)
        return lengthens(tmp_path, cfg, Settings.composed(cfg, "1f1b", 2))

    return asked


def test_a_finished_run_goes_on_where_its_rates_stay(lengthened):
    assert lengthened()
    assert not lengthened(saved=False)
    assert not lengthened(more="epochs=2")
    assert not lengthened(more="epochs=1")
    assert not lengthened(more="seed=1")


@pytest.mark.parametrize("word", ["lr_schedule=cosine", "warmup=0.3", "lr_schedule=one_cycle"])
def test_where_its_rates_would_have_been_others_it_is_told_how_to(lengthened, word, tmp_path):
    with pytest.raises(ConfigError) as error:
        lengthened(word)
    said = str(error.value)
    assert said.startswith(
        f"run_dir={tmp_path} holds a run that finished after 2 epochs, and with lr_schedule"
    )
    assert said.endswith(f"or go on there from its last weights with resume={tmp_path}")


@pytest.mark.parametrize("summary", NONE)
def test_a_summary_that_is_none_lengthens_nothing(lengthened, summary):
    assert not lengthened(summary=summary)


def test_a_run_without_a_summary_is_not_finished(tmp_path):
    cfg = contained(config(["data=digits"]), tmp_path)
    assert not lengthens(tmp_path, cfg, Settings.composed(cfg, "1f1b", 2))


def test_a_profiled_run_keeps_its_cuts_and_what_it_recomputes():
    limited, source = config([*CFG, "partition=profile", "memory_limit=1"]), source_of()
    assert with_cuts_of(limited, source, 2).recompute == "auto"
    chosen = {**source.manifest.pipeline, "recompute": [2, 0]}
    source = replace(source, manifest=replace(source.manifest, pipeline=chosen))
    assert with_cuts_of(limited, source, 2).recompute == ["always", "never"]
    assert with_cuts_of(limited, source, 2).memory_limit is None
    cfg = config([*CFG, "partition=profile"])
    assert with_cuts_of(cfg, source_of(), 2).partition == [1]
    assert with_cuts_of(cfg, source_of(), 3).partition == "profile"
    assert with_cuts_of(config(CFG), source_of(), 2).partition == "flops"
