"""A run that goes on from a checkpoint ends as one that was never stopped, and a wrong one is refused."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from pipetrain.checkpoint.files import CHECKPOINTS, Manifest, Position, read_whole, write_part
from pipetrain.checkpoint.resume import (
    Source,
    find_source,
    refuse_finished,
    refuse_other,
)
from pipetrain.checkpoint.tensor_reader import MODEL, names_of, read_files
from pipetrain.commands.cli import as_mapping, contained, values_of
from pipetrain.commands.job import conditions_of
from pipetrain.commands.rank0_jobs import cuts_of
from pipetrain.config.settings import Settings
from pipetrain.errors import ConfigError
from pipetrain.records.run_folder import RunFolder, claim, lengthens
from pipetrain.typed_json import DamagedCheckpoint
from tests.support import thread_ranks
from tests.support.cases import Case, Ran, RankRun, Run, compare, config, make_run, options_of, state_of
from tests.support.run_files import forge, put
from tests.support.thread_ranks import Saved, run_in_threads

pytestmark = pytest.mark.slow

ONE_OF_A_KIND = ("1f1b", "fbp", "interleaved_1f1b", "pipedream_2bw", "v_async", "zb_h2")
WINDOWS = dict.fromkeys(("pipedream", "pipedream_2bw", "v_async", "zb_h2"), "window=2")


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / CHECKPOINTS).glob("update-*"))


def numbers(epochs: Ran) -> Any:
    """What must be the same of two runs that are."""
    sent = [[(n, of.bytes_sent, of.raw_bytes) for n, of in sorted(f.stages.items())] for f in epochs]
    return [(f.trained, f.evaluated, f.lr) for f in epochs], sent


def a_case(schedule: str, ranks: int, *overrides: str) -> Case:
    m = max(2, ranks) if schedule != "pipedream" else 1
    words = f"microbatches={m}", "epochs=3", WINDOWS.get(schedule, "window=1"), *overrides
    return Case(schedule, ranks, words, 48)


@dataclass(frozen=True)
class Whole:
    """A run that was never stopped, saved at every update: its folder, its weights at the end, its epochs."""

    folder: Path
    state: dict[str, Tensor]
    epochs: Ran

    def ends_alike(self, state: dict[str, Tensor], epochs: Ran) -> bool:
        """Whether a run that was stopped has ended as this one, bit for bit."""
        same = all(torch.equal(state[name], tensor) for name, tensor in self.state.items())
        return same and numbers(epochs) == numbers(self.epochs)

    def nearly(self, state: dict[str, Tensor], epochs: Ran) -> None:
        """Assert that one on other stages has ended as this one."""
        close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
        for name, tensor in self.state.items():
            close(state[name], tensor)
        close([f.evaluated["loss"] for f in epochs], [f.evaluated["loss"] for f in self.epochs])


def whole(case: Case, folder: Path) -> Whole:
    return Whole(folder, *run_in_threads(case, saved=Saved(folder)))


SHARED = "placement=0-1.0-1"
PLAIN, OWING = a_case("1f1b", 2), a_case("1f1b", 2, "codec.backward=topk")
CODECS = ("codec.forward=int8", "codec.backward=topk", "codec.forward.error_feedback=true")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Whole:
    return whole(PLAIN, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def owing(tmp_path_factory) -> Whole:
    return whole(OWING, tmp_path_factory.mktemp("owing"))


@pytest.mark.parametrize(
    ("schedule", "ranks", "words"),
    [
        ("1f1b", 1, ["model._target_=tests.support.models.dropping"]),
        ("1f1b", 2, ["optim._target_=tests.runtime.stage.test_optimizer_trial.Rich"]),
        ("interleaved_1f1b", 2, CODECS),
        ("pipedream", 2, ["ema=0.9"]),
        ("pipedream", 3, ["optim=adamw", *CODECS]),
        ("pipedream", 2, ["optim=muon"]),
        ("pipedream", 2, ["optim=soap"]),
        ("pipedream", 2, ["correction=[gap_aware,msnag]", "optim.momentum=0.9"]),
        *((schedule, 2, []) for schedule in ("fbp", "pipedream_2bw", "v_async", "zb_h2")),
    ],
)
def test_a_resumed_run_is_bit_equal_from_every_checkpoint(schedule, ranks, words, tmp_path):
    case = a_case(schedule, ranks, *words)
    wanted = whole(case, tmp_path)
    found = checkpoints(tmp_path)
    assert len(found) == 3 * (2 if schedule in WINDOWS else 4)
    for source in (found[1], found[-4]):
        assert len(residuals(source)) >= (2 * (ranks - 1) if words[-3:] == list(CODECS) else 0)
        state, resumed = run_in_threads(case, saved=Saved(tmp_path / "again"), source=source)
        assert wanted.ends_alike(state, resumed), source.name


@pytest.mark.parametrize(
    ("schedule", "ranks", "words"),
    [
        ("1f1b", 3, ["replicas=[1,2]", "microbatches=3", "epochs=1"]),
        ("pipedream", 3, ["replicas=[1,2]", "optim=adamw", "window=3", "ema=0.9", "epochs=2", *CODECS]),
        ("pipedream_2bw", 2, [SHARED, "microbatches=3", "epochs=2"]),
    ],
)
def test_with_replicas_too_and_each_stage_is_written_once(schedule, ranks, words, tmp_path):
    """In the middle of an epoch too, where the replicas' running statistics and residuals are their own."""
    case = a_case(schedule, ranks, *words)
    wanted = whole(case, tmp_path)
    source = checkpoints(tmp_path)[0]
    assert read_whole(source).position.batch > 0
    stages = [read_files(source, [f"stage-{stage}.safetensors"]) for stage in (0, 1)]
    written = [names_of(tensors, MODEL) for tensors in stages]
    assert sorted([*written[0], *written[1]]) == sorted(wanted.state)
    assert len(read_whole(source).parts) == ranks + (words[0] == SHARED)
    owe = {name.rsplit("/", 2)[0] for name in residuals(source)}
    assert len(owe) == (ranks if CODECS[0] in words else 0)
    assert len(names_of(Source(source, read_whole(source)).tensors(), "random/")) == ranks
    state, resumed = run_in_threads(case, saved=Saved(tmp_path / "again"), source=source)
    assert wanted.ends_alike(state, resumed)


