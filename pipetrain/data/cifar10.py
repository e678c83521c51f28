"""CIFAR-10 from its official Python files, downloaded if necessary, and verified by their MD5.

The complete folder is renamed into place in one step, so an interrupted or concurrent download leaves no
partial one. Nothing is unpacked or unpickled before it is verified.

Source: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor

from pipetrain.data.splits import Data, DataMissing, Images
from pipetrain.errors import ConfigError, one_line
from pipetrain.rules import POSITIVE, text

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
IMAGE = (3, 32, 32)  # channels, height and width
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
TRAIN_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
}
TEST_MD5 = {"test_batch": "40351d587109b95175f43aff81a1287e"}


def load(
    root: str, url: str = URL, timeout: float = 20.0, total_timeout: float = 3000.0, max_bytes: int = 1 << 30
) -> Data:
    """Read CIFAR-10 from `<root>/cifar-10-batches-py`, after downloading it if there is no such folder.

    `timeout`: seconds that the server may send nothing; `total_timeout`: seconds of the whole download;
    `max_bytes`: its largest size. Mean and deviation are those of the usual recipe; its deviation is the
    mean of the images' deviations. Raises DataMissing if the data is not available, and ConfigError for an
    invalid time or for a file, named in the message, that is missing or not the official one.
    """
    for name, seconds in (("timeout", timeout), ("total_timeout", total_timeout)):
        POSITIVE.read(f"data.source.{name}", seconds)
    text("an address, as https://...").read("data.source.url", url)
    folder = Path(root).absolute() / FOLDER
    if not folder.exists():
        try:
            _unpack(_downloaded(url, timeout, total_timeout, max_bytes), folder)
        except (OSError, HTTPException, ValueError) as error:
            reason = one_line(error.reason if type(error) is URLError else error)
            raise DataMissing(
                f"CIFAR-10 is not in {folder} and could not be had from {url}: {reason}"
            ) from error
    return Data("cifar10", _split(folder, TRAIN_MD5), _split(folder, TEST_MD5), classes=10)


def _downloaded(url: str, timeout: float, total_timeout: float, max_bytes: int) -> bytes:
    """Download the archive from `url`. Raises OSError, with the reason."""
    end, content = time.monotonic() + total_timeout, bytearray()
    with urllib.request.urlopen(url, timeout=timeout) as response:
        while block := response.read1(1 << 18):  # what has arrived
            content += block
            if len(content) > max_bytes:
                raise OSError(f"the server sends more than the {max_bytes:,} bytes that may come")
            if time.monotonic() > end:
                raise OSError(f"the download took longer than {total_timeout:g} s")
    if (md5 := _md5(content)) != ARCHIVE_MD5:
        raise OSError(f"the download of {len(content):,} bytes has MD5 {md5}, not {ARCHIVE_MD5}")
    return bytes(content)


def _unpack(archive: bytes, folder: Path) -> None:
    """Extract the files of a verified archive to `folder`, all of them or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=".cifar-10-", dir=folder.parent, ignore_cleanup_errors=True) as temporary,
        tarfile.open(fileobj=BytesIO(archive)) as tar,
    ):
        # Python before 3.11.4 has no filters; the archive is verified.
        filters: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(temporary, **filters)
        try:
            os.replace(Path(temporary) / FOLDER, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first
                raise


def _md5(content: bytes | bytearray) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _split(folder: Path, sums: Mapping[str, str]) -> Images:
    batches = [_batch(folder / name, md5) for name, md5 in sums.items()]
    images, labels = map(torch.cat, zip(*batches, strict=True))
    return Images(images, labels, MEAN, STD)


def _batch(path: Path, md5: str) -> tuple[Tensor, Tensor]:
    """Read an official file: `data`, uint8 [n, 3072] by channel and row, and `labels`. Raises ConfigError."""
    content = path.read_bytes() if path.is_file() else b""
    if _md5(content) != md5:
        raise ConfigError(
            f"{path} is missing, truncated or altered ({len(content):,} bytes): delete the folder "
            f"{path.parent} to download it again"
        )
    batch = pickle.loads(content, encoding="latin1")
    return torch.from_numpy(batch["data"].reshape(-1, *IMAGE)), torch.tensor(batch["labels"])
