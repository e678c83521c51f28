"""A text as blocks of tokens or as lines, to predict each token from the ones before it.

Tokens are the bytes of a file, or those of a Hugging Face tokenizer, which are computed once and cached in a
file. Either file is mapped into memory, so the processes of a machine share its pages and a large text is not
read whole. A file must not change while it is in use.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipetrain.data.splits import Data, Draw
from pipetrain.errors import ConfigError, failing
from pipetrain.rules import BOOL, COUNT, LENGTHS, SHARE
from pipetrain.tasks.task import IGNORED

SHAKESPEARE = Path(__file__).with_name("texts") / "shakespeare.txt"  # see README.md there
BYTES = 256  # the vocabulary without a tokenizer

_PIECE = 1 << 20  # characters tokenised at once
_NEWLINE = 10  # a byte


@dataclass(frozen=True)
class Blocks:
    """Blocks of tokens, without overlap; the target of a token is the next one. Samples are blocks.

    `path`: a file that contains only tokens of `dtype`; the split has `tokens` of them from `start`.
    """

    path: str
    dtype: str
    start: int
    tokens: int
    block: int

    def __len__(self) -> int:
        return (self.tokens - 1) // self.block  # the last token of the last block has a target too

    def inputs(self, ids: Tensor, draw: Draw | None) -> Tensor:
        """Return the tokens of blocks `ids`, int64 [n]: int64 [n, block]."""
        return self._read(ids, 0)

    def targets(self, ids: Tensor, draw: Draw | None) -> Tensor:
        """Return the tokens after those of `inputs`: int64 [n, block]."""
        return self._read(ids, 1)

    def first(self, n: int) -> Blocks:
        return replace(self, tokens=min(self.tokens, n * self.block + 1))

    def checksum(self) -> int:
        crc = zlib.crc32(repr((self.tokens, self.block)).encode())
        return zlib.crc32(self._mapped().view(np.uint8).data, crc)

    def _read(self, ids: Tensor, shift: int) -> Tensor:
        places = ids.numpy()[:, None] * self.block + np.arange(shift, self.block + shift)
        return torch.from_numpy(self._mapped()[places].astype(np.int64))

    def _mapped(self) -> NDArray[Any]:
        kind = np.dtype(self.dtype)
        mapped = np.memmap(self.path, kind, "r", offset=self.start * kind.itemsize, shape=(self.tokens,))
        return mapped.view(np.ndarray)


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines of a text, each padded to the longest of its batch; the target of a token is the next one.

    `path`: a file that contains only tokens of `dtype`. Sample i begins at token `starts[i]` and has
    `counts[i]` targets; int64 [n]. `length`: to which samples are padded, with targets that do not count;
    `buckets`: the lengths to which a batch may be padded in place of that of its longest, ascending.
    """

    path: str
    dtype: str
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    length: int
    buckets: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.starts)

    def lengths(self, ids: Tensor) -> tuple[int, ...]:
        longest = int(self.counts[ids.numpy()].max())
        return (next((bucket for bucket in self.buckets if bucket >= longest), longest),)

    def padded(self, lengths: tuple[int, ...]) -> Lines:
        return replace(self, length=lengths[0])

    def inputs(self, ids: Tensor, draw: Draw | None) -> Tensor:
        """Return the tokens of lines `ids`, int64 [n], without the last one: int64 [n, length]."""
        return self._read(ids, 0, 0)

    def targets(self, ids: Tensor, draw: Draw | None) -> Tensor:
        """Return the tokens after those of `inputs`: int64 [n, length]."""
        return self._read(ids, 1, IGNORED)

    def first(self, n: int) -> Lines:
        return replace(self, starts=self.starts[:n], counts=self.counts[:n])

    def checksum(self) -> int:
        crc = zlib.crc32(repr((self.length, self.buckets)).encode())
        for numbers in (self.starts, self.counts, self._mapped()[self.starts[0] :]):
            crc = zlib.crc32(numbers.view(np.uint8).data, crc)
        return crc

    def _read(self, ids: Tensor, shift: int, padding: int) -> Tensor:
        rows, columns = ids.numpy()[:, None], np.arange(self.length)
        is_token = columns < self.counts[rows]
        places = np.where(is_token, self.starts[rows] + columns + shift, 0)
        return torch.from_numpy(np.where(is_token, self._mapped()[places].astype(np.int64), padding))

    def _mapped(self) -> NDArray[Any]:
        return np.memmap(self.path, np.dtype(self.dtype), "r").view(np.ndarray)


