"""The real reading and downloading code, on a small archive of the official form, at addresses of files."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import tarfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pipetrain.data import DataMissing, cifar10
from pipetrain.data.cifar10 import FOLDER, load
from pipetrain.errors import ConfigError


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def batch(index: int) -> bytes:
    """Write four images whose channels are 10, 20 and 30, but for a mark in the first pixel."""
    data = np.repeat(np.array([10, 20, 30], dtype=np.uint8), 1024)[None].repeat(4, axis=0)
    data[:, 0] = index
    return pickle.dumps({"data": data, "labels": [index, 1, 2, 3]}, protocol=4)


def pack(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{FOLDER}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


FILES = {name: batch(index) for index, name in enumerate((*cifar10.TRAIN_MD5, *cifar10.TEST_MD5))}
ARCHIVE = pack({**FILES, "batches.meta": b"names of classes"})


@pytest.fixture(autouse=True)
def _official(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small files be the official ones."""
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", md5(ARCHIVE))
    for sums in (cifar10.TRAIN_MD5, cifar10.TEST_MD5):
        for name in sums:
            monkeypatch.setitem(sums, name, md5(FILES[name]))


def at(folder: Path, content: bytes = ARCHIVE) -> str:
    """Return an address of the archive."""
    (folder / "archive").write_bytes(content)
    return f"file://{folder}/archive"


def test_what_is_missing_is_downloaded_once_and_nothing_else_is_left(tmp_path, monkeypatch):
    """By several at once, where a killed one has left something; then it is there without a network."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / ".cifar-10-killed").mkdir(parents=True)
    url = at(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        several = [job.result(30) for job in [pool.submit(load, "data", url) for _ in range(4)]]
    for data in (*several, load("data", "http://127.0.0.1:1/none")):
        assert (data.name, data.classes) == ("cifar10", 10)
        assert (data.train.images.shape, data.test.images.shape) == ((20, 3, 32, 32), (4, 3, 32, 32))
        assert (data.train.images.dtype, data.train.labels.dtype) == (torch.uint8, torch.int64)
        marks = data.train.images[::4, 0, 0, 0].tolist()
        assert data.train.labels[::4].tolist() == marks == [0, 1, 2, 3, 4]
        assert data.test.labels.tolist() == [5, 1, 2, 3]
        assert data.train.images[:, :, 5, 5].unique(dim=0).tolist() == [[10, 20, 30]]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [".cifar-10-killed", FOLDER]


@pytest.mark.parametrize(
    ("content", "limits", "says"),
    [
        (ARCHIVE[:500], {}, "the download of 500 bytes has MD5"),
        (ARCHIVE, {"max_bytes": 500}, "the server sends more than the 500 bytes that may come"),
        (ARCHIVE, {"total_timeout": 1e-9}, "the download took longer than 1e-09 s"),
        (None, {"timeout": 0.5}, "timed out"),  # of a server that is silent
    ],
    ids=["damaged", "long", "slow", "silent"],
)
def test_a_download_that_fails_says_what_and_why_and_leaves_nothing(
    tmp_path, monkeypatch, content, limits, says
):
    url, root = at(tmp_path, content or b""), tmp_path / "new" / "data"
    if content is None:
        silent = Mock(side_effect=TimeoutError("timed\nout"))
        monkeypatch.setattr(urllib.request, "urlopen", silent)
    with pytest.raises(DataMissing) as missing:
        load(str(root), url, **limits)
    for part in (says, str(root / FOLDER), url):
        assert part in str(missing.value)
    assert "\n" not in str(missing.value)
    assert not root.exists()
    if content is None:
        silent.assert_called_once_with(url, timeout=0.5)


def test_seconds_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data.source.total_timeout=.* must be a finite number above 0"):
        load(str(tmp_path), total_timeout=math.inf)
    with pytest.raises(ConfigError, match=r"data.source.url=5 must be an address"):
        load(str(tmp_path), url=5)


@pytest.mark.parametrize("content", [FILES["data_batch_2"][:-1], None], ids=["cut short", "missing"])
def test_a_file_that_is_not_the_official_one_is_named_and_no_reason_for_a_fallback(tmp_path, content):
    (tmp_path / FOLDER).mkdir()
    for name, whole in (FILES | {"data_batch_2": content}).items():
        if whole is not None:
            (tmp_path / FOLDER / name).write_bytes(whole)
    path = tmp_path / FOLDER / "data_batch_2"
    with pytest.raises(ConfigError, match=f"{path} is missing.*delete the folder {path.parent}") as refusal:
        load(str(tmp_path))
    assert not isinstance(refusal.value, DataMissing)