def test_onto_other_replicas_it_ends_the_same(tmp_path):
    """Without running statistics: each replica has its own."""
    words = "model._target_=tests.support.models.without_norm", "microbatches=3", "epochs=2"
    wanted = whole(a_case("1f1b", 3, *words, "replicas=[2,1]"), tmp_path)
    for ranks, other in ((3, "replicas=[1,2]"), (2, SHARED), (2, "replicas=1"), (1, "replicas=1")):
        case = a_case("gpipe", ranks, *words, other)
        wanted.nearly(*run_in_threads(case, source=checkpoints(tmp_path)[2]))


def test_what_replicas_have_apart_at_a_load_is_of_before(tmp_path, monkeypatch):
    def trained_and_loaded(epochs: RankRun, run: Run) -> dict[str, Tensor]:
        epochs.session._buffer_averager.before_window()
        for stage in epochs.session.stages.values():
            for buffer in stage.module.buffers():
                buffer += 1
        (source,) = checkpoints(tmp_path)
        epochs.state.restore(Source(source, read_whole(source)))
        epochs.session.average_buffers()
        return state_of(epochs, run)

    monkeypatch.setattr(thread_ranks, "state_of", trained_and_loaded)
    case = a_case("1f1b", 2, SHARED, "microbatches=2", "epochs=1")
    state, _ = run_in_threads(case, saved=Saved(tmp_path, keep=1))
    (source,) = checkpoints(tmp_path)
    tensors = Source(source, read_whole(source)).tensors()
    assert all(torch.equal(tensors[MODEL + name], tensor) for name, tensor in state.items())


def residuals(source: Path) -> list[str]:
    return names_of(Source(source, read_whole(source)).tensors(), "residual/")