def load(
    file: str | None = None,
    tokenizer: str | None = None,
    block: int = 128,
    test_share: float = 0.1,
    vocabulary: int | None = None,
    root: str = "data",
    lines: bool = False,
    buckets: Sequence[int] | int | None = None,
) -> Data:
    """Read a text file, by default plays of Shakespeare, as blocks of `block` tokens, or as its `lines`.

    `tokenizer`: a tokenizer.json of the package `tokenizers`; without it the tokens are bytes. Its tokens are
    cached in `<root>/texts`. `test_share`: the fraction of the tokens, at the end of the text, for testing.
    `vocabulary`: the required number of known tokens, if given. Lines of more than `block` tokens are cut;
    they are padded to the longest of their batch, or up to the next of `buckets`. Raises ConfigError.
    """
    path = SHAKESPEARE if file is None else Path(file)
    COUNT.read("data.block", block)
    SHARE.read("data.test_share", test_share)
    BOOL.read("data.lines", lines)
    padded_to = tuple(sorted(LENGTHS.read("data.buckets", buckets, null=True) or ()))
    if padded_to and (not lines or padded_to[-1] > block):
        raise ConfigError(
            f"data.buckets={[*padded_to]} are lengths to which lines are padded, up to data.block={block}: "
            f"set data.lines=true, and no bucket above data.block"
        )
    for key, read in (("file", path), ("tokenizer", tokenizer)):
        if read is not None and not (Path(read).is_file() and os.access(read, os.R_OK)):
            raise ConfigError(f"data.{key}={read} cannot be read: give the path of a file")
    coder = None if tokenizer is None else _tokenizer(Path(tokenizer))
    symbols = BYTES if coder is None else max(coder.get_vocab().values()) + 1
    if vocabulary not in (None, symbols):
        raise ConfigError(
            f"data.vocabulary is {vocabulary}, and with {tokenizer or 'bytes'} it is {symbols}: set "
            f"data.vocabulary={symbols}"
        )
    kind = np.uint8 if coder is None else np.uint16 if symbols <= 1 << 16 else np.uint32
    dtype: np.dtype[Any] = np.dtype(kind)
    tokens = path
    if tokenizer is not None:
        tokens = _tokenised(path, Path(tokenizer), coder, dtype, Path(root, "texts"), lines)
    size = tokens.stat().st_size // dtype.itemsize
    train = size - round(size * test_share)
    if lines:
        ends = np.flatnonzero(np.fromfile(tokens, dtype) == _NEWLINE) + 1
        if coder is not None:
            ends = np.load(_ends_of(tokens))
        first, rest = (
            _lines(tokens, dtype, ends, *of, block, padded_to) for of in ((0, train), (train, size))
        )
        if not len(first) or not len(rest):
            raise ConfigError(
                f"{path} has {len(first)} lines of 2 tokens or more to train on and {len(rest)} to test on: "
                f"give a longer text, another data.test_share, or data.lines=false"
            )
        return Data(path.stem, first, rest, classes=symbols)
    if min(train, size - train) <= block:
        raise ConfigError(
            f"{path} has {size} tokens, {train} to train on and {size - train} to test on, but data.block="
            f"{block} needs {block + 1} in each part: give a longer text or a smaller data.block"
        )
    place = str(tokens.absolute())
    return Data(
        name=path.stem,
        train=Blocks(place, dtype.name, 0, train, block),
        test=Blocks(place, dtype.name, train, size - train, block),
        classes=symbols,
    )


def _lines(
    tokens: Path,
    dtype: np.dtype[Any],
    ends: NDArray[np.int64],
    start: int,
    end: int,
    block: int,
    buckets: tuple[int, ...],
) -> Lines:
    """Return the lines that begin at the tokens `start` to `end` (exclusive), cut after `block` targets.

    `ends`: of all lines, the places after their last tokens.
    """
    every = np.unique(np.append(ends, tokens.stat().st_size // dtype.itemsize))
    starts = np.append(0, every[:-1])
    here = (start <= starts) & (starts < end)
    starts, targets = starts[here], (every - starts)[here] - 1
    pieces = -(-targets // block)
    nth = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)  # of its line
    counts = np.minimum(np.repeat(targets, pieces) - nth * block, block)
    places = str(tokens.absolute()), dtype.name, np.repeat(starts, pieces) + nth * block
    return Lines(*places, counts, block, buckets)


def _tokenizer(path: Path) -> Any:
    """Read a tokenizer.json, without truncation and padding. Raises ConfigError."""
    with failing(
        "data.tokenizer needs the package tokenizers",
        "; install 'pipetrain[text]', or train on bytes with data.tokenizer=null",
    ):
        from tokenizers import Tokenizer
    with failing(f"data.tokenizer={path} is no tokenizer.json of the package tokenizers"):
        coder = Tokenizer.from_file(str(path))
    coder.no_truncation()
    coder.no_padding()
    return coder


def _ends_of(tokens: Path) -> Path:
    """Return the file of the places where the lines of a file of tokens end."""
    return tokens.with_suffix(".npy")


def _tokenised(
    path: Path, tokenizer: Path, coder: Any, dtype: np.dtype[Any], folder: Path, lines: bool
) -> Path:
    """Return the file of a text's tokens, made by `coder` if it is not cached.

    `lines`: each is tokenised by itself, and where they end is in the file `_ends_of` it. Either is renamed
    when complete, so several processes may make it at once. Raises ConfigError.
    """
    with path.open("rb") as text, tokenizer.open("rb") as rules:
        digests = b"".join(hashlib.file_digest(file, "sha256").digest() for file in (text, rules))
    name = f"{path.stem}-{'lines-' * lines}{hashlib.sha256(digests).hexdigest()[:16]}.{dtype.name}"
    cached = folder / name
    if cached.exists():
        return cached
    with failing(
        f"{path} cannot be written as tokens to {folder}",
        "; it must be UTF-8, and data.root a folder with room that can be written",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with (
            TemporaryDirectory(prefix=f".{path.stem}-", dir=folder) as temporary,
            Path(temporary, cached.name).open("wb") as file,
            path.open(encoding="utf-8", newline="") as text,
        ):
            counts = []
            while whole := text.readlines(_PIECE):
                pieces = whole if lines else ["".join(whole)]
                for coded in coder.encode_batch(pieces, add_special_tokens=False):
                    file.write(np.array(coded.ids, dtype).tobytes())
                    counts.append(len(coded.ids))
            file.flush()
            if lines:
                ends = Path(temporary, "ends.npy")
                np.save(ends, np.cumsum(counts, dtype=np.int64))
                os.replace(ends, _ends_of(cached))
            os.replace(file.name, cached)
    return cached
