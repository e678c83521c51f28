"""The real reading and downloading code, on a small archive of the official form, from a local server."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import pickle
import signal
import sys
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

from pipetrain.data import DataMissing, cifar10
from pipetrain.data.cifar10 import FOLDER, OFFICIAL, Checksums, load
from pipetrain.errors import ConfigError


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def batch(index: int) -> bytes:
    """Write four images whose channels are 10, 20 and 30, but for a mark in the first pixel."""
    data = np.repeat(np.array([10, 20, 30], dtype=np.uint8), 1024)[None].repeat(4, axis=0)
    data[:, 0] = index
    return pickle.dumps({"data": data, "labels": [index, 1, 2, 3]}, protocol=4)


FILES = {name: batch(index) for index, name in enumerate((*cifar10.TRAIN_FILES, *cifar10.TEST_FILES))}
FILES["batches.meta"] = b"names of classes, which nobody reads"


def pack(files: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info in extra or []:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = pack({f"{FOLDER}/{name}": content for name, content in FILES.items()})
SUMS = Checksums(md5(ARCHIVE), {name: md5(content) for name, content in FILES.items()})


class Server:
    """An HTTP server that gives one body at /good and misbehaves elsewhere."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.requests = 0
        self.released = threading.Event()  # lets the handlers of silent requests go
        self.dripped = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = False  # so that server_close waits for them
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/{path}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        what = handler.path.strip("/")
        if what == "silent":
            self.released.wait(20)
            return
        if what == "missing":
            handler.send_error(404)
            return
        if what == "dripping-headers":
            handler.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
            self.drip(handler, b"x")
            return
        handler.send_response(200)
        if what not in ("unsized", "endless"):
            more = {"truncated": 1000, "dripping": 1000, "huge": 1 << 40}.get(what, 0)
            handler.send_header("Content-Length", str(len(self.body) + more))
        handler.end_headers()
        if what in ("dripping", "endless"):
            self.drip(handler, b"x" if what == "dripping" else bytes(1 << 16))
            return
        half = len(self.body) // 2
        handler.wfile.write(self.body[:half])
        if what == "stalled":
            self.released.wait(20)
            return
        handler.wfile.write(self.body[half:])

    def drip(self, handler: BaseHTTPRequestHandler, drop: bytes) -> None:
        """Send it again and again, until nobody listens any more."""
        with suppress(ConnectionError):
            while not self.released.wait(0.01):
                handler.wfile.write(drop)
                self.dripped.set()

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served = Server(ARCHIVE)
    yield served
    served.close()
    for thread in threading.enumerate():
        if thread.name == "download":
            thread.join(10)
            assert not thread.is_alive()


def write_files(root: Path) -> Path:
    folder = root / FOLDER
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def assert_is_the_data(data: cifar10.ImageData) -> None:
    assert (data.name, data.classes) == ("cifar10", 10)
    assert data.train.images.shape == (20, 3, 32, 32)
    assert data.test.images.shape == (4, 3, 32, 32)
    assert data.train.images.dtype == torch.uint8
    assert data.train.labels.dtype == torch.int64
    assert data.train.labels[::4].tolist() == [0, 1, 2, 3, 4]
    assert data.train.images[::4, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert data.test.labels.tolist() == [5, 1, 2, 3]
    assert data.train.images[:, :, 5, 5].unique(dim=0).tolist() == [[10, 20, 30]]


def test_official_checksums_cover_the_files_that_are_read():
    assert set(OFFICIAL.files) == {*cifar10.TRAIN_FILES, *cifar10.TEST_FILES, "batches.meta"}
    assert all(len(sum_) == 32 for sum_ in (OFFICIAL.archive, *OFFICIAL.files.values()))


def test_files_that_are_there_are_read_without_a_network(tmp_path):
    write_files(tmp_path)
    assert_is_the_data(load(str(tmp_path), url="http://127.0.0.1:1/none", checksums=SUMS))


def test_what_is_missing_is_downloaded_once_and_nothing_else_is_left(tmp_path, server, capsys):
    root = tmp_path / "new" / "data"
    assert_is_the_data(load(str(root), server.url("good"), 5, SUMS))
    assert_is_the_data(load(str(root), server.url("good"), 5, SUMS))
    assert server.requests == 1
    assert [path.name for path in root.iterdir()] == [FOLDER]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"downloading {server.url('good')}, for 3000 s at most\n"


def test_a_server_that_says_no_size_will_do(tmp_path, server):
    assert_is_the_data(load(str(tmp_path), server.url("unsized"), 5, SUMS))


def test_progress_is_a_bar_on_a_terminal(tmp_path, server, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(str(tmp_path), server.url("good"), 5, SUMS)
    assert "good: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("missing", "404"),
        ("truncated", f"stopped after {len(ARCHIVE):,} of {len(ARCHIVE) + 1000:,} bytes"),
        ("stalled", f"silent for 0.3 s after {len(ARCHIVE) // 2:,} bytes"),
        ("silent", "silent for 0.3 s after 0 bytes"),
    ],
)
def test_a_download_that_fails_says_what_and_why_in_one_line(tmp_path, server, path, says):
    with pytest.raises(DataMissing) as missing:
        load(str(tmp_path), server.url(path), 0.3, SUMS)
    for part in (says, str(tmp_path / FOLDER), server.url(path)):
        assert part in str(missing.value)
    assert "\n" not in str(missing.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("dripping", r"the download took longer than 0.5 s \([1-9][0-9]* bytes came\)"),
        ("dripping-headers", r"the download took longer than 0.5 s \(0 bytes came\)"),
        ("silent", r"the download took longer than 0.5 s \(0 bytes came\)"),
        ("endless", "the server sent more than the 500,000 bytes that may come"),
        ("huge", f"the server offers {len(ARCHIVE) + (1 << 40):,} bytes, and 500,000 may come"),
    ],
)
def test_a_download_is_bounded_in_time_and_size_whatever_the_server_does(tmp_path, server, path, says):
    with pytest.raises(DataMissing, match=says):
        load(str(tmp_path), server.url(path), 20, SUMS, total_timeout=0.5, max_bytes=500_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["dripping", "dripping-headers"])