@pytest.mark.parametrize(
    ("ranks", "override", "owes"),
    [(2, "codec.forward=topk", True), (3, "seed=0", True), (1, "seed=0", False)],
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


def test_saving_changes_nothing(plain):
    assert plain.ends_alike(*run_in_threads(PLAIN))


def test_one_of_before_rates_were_kept_is_gone_on_from_amid_an_epoch(plain, tmp_path):
    source = Path(shutil.copytree(checkpoints(plain.folder)[5], tmp_path / "update-00000006"))
    manifest = read_whole(source)
    tensors = {name: t.clone() for name, t in read_files(source, ["stage-0.safetensors"]).items()}
    assert len(tensors.pop("rates")) == 2
    (source / "stage-0.safetensors").unlink()
    part = write_part(source, "stage-0.safetensors", tensors)
    forge(source, put("parts", "stage-0.safetensors", to=asdict(part)))
    assert manifest.position == Position(1, 2, 6)
    assert plain.ends_alike(*run_in_threads(PLAIN, source=source))


@pytest.mark.parametrize(
    ("schedule", "ranks", "partition"), [("1f1b", 1, "flops"), ("interleaved_1f1b", 2, "even")]
)
def test_another_partition_and_synchronous_schedule_ends_the_same(schedule, ranks, partition, plain):
    other = a_case(schedule, ranks, f"partition={partition}", "microbatches=2")
    plain.nearly(*run_in_threads(other, source=checkpoints(plain.folder)[5]))


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_groups_and_the_moving_average_go_with_their_parameters_to_other_stages(optim, tmp_path):
    words = [f"optim={optim}", "optim.lr=0.01", "optim.groups.norms_and_biases.weight_decay=0", "ema=0.5"]
    words += ["optim.groups.late.params='[5-9].*'", "optim.groups.late.lr=0.02"]
    if optim == "muon":
        words[2] = "model._target_=tests.support.models.without_norm"
    wanted = whole(a_case("1f1b", 2, "partition=[3]", *words), tmp_path)
    for ranks, partition in ((1, "flops"), (3, "[2,8]")):
        other = a_case("gpipe", ranks, f"partition={partition}", "microbatches=2", *words)
        wanted.nearly(*run_in_threads(other, source=checkpoints(tmp_path)[5]))


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
    _, some = run_in_threads(PLAIN, saved=Saved(tmp_path, every=None, at=at, request="stop"))
    assert len(some) == epochs_done
    (source,) = checkpoints(tmp_path)
    assert read_whole(source).position == position
    assert plain.ends_alike(*run_in_threads(PLAIN, source=source))


@pytest.mark.parametrize(
    ("schedule", "ranks", "words"),
    [
        ("pipedream", 3, ["microbatches=1"]),
        *((schedule, 3, ["microbatches=3"]) for schedule in ONE_OF_A_KIND),
        ("pipedream", 3, ["microbatches=2", "replicas=[2,1]"]),
        ("pipedream_2bw", 4, ["microbatches=3", "replicas=[1,3]"]),
        ("v_async", 3, ["microbatches=1", "replicas=[2,1]", "partition=[1,2,3]"]),
        ("ssp", 4, ["microbatches=1", "replicas=2"]),
        ("pipedream", 2, ["microbatches=3", SHARED]),
    ],
)
def test_a_window_that_ends_early_trains_as_two_windows(schedule, ranks, words, tmp_path):
    """Held against the reference, which drains there too; of fbp nobody knows what it has read before."""
    norm = ["model._target_=tests.support.models.without_norm"] * (len(words) > 1)
    words = (*words, *norm, "window=null", "batch_size=6", "epochs=2", "buffer_size=1")
    case = Case(schedule, ranks, words, 48, early=(1, 5))
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


# Epoch 3 is the best, and two others equal it.
ONE_BEST = a_case("1f1b", 1, "epochs=5", "seed=1")


@pytest.mark.parametrize(
    ("ranks", "every", "unit", "updates"),
    [(1, 2, "epochs", [12, 20]), (3, 1000, "updates", [12, 20]), (1, None, "epochs", [])],
)
def test_the_last_and_the_best_are_kept_even_where_no_checkpoint_was_due(
    ranks, every, unit, updates, tmp_path
):
    saved = Saved(tmp_path, every=every, unit=unit, keep=1)
    _, epochs = run_in_threads(replace(ONE_BEST, ranks=ranks), saved=saved)
    assert [round(11 * record.evaluated["acc"]) for record in epochs] == [1, 1, 4, 4, 4]
    assert [path.name for path in checkpoints(tmp_path)] == [f"update-{n:08d}" for n in updates]


# Which checkpoint


@pytest.fixture
def folder(plain, tmp_path) -> Path:
    """That of a run, to be harmed."""
    shutil.copytree(plain.folder, tmp_path / "run")
    return tmp_path / "run"


def test_the_newest_whole_one_is_taken_or_an_older_one_in_another_folder(folder, tmp_path, caplog):
    before, forged, older, newest = checkpoints(folder)[-4:]
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match=f"is older than {newest.name} in the same run_dir, from which"):
        find_source(older, tmp_path / "link")
    for path, run_dir in ((older, tmp_path / "another"), (newest, folder)):
        assert find_source(path, run_dir) == Source(path, read_whole(path))
    (newest / "stage-1.safetensors").write_bytes(b"")
    (older / "manifest.json").unlink()
    forge(forged, put("position", "epoch", to=-1))
    for found in (find_source("auto", folder), find_source(folder, tmp_path)):
        assert found is not None
        assert found.folder == before
    assert "update-00000012 is damaged" in caplog.text
    assert "stage-1.safetensors has another size or checksum" in caplog.text
    assert f"{forged.name} is damaged: " in caplog.text
    with pytest.raises(ConfigError, match=r"is damaged: .* has another size"):
        find_source(newest, folder)


