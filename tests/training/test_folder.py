"""One run at a time in a folder, and a finished one is kept."""

from __future__ import annotations

import pytest

from pipetrain.errors import ConfigError
from pipetrain.training.folder import claim, clear, rename_after


def test_a_folder_is_made_and_taken(tmp_path):
    with claim(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_in_use_is_refused_until_its_run_has_ended(tmp_path):
    with claim(tmp_path), pytest.raises(ConfigError, match="is in use by a run that is going on"):
        claim(tmp_path)
    claim(tmp_path).close()


@pytest.mark.parametrize(("taken", "says"), [("run", "File exists"), ("run/.lock", "Is a directory")])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, taken, says):
    if taken == "run":
        (tmp_path / taken).touch()
    else:
        (tmp_path / taken).mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=f"run_dir={tmp_path}/run cannot be written: {says}; choose another"
    ):
        claim(tmp_path / "run")


def test_a_finished_run_is_not_written_over(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a finished run; choose another, or remove it"):
        claim(tmp_path)
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_what_an_unfinished_run_left_is_removed_and_nothing_else(tmp_path):
    for name in ("metrics.csv", "profile.json", "trace.json", "events.out.tfevents.1.host", "notes.txt"):
        (tmp_path / name).write_text("old")
    with claim(tmp_path):
        clear(tmp_path)
        assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["notes.txt"]


def test_what_cannot_be_removed_is_left_for_whoever_writes_there(tmp_path):
    (tmp_path / "metrics.csv").mkdir()
    (tmp_path / "trace.json").write_text("old")
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_checkpoints_are_gone_on_from_or_kept(tmp_path):
    (tmp_path / "checkpoints" / "update-00000007").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match="holds the checkpoints of a run that did not finish; go on with res"
    ):
        claim(tmp_path)
    claim(tmp_path, resuming=True).close()


def test_what_a_crash_left_of_a_checkpoint_is_none(tmp_path):
    for name in ("update-00000007.partial", "update-00000007.damaged"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    claim(tmp_path).close()


def test_a_folder_is_called_after_the_data_set_really_used(tmp_path):
    folder = tmp_path / "cifar10-vgg16-1f1b-now"
    folder.mkdir()
    assert rename_after(folder, "cifar10", "cifar10") == folder
    assert rename_after(folder, "cifar10", "digits") == tmp_path / "digits-vgg16-1f1b-now"
    assert (tmp_path / "digits-vgg16-1f1b-now").is_dir()


def test_a_folder_with_a_name_of_its_own_keeps_it(tmp_path):
    assert rename_after(tmp_path, "cifar10", "digits") == tmp_path
