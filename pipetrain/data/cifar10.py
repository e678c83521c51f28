"""CIFAR-10 from its official python files, downloaded when they are not there, and proved by their MD5.

Nothing is used that was not proved. The archive comes into a folder of its own with a name that nobody else
has, and the finished data set is renamed into place in one step: a run that is killed, or two that download
at once, leave no half of one behind. Of the archive only the files that are asked for are copied, under names
that are ours, so it cannot write anywhere else (tarfile's own `filter="data"` is not in every Python 3.11);
and the pickles are read by an unpickler that knows arrays and nothing more.

Source: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import TIMEOUT_MAX
from typing import Any, ClassVar

import numpy as np
import torch

from pipetrain.data.download import DownloadFailed, download
from pipetrain.data.sets import IMAGE, DataMissing, ImageData, Split, split_fault
from pipetrain.errors import ConfigError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{index}" for index in range(1, 6))
TEST_FILES = ("test_batch",)
CLASSES = 10
LARGEST_MEMBER = 64 << 20  # bytes; the official files have 31 MB each


@dataclass(frozen=True)
class Checksums:
    """What the archive and each of its files must hash to, MD5 in hexadecimal."""

    archive: str
    files: Mapping[str, str]


OFFICIAL = Checksums(
    archive="c58f30108f718f92721af3b95e74349a",
    files={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
)


def load(
    root: str,
    url: str = URL,
    timeout: float = 20.0,
    checksums: Checksums = OFFICIAL,
    total_timeout: float = 3000.0,
    max_bytes: int = 1 << 30,
) -> ImageData:
    """Read CIFAR-10 from `<root>/cifar-10-batches-py`, after downloading it there if there is no such folder.

    `timeout` is how many seconds the server may be silent, `total_timeout` how many the whole download may
    take, and `max_bytes` how much may come. Mean and deviation are those of the usual recipe, whose deviation
    is the mean of the images' own. Raises DataMissing where the data can't be had, and ConfigError for a time
    that is none, or, with its name, for a file that is not there, not the official one, or not of its form.
    """
    for name, seconds in (("timeout", timeout), ("total_timeout", total_timeout)):
        if not 0 < seconds <= TIMEOUT_MAX:
            raise ConfigError(
                f"data.source.{name} must be a number of seconds above 0, and at most {TIMEOUT_MAX:g}; "
                f"got {seconds}"
            )
    folder = Path(root).absolute() / FOLDER
    if not folder.exists():
        _fetch(folder, checksums, url, timeout, total_timeout, max_bytes)
    contents = {name: _proved(folder / name, md5) for name, md5 in checksums.files.items()}
    return ImageData(
        name="cifar10",
        train=_split(folder, TRAIN_FILES, contents),
        test=_split(folder, TEST_FILES, contents),
        classes=CLASSES,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
    )


def _fetch(
    folder: Path, checksums: Checksums, url: str, timeout: float, total_timeout: float, max_bytes: int
) -> None:
    """Download the archive and put its files at `folder`, all of them or none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(
            prefix=".cifar-10-", dir=folder.parent, ignore_cleanup_errors=True
        ) as temporary:
            archive, unpacked = Path(temporary) / "archive", Path(temporary) / FOLDER
            download(url, archive, checksums.archive, timeout, total_timeout, max_bytes)
            _unpack(archive, unpacked, checksums)
            _move(unpacked, folder)
    except (OSError, tarfile.TarError, EOFError, zlib.error, DownloadFailed) as error:
        raise DataMissing(
            f"CIFAR-10 is not in {folder} and could not be had from {url}: {' '.join(str(error).split())}"
        ) from error


def _unpack(archive: Path, folder: Path, checksums: Checksums) -> None:
    """Copy the files that are asked for out of the archive; of all else only the size is looked at."""
    folder.mkdir()
    with tarfile.open(archive, "r:gz") as tar:
        members = {}
        for entry in tar:
            if entry.size > LARGEST_MEMBER:
                raise DownloadFailed(f"the archive's {entry.name} would have {entry.size:,} bytes")
            if entry.isreg():
                members[entry.name] = entry
        for name in checksums.files:
            member = members.get(f"{FOLDER}/{name}")
            content = tar.extractfile(member) if member is not None else None
            if content is None:
                raise DownloadFailed(f"the archive has no file {FOLDER}/{name}")
            with (folder / name).open("xb") as file:
                shutil.copyfileobj(content, file)


def _move(unpacked: Path, folder: Path) -> None:
    """Rename into place; where another process was first, its folder is as good as ours."""
    try:
        os.replace(unpacked, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _proved(path: Path, md5: str) -> bytes:
    """Read a file whole. Raises ConfigError where it is not the official one, before anyone looks inside."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): delete the folder {path.parent} to download it again"
        ) from error
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise ConfigError(
            f"{path} is truncated or altered ({len(content):,} bytes, MD5 {found}, not {md5}): "
            f"delete the folder {path.parent} to download it again"
        )
    return content


def _split(folder: Path, names: Sequence[str], contents: Mapping[str, bytes]) -> Split:
    """Join what the files of a split hold."""
    batches = [_batch(folder / name, contents[name]) for name in names]
    images, labels = [batch.images for batch in batches], [batch.labels for batch in batches]
    return Split(torch.cat(images), torch.cat(labels))


def _batch(path: Path, content: bytes) -> Split:
    """Read what a file holds: `data`, uint8 (n, 3072), by channel and row, and `labels`.

    Raises ConfigError, which names the file, where it holds something else: unpickling may end in any error.
    """
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
        images = torch.from_numpy(batch["data"].reshape(-1, *IMAGE))
        split = Split(images, torch.tensor(batch["labels"]))
        fault = split_fault(split, CLASSES)
    except Exception as error:
        fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if fault:
        raise ConfigError(
            f"{path} is not of the form of CIFAR-10's files ({fault}): "
            f"delete the folder {path.parent} to download it again"
        )
    return split


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that can make numpy arrays and plain values, and call nothing else."""

    _ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        # The function has moved within numpy, and old pickles name its old place.
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array") from None