@pytest.mark.parametrize("resume", ["auto", "elsewhere"])
def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(resume, tmp_path):
    """As without the right to, or on a network file system that was mounted anew: it would begin again."""
    (tmp_path / CHECKPOINTS).touch()
    with pytest.raises(
        ConfigError, match=f"{tmp_path / CHECKPOINTS} cannot be listed: Not a directory; mend"
    ):
        find_source(resume, tmp_path)
    with pytest.raises(ConfigError, match="cannot be listed"), claim(tmp_path):
        pass
    run = RunFolder(tmp_path, "run", None, {})
    assert "cannot be listed" in run.saved_so_far()  # said in a handler of signals


def test_nothing_to_go_on_from_or_nothing_whole(folder, tmp_path):
    assert find_source("auto", tmp_path) is None
    (tmp_path / CHECKPOINTS).mkdir()
    with pytest.raises(ConfigError, match="has saved no checkpoint"):
        find_source(tmp_path, tmp_path)
    for path in checkpoints(folder):
        (path / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint of .* is whole"):
        find_source("auto", folder)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["optim=adamw", "optim._target_=torch.optim.Adafactor"], []),  # sums of rows and columns
        (["optim.momentum=0"], ["optim.momentum=0.9"]),
        (["optim=adamw", "+optim.amsgrad=true", "optim.fused=true"], ["+optim.amsgrad=false"]),
    ],
)
def test_optimizers_remember_what_they_like_and_settings_may_change(before, after, tmp_path):
    run_in_threads(a_case("1f1b", 1, *before, "epochs=1"), saved=Saved(tmp_path))
    words = [word for word in before if word.split("=")[0] not in {new.split("=")[0] for new in after}]
    _, resumed = run_in_threads(a_case("1f1b", 1, *words, *after), source=checkpoints(tmp_path)[1])
    assert len(resumed) == 3


THEIRS = {
    "model": {"_target_": "models.a", "width": 3},
    "seed": 0,
    "tensors": {"0.weight": ["float32", 3]},
    "state_dict": {"0.weight": "0.weight"},
}


def source_of(epochs: int = 1, **pipeline: list[int]) -> Source:
    placed = {"cuts": [1], "placement": [0, 1], "recompute": [2, 0], **pipeline}
    return Source(Path("c"), Manifest("r", Position(epochs, 0, 4 * epochs), THEIRS, placed, {}))


@pytest.mark.parametrize(
    ("mine", "updates", "ending", "says"),
    [
        ({"seed": 1}, 8, False, "cannot go on from c: it has seed=0, and this run has seed=1"),
        ({"tensors": {}}, 8, False, r"has tensors.0.weight=\['float32', 3\], and this run has .*=None"),
        ({}, 4, False, "has 4 updates done, and this training is of 4: give epochs= .or max_updates=. more"),
        ({}, 3, True, "has 4 updates done, and this training is of 3: give epochs= .or max_updates=. more"),
        ({"microbatches": 3}, 5, False, ""),  # of which the other says nothing
        ({}, 4, True, ""),
    ],
)
def test_what_does_not_fit_or_is_done_is_refused(mine, updates, ending, says):
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        refuse_other(source_of(), THEIRS | mine)
        refuse_finished(source_of(), 4, updates, ending)


