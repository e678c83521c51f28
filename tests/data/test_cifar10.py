"""The real reading and downloading code, on a small archive of the official form, from a local server."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from pipetrain.data import Data, DataMissing, cifar10
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
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", md5(ARCHIVE))
    for sums in (cifar10.TRAIN_MD5, cifar10.TEST_MD5):
        for name in sums:
            monkeypatch.setitem(sums, name, md5(FILES[name]))


class Server(ThreadingHTTPServer):
    """Gives the archive at /good and misbehaves elsewhere."""

    daemon_threads = False  # so that server_close waits for them

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0
        self.released = threading.Event()  # lets the handlers of silent requests go

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests += 1
        what, half = self.path.strip("/"), len(ARCHIVE) // 2
        if what == "missing":
            self.send_error(404)
            return
        self.send_response(200)
        if what != "unsized":
            more = 1000 * (what == "dripping")
            self.send_header("Content-Length", str(len(ARCHIVE) + more))
        with suppress(ConnectionError):
            self.end_headers()
            while what == "dripping" and not self.server.released.wait(0.01):
                self.wfile.write(b"x")
            self.wfile.write(ARCHIVE[:half])
            if what == "truncated":
                return
            if what == "stalled":
                self.server.released.wait(20)
            self.wfile.write(bytes(len(ARCHIVE) - half) if what == "altered" else ARCHIVE[half:])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as served:
        threading.Thread(target=served.serve_forever, args=(0.02,)).start()
        yield served
        served.released.set()
        served.shutdown()


def write_files(root: Path) -> Path:
    folder = root / FOLDER
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def assert_is_the_data(data: Data) -> None:
    assert (data.name, data.classes) == ("cifar10", 10)
    assert data.train.images.shape == (20, 3, 32, 32)
    assert data.test.images.shape == (4, 3, 32, 32)
    assert (data.train.images.dtype, data.train.labels.dtype) == (torch.uint8, torch.int64)
    assert data.train.labels[::4].tolist() == data.train.images[::4, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert data.test.labels.tolist() == [5, 1, 2, 3]
    assert data.train.images[:, :, 5, 5].unique(dim=0).tolist() == [[10, 20, 30]]


def test_files_that_are_there_are_read_without_a_network_also_from_a_relative_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    assert_is_the_data(load(".", url="http://127.0.0.1:1/none"))


@pytest.mark.parametrize("path", ["good", "unsized"])
def test_what_is_missing_is_downloaded_once_and_nothing_else_is_left(tmp_path, server, path):
    root = tmp_path / "new" / "data"
    for _ in range(2):
        assert_is_the_data(load(str(root), server.url(path), 5))
    assert server.requests == 1
    written = sorted(file.name for file in tmp_path.rglob("*"))
    assert written == sorted(["new", "data", FOLDER, *FILES, "batches.meta"])


@pytest.mark.parametrize(
    ("path", "limits", "says"),
    [
        ("missing", {}, "404"),
        ("truncated", {}, f"the download of {len(ARCHIVE) // 2:,} bytes has MD5"),
        ("stalled", {"timeout": 0.5}, "timed out"),
        ("dripping", {"total_timeout": 0.5}, "the download took longer than 0.5 s"),
        ("good", {"max_bytes": 500}, "the server sends more than the 500 bytes that may come"),
        ("altered", {}, ", not MD5"),  # which is another in each process: a gzip file has a time in it
    ],
)
def test_a_download_that_fails_says_what_and_why_in_one_line(tmp_path, server, path, limits, says):
    """Whatever the server does, it is bounded in time and size, and leaves nothing."""
    with pytest.raises(DataMissing) as missing:
        load(str(tmp_path), server.url(path), **limits)
    wanted = says.replace("not MD5", f"not {md5(ARCHIVE)}")
    for part in (wanted, str(tmp_path / FOLDER), server.url(path)):
        assert part in str(missing.value)
    assert "\n" not in str(missing.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "seconds"), [("timeout", 0), ("total_timeout", math.inf)])
def test_seconds_that_are_none_are_refused(tmp_path, name, seconds):
    with pytest.raises(ConfigError, match=f"data.source.{name}=.* must be a finite number above 0"):
        load(str(tmp_path), **{name: seconds})


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "no url at all", "file:///no/such/file"])
def test_an_address_that_nobody_answers_at_or_a_root_that_is_none(tmp_path, url):
    (tmp_path / "file").touch()
    for root in (tmp_path, tmp_path / "file" / "data"):
        with pytest.raises(DataMissing) as missing:
            load(str(root), url, 2)
        assert "\n" not in str(missing.value)
        assert "<urlopen" not in str(missing.value)


def test_two_at_once_do_not_disturb_each_other_nor_does_what_a_killed_one_left(tmp_path, server):
    (tmp_path / ".cifar-10-killed").mkdir()
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(load, str(tmp_path), server.url("good"), 5) for _ in range(4)]
        for job in jobs:
            assert_is_the_data(job.result(30))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cifar-10-killed", FOLDER]


@pytest.mark.parametrize("content", [FILES["data_batch_2"][:-1], pickle.dumps({}), None])
def test_a_file_that_is_not_the_official_one_is_named_and_no_reason_for_a_fallback(tmp_path, content):
    path = write_files(tmp_path) / "data_batch_2"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} is missing.*delete the folder {path.parent}") as refusal:
        load(str(tmp_path))
    assert not isinstance(refusal.value, DataMissing)
