"""CIFAR-10 from its official python files, downloaded when they are not there, and proved by their MD5.

The finished folder is renamed into place in one step: a run that is killed, or two that download at once,
leave no half of one behind. Nothing is unpacked or unpickled before it is proved to be the official file.

Source: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tarfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import TIMEOUT_MAX, Event, Thread
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from tqdm import tqdm

from pipetrain.data.sets import IMAGE, DataMissing, ImageData, Split
from pipetrain.errors import ConfigError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
TRAIN_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
}
TEST_MD5 = {"test_batch": "40351d587109b95175f43aff81a1287e"}

_BLOCK = 1 << 18
_SAID_EVERY_S = 10.0  # where stderr is not a terminal


def load(
    root: str, url: str = URL, timeout: float = 20.0, total_timeout: float = 3000.0, max_bytes: int = 1 << 30
) -> ImageData:
    """Read CIFAR-10 from `<root>/cifar-10-batches-py`, after downloading it there if there is no such folder.

    `timeout` is how many seconds the server may be silent, `total_timeout` how many the whole download may
    take, and `max_bytes` how much may come. Mean and deviation are those of the usual recipe, whose deviation
    is the mean of the images' own. Raises DataMissing where the data can't be had, and ConfigError for a time
    that is none or, with its name, for a file that is not there or not the official one.
    """
    for name, seconds in (("timeout", timeout), ("total_timeout", total_timeout)):
        if not 0 < seconds <= TIMEOUT_MAX:
            raise ConfigError(
                f"data.source.{name} must be a number of seconds above 0, and at most {TIMEOUT_MAX:g}; "
                f"got {seconds}"
            )
    folder = Path(root).absolute() / FOLDER
    if not folder.exists():
        try:
            _unpack(_downloaded(url, timeout, total_timeout, max_bytes), folder)
        except OSError as error:
            reason = " ".join(str(error).split())
            raise DataMissing(
                f"CIFAR-10 is not in {folder} and could not be had from {url}: {reason}"
            ) from error
    return ImageData(
        name="cifar10",
        train=_joined([_batch(folder / name, md5) for name, md5 in TRAIN_MD5.items()]),
        test=_joined([_batch(folder / name, md5) for name, md5 in TEST_MD5.items()]),
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
    )


def _downloaded(url: str, timeout: float, total_timeout: float, max_bytes: int) -> bytes:
    """Return the archive that `url` gives. Raises OSError, which says why not.

    urllib bounds how long the server is silent, but it would listen for ever to one that sends a byte now and
    then. So a thread listens, and is waited for only so long. It ends with the block that it then waits for.
    """
    content, done, given_up = bytearray(), Future[None](), Event()

    def listen() -> None:
        try:
            _receive(content, given_up, url, timeout, max_bytes)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    if not sys.stderr.isatty():
        print(f"downloading {url}, for {total_timeout:g} s at most", file=sys.stderr, flush=True)
    Thread(target=listen, daemon=True, name="download").start()
    try:
        done.result(total_timeout)
    except TimeoutError as error:
        raise OSError(
            f"the download took longer than {total_timeout:g} s ({len(content):,} bytes came)"
        ) from error
    finally:
        given_up.set()
    if (md5 := _md5(content)) != ARCHIVE_MD5:
        raise OSError(f"what came has MD5 {md5}, not {ARCHIVE_MD5}")
    return bytes(content)


def _receive(content: bytearray, given_up: Event, url: str, timeout: float, max_bytes: int) -> None:
    """Add what `url` gives to `content`, with signs of progress. Raises OSError, but no TimeoutError."""
    name, said = url.rpartition("/")[2], time.monotonic()
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length is not None else None
            if total is not None and total > max_bytes:
                raise OSError(f"the server offers {total:,} bytes, and {max_bytes:,} may come")
            with tqdm(
                total=total, unit="B", unit_scale=True, desc=name, disable=None
            ) as bar:  # on a terminal
                # read1 gives what is there; it is not asked again once all is, as it may wait for more.
                while len(content) != total and not given_up.is_set() and (block := response.read1(_BLOCK)):
                    content += block
                    bar.update(len(block))
                    if len(content) > max_bytes:
                        raise OSError(f"the server sent more than the {max_bytes:,} bytes that may come")
                    if bar.disable and time.monotonic() - said >= _SAID_EVERY_S:
                        said = time.monotonic()
                        of = "" if total is None else f" of {total / 1e6:.0f}"
                        line = f"downloading {name}: {len(content) / 1e6:.0f}{of} MB"
                        print(line, file=sys.stderr, flush=True)
    except TimeoutError as error:
        raise OSError(f"the server was silent for {timeout:g} s after {len(content):,} bytes") from error
    except (URLError, HTTPException, ValueError) as error:
        reason = error.reason if type(error) is URLError else error
        raise OSError(str(reason) or repr(reason)) from error
    if total is not None and len(content) != total:
        raise OSError(f"the server stopped after {len(content):,} of {total:,} bytes")


def _unpack(archive: bytes, folder: Path) -> None:
    """Put the files of a proved archive at `folder`, all of them or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=".cifar-10-", dir=folder.parent, ignore_cleanup_errors=True) as temporary,
        tarfile.open(fileobj=BytesIO(archive)) as tar,
    ):
        unpacked = Path(temporary) / FOLDER
        unpacked.mkdir()
        for name in (*TRAIN_MD5, *TEST_MD5, "batches.meta"):
            content = tar.extractfile(f"{FOLDER}/{name}")
            assert content is not None
            (unpacked / name).write_bytes(content.read())
        try:
            os.replace(unpacked, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first: its folder is as good
                raise


def _md5(content: bytes | bytearray) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _batch(path: Path, md5: str) -> Split:
    """Read what a file holds: `data`, uint8 [n, 3072], by channel and row, and `labels`.

    Raises ConfigError where it is not the official one, before anything of it is unpickled.
    """
    again = f"delete the folder {path.parent} to download it again"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {again}") from error
    if (found := _md5(content)) != md5:
        raise ConfigError(
            f"{path} is truncated or altered ({len(content):,} bytes, MD5 {found}, not {md5}): {again}"
        )
    batch = _ArrayUnpickler(BytesIO(content), encoding="latin1").load()
    return Split(torch.from_numpy(batch["data"].reshape(-1, *IMAGE)), torch.tensor(batch["labels"]))


def _joined(batches: Sequence[Split]) -> Split:
    return Split(torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches]))


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that can make numpy arrays and plain values, and call nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        # The function has moved within numpy, and old pickles name its old place.
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