def test_a_run_of_the_command_line_must_agree_in_these():
    run, options = make_run(PLAIN), options_of(["model=mlp"])
    known = conditions_of(options, run.settings, run.facts, run.task)
    assert {"model", "data", "data's fingerprint", "batch_size", "seed", "dtype"} <= known.keys()
    assert (known["batch_size"], known["dtype"]) == (12, "float64")


def test_a_profiled_run_keeps_its_cuts_and_what_it_recomputes():
    profiled = {"partition": "profile", "ranks": 2}
    kept = cuts_of(source_of(), Settings(**profiled, memory_limit=1))
    assert kept == {"partition": [1], "recompute": ["always", "never"], "memory_limit": None}
    assert cuts_of(source_of(), Settings(**profiled)) == {"partition": [1], "memory_limit": None}
    assert cuts_of(source_of(), Settings(partition="profile", ranks=3)) == {}
    assert cuts_of(source_of(), Settings(**profiled, profile="file.json")) == {}
    assert cuts_of(source_of(), Settings(ranks=2)) == {}


@pytest.mark.parametrize("forged", [{"placement": []}, {"placement": [], "ranks": []}, {"recompute": [9]}])
def test_a_pipeline_that_is_none_is_refused_in_a_sentence(forged):
    with pytest.raises(DamagedCheckpoint, match=r"^c holds a state that cannot be used: "):
        cuts_of(source_of(**forged), Settings(partition="profile", ranks=2))


@pytest.mark.parametrize(
    ("ranks", "placement", "replicas"), [([0, 1, 2], [0, 2], [2, 1]), ([], [0, 1], [1, 1])]
)
def test_a_run_that_chose_its_replicas_keeps_them_on_as_many_ranks(ranks, placement, replicas):
    source = source_of()
    pipeline = {**source.manifest.pipeline, "placement": placement} | ({"ranks": ranks} if ranks else {})
    source = replace(source, manifest=replace(source.manifest, pipeline=pipeline))
    request, count = {"partition": "profile", "replicas": "auto"}, len(ranks or placement)
    kept = cuts_of(source, Settings(ranks=count, **request))
    assert kept == {"partition": [1], "replicas": replicas, "memory_limit": None}
    assert cuts_of(source, Settings(ranks=4, **request)) == {}


ANOTHER = "holds a run that finished after 8 updates, .* with resume="


@pytest.mark.parametrize(
    ("there", "words", "longer"),
    [
        (True, ["epochs=3"], True),
        (False, ["epochs=3"], False),
        (True, ["epochs=2"], False),
        (True, ["epochs=3", "max_updates=9"], True),
        (True, ["epochs=3", "max_updates=8"], False),
        (True, ["epochs=3", "seed=1"], False),
        (True, ["epochs=3", "lr_schedule=cosine"], ANOTHER),
        (True, ["epochs=3", "warmup=0.3"], ANOTHER),
    ],
)
def test_a_finished_run_goes_on_where_its_checkpoint_is_there_and_its_rates_stay(
    there, words, longer, tmp_path
):
    """Two epochs are done, of four updates each."""
    if there:
        (tmp_path / CHECKPOINTS / "update-00000008").mkdir(parents=True)
    rates = [word for word in words if "=c" in word or "=0.3" in word]
    before = ["data=digits", "lr_schedule=constant", "warmup=0", *rates]
    OmegaConf.save(contained(config([*before, "epochs=2"]), tmp_path), tmp_path / "config.yaml", resolve=True)
    (tmp_path / "summary.json").write_text('{"updates": 8, "train_samples": 256}')
    cfg = contained(config([*before, *words, "resume=auto"]), tmp_path)
    settings = Settings.composed(values_of(cfg), "1f1b", 2)
    if isinstance(longer, bool):
        assert lengthens(tmp_path, as_mapping(cfg), settings) == longer
    else:
        with pytest.raises(ConfigError, match=longer):
            lengthens(tmp_path, as_mapping(cfg), settings)
