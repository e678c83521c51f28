"""A text as blocks of tokens, to predict each token from the ones before it.

Tokens are the bytes of a file, or those of a Hugging Face tokenizer, which are computed once and cached in a
file. Either file is mapped into memory, so the processes of a machine share its pages and a large text is not
read whole. A file must not change while it is in use.
"""

from __future__ import annotations

import hashlib
import os
import zlib
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
from pipetrain.rules import COUNT, SHARE

SHAKESPEARE = Path(__file__).with_name("texts") / "shakespeare.txt"  # see README.md there
BYTES = 256  # the vocabulary without a tokenizer

_PIECE = 1 << 20  # characters tokenised at once


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


def load(
    file: str | None = None,
    tokenizer: str | None = None,
    block: int = 128,
    test_share: float = 0.1,
    vocabulary: int | None = None,
    root: str = "data",
) -> Data:
    """Read a text file, by default plays of Shakespeare, as blocks of `block` tokens.

    `tokenizer`: a tokenizer.json of the package `tokenizers`; without it the tokens are bytes. Its tokens are
    cached in `<root>/texts`. `test_share`: the fraction of the tokens, at the end of the text, for testing.
    `vocabulary`: the required number of known tokens, if given. Raises ConfigError.
    """
    path = SHAKESPEARE if file is None else Path(file)
    COUNT.read("data.block", block)
    SHARE.read("data.test_share", test_share)
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
        tokens = _tokenised(path, Path(tokenizer), coder, dtype, Path(root, "texts"))
    size = tokens.stat().st_size // dtype.itemsize
    train = size - round(size * test_share)
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


def _tokenised(path: Path, tokenizer: Path, coder: Any, dtype: np.dtype[Any], folder: Path) -> Path:
    """Return the file of a text's tokens, made by `coder` if it is not cached.

    It is renamed when complete, so several processes may make it at once. Raises ConfigError.
    """
    with path.open("rb") as text, tokenizer.open("rb") as rules:
        digests = b"".join(hashlib.file_digest(file, "sha256").digest() for file in (text, rules))
    cached = folder / f"{path.stem}-{hashlib.sha256(digests).hexdigest()[:16]}.{dtype.name}"
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
            while lines := text.readlines(_PIECE):  # whole lines
                ids = coder.encode("".join(lines), add_special_tokens=False).ids
                file.write(np.array(ids, dtype).tobytes())
            file.flush()
            os.replace(file.name, cached)
    return cached