def test_a_download_can_be_interrupted(tmp_path, server, path):
    def interrupt() -> None:
        if server.dripped.wait(10):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        load(str(tmp_path), server.url(path), 20, SUMS, total_timeout=20)
    thread.join()
    assert list(tmp_path.iterdir()) == []


def test_a_download_leaves_no_thread(tmp_path, server):
    load(str(tmp_path), server.url("good"), 5, SUMS)
    for thread in threading.enumerate():
        if thread.name == "download":
            thread.join(5)  # while the server is still there
            assert not thread.is_alive()


@pytest.mark.parametrize("name", ["timeout", "total_timeout"])
@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan])
def test_seconds_that_are_none_are_refused(tmp_path, name, seconds):
    with pytest.raises(ConfigError, match=f"data.source.{name} must be a number of seconds above 0.*got"):
        load(str(tmp_path), **{name: seconds})


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "no url at all", "file:///no/such/file"])
def test_an_address_that_nobody_answers_at(tmp_path, monkeypatch, url):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(DataMissing) as missing:
        load(str(tmp_path), url, 2, SUMS)
    assert "\n" not in str(missing.value)
    assert "<urlopen" not in str(missing.value)


def test_another_archive_is_not_looked_into(tmp_path, server):
    server.body = pack({"something else": b"altogether"})
    with pytest.raises(DataMissing, match=f"MD5 {md5(server.body)}, not {SUMS.archive}"):
        load(str(tmp_path), server.url("good"), 5, SUMS)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_written(tmp_path, server):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataMissing, match="could not be had"):
        load(str(tmp_path / "file" / "data"), server.url("good"), 5, SUMS)


def test_what_a_killed_download_left_is_ignored(tmp_path, server):
    left = tmp_path / ".cifar-10-killed"
    left.mkdir()
    (left / "archive").write_bytes(ARCHIVE[:100])
    assert_is_the_data(load(str(tmp_path), server.url("good"), 5, SUMS))


def test_two_at_once_do_not_disturb_each_other(tmp_path, server):
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(load, str(tmp_path), server.url("good"), 5, SUMS) for _ in range(4)]
        for job in jobs:
            assert_is_the_data(job.result(30))
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_an_archive_writes_nowhere_but_in_its_folder(tmp_path, server):
    """Its own names for files, absolute or upwards, are never used."""
    root = tmp_path / "a" / "root"
    upwards, absolute = tarfile.TarInfo("../../evil"), tarfile.TarInfo(str(tmp_path / "evil"))
    upwards.size = absolute.size = 4
    server.body = pack(
        {f"{FOLDER}/{name}": content for name, content in FILES.items()}, extra=[upwards, absolute]
    )
    sums = Checksums(md5(server.body), SUMS.files)
    assert_is_the_data(load(str(root), server.url("good"), 5, sums))
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["a", "root", FOLDER, *FILES])


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path, server):
    link = tarfile.TarInfo(f"{FOLDER}/data_batch_1")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    others = {f"{FOLDER}/{name}": content for name, content in FILES.items() if name != "data_batch_1"}
    server.body = pack(others, extra=[link])
    with pytest.raises(DataMissing, match=f"no file {FOLDER}/data_batch_1"):
        load(str(tmp_path), server.url("good"), 5, Checksums(md5(server.body), SUMS.files))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [f"{FOLDER}/data_batch_2", "another"])
def test_an_archive_that_would_fill_the_disk_is_not_unpacked(tmp_path, server, name):
    bomb = tarfile.TarInfo(name)
    bomb.size = 1 << 40
    server.body = gzip.compress(bomb.tobuf())
    with pytest.raises(DataMissing, match=f"the archive's {name} would have {1 << 40:,} bytes"):
        load(str(tmp_path), server.url("good"), 5, Checksums(md5(server.body), SUMS.files))
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_is_none(tmp_path, server):
    server.body = b"\x1f\x8b not really compressed"
    with pytest.raises(DataMissing, match="could not be had"):
        load(str(tmp_path), server.url("good"), 5, Checksums(md5(server.body), SUMS.files))


@pytest.mark.parametrize("name", [*cifar10.TRAIN_FILES, "test_batch", "batches.meta"])
def test_a_truncated_file_is_named_and_is_no_reason_for_a_fallback(tmp_path, name):
    path = write_files(tmp_path) / name
    path.write_bytes(FILES[name][:-1])
    with pytest.raises(ConfigError, match="truncated or altered") as refusal:
        load(str(tmp_path), checksums=SUMS)
    assert not isinstance(refusal.value, DataMissing)
    assert str(path) in str(refusal.value)
    assert f"delete the folder {path.parent}" in str(refusal.value)


def test_a_file_that_is_gone_is_named(tmp_path):
    path = write_files(tmp_path) / "data_batch_3"
    path.unlink()
    with pytest.raises(ConfigError, match=f"{path} cannot be read"):
        load(str(tmp_path), checksums=SUMS)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploded",)


def test_an_altered_file_is_never_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_files(tmp_path) / "data_batch_2"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match="data_batch_2 is truncated or altered"):
        load(str(tmp_path), checksums=SUMS)
    assert not (tmp_path / "exploded").exists()


def test_even_a_proved_file_can_only_make_arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_files(tmp_path) / "data_batch_2"
    path.write_bytes(pickle.dumps(Bomb()))
    sums = Checksums(SUMS.archive, {**SUMS.files, "data_batch_2": md5(path.read_bytes())})
    with pytest.raises(ConfigError, match="system, which is no array"):
        load(str(tmp_path), checksums=sums)
    assert not (tmp_path / "exploded").exists()


DATA, LABELS = np.zeros((4, 3072), dtype=np.uint8), [0, 1, 2, 9]
OTHER_FORMS = {
    "UnpicklingError": b"no pickle at all",
    "TypeError": pickle.dumps([DATA, LABELS]),
    "KeyError: 'data'": pickle.dumps({"labels": LABELS}),
    "KeyError: 'labels'": pickle.dumps({"data": DATA}),
    "AttributeError": pickle.dumps({"data": LABELS, "labels": LABELS}),
    "ValueError: cannot reshape": pickle.dumps({"data": DATA[:, :-1], "labels": LABELS}),
    "has 3 images and 4 labels": pickle.dumps({"data": DATA[:3], "labels": LABELS}),
    "got torch.int16": pickle.dumps({"data": DATA.astype(np.int16), "labels": LABELS}),
    "got torch.float32": pickle.dumps({"data": DATA, "labels": [0.5, 1, 2, 3]}),
    "labels[2] is 10": pickle.dumps({"data": DATA, "labels": [0, 1, 10, 2]}),
}


@pytest.mark.parametrize("says", OTHER_FORMS)
def test_a_proved_file_of_another_form_is_named(tmp_path, says):
    path = write_files(tmp_path) / "data_batch_4"
    path.write_bytes(OTHER_FORMS[says])
    sums = Checksums(SUMS.archive, {**SUMS.files, "data_batch_4": md5(OTHER_FORMS[says])})
    with pytest.raises(ConfigError) as refusal:
        load(str(tmp_path), checksums=sums)
    assert not isinstance(refusal.value, DataMissing)
    assert str(refusal.value).startswith(f"{path} is not of the form of CIFAR-10's files (")
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_relative_root_is_where_the_program_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    assert_is_the_data(load(".", checksums=SUMS))
