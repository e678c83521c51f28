"""Fetch a file over the network, with a time-out, a check of its length and MD5, and signs of progress.

The caller gives a name that nobody else uses; that the file is whole is proved before this returns.
"""

from __future__ import annotations

import hashlib
import http.client
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError

from tqdm import tqdm

_BLOCK = 1 << 18
_QUIET = 10.0  # seconds between two lines where stderr is not a terminal


class DownloadFailed(Exception):
    """A file that could not be fetched whole. The message is the reason, in a few words."""


def download(url: str, target: Path, md5: str, timeout: float) -> None:
    """Write what `url` gives to `target`, a new file.

    `timeout` is how many seconds the server may be silent. Raises DownloadFailed where it does not answer,
    stops before the end, or sends something with another MD5, and OSError where the file cannot be written.
    """
    digest = hashlib.md5(usedforsecurity=False)
    with target.open("xb") as file:
        for block in _blocks(url, timeout):
            file.write(block)
            digest.update(block)
    if digest.hexdigest() != md5:
        raise DownloadFailed(f"what came has MD5 {digest.hexdigest()}, not {md5}")


def _blocks(url: str, timeout: float) -> Iterator[bytes]:
    """Give the body piece by piece; an error of the network is a DownloadFailed, one of the reader is not."""
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length is not None else None
            with _progress(url, total) as advance:
                # read1 gives what is there; it is not asked again once all is, as it may wait for more.
                while received != total and (block := response.read1(_BLOCK)):
                    received += len(block)
                    yield block
                    advance(len(block))
    except TimeoutError as error:
        raise DownloadFailed(f"the server was silent for {timeout:g} s after {received:,} bytes") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DownloadFailed(_reason(error)) from error
    if total is not None and received != total:
        raise DownloadFailed(f"the server stopped after {received:,} of {total:,} bytes")


def _reason(error: Exception) -> str:
    """Say an error of urllib in one line."""
    if isinstance(error, HTTPError):
        return f"the server answered {error.code} {error.reason}"
    reason = error.reason if isinstance(error, URLError) else error
    return " ".join(str(reason).split()) or type(reason).__name__


@contextmanager
def _progress(url: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """Give what to call with each number of bytes: a bar on a terminal, a line now and then elsewhere."""
    name = url.rsplit("/", 1)[-1]
    if sys.stderr.isatty():
        with tqdm(total=total, unit="B", unit_scale=True, desc=name, file=sys.stderr) as bar:
            yield bar.update
        return
    of = "" if total is None else f" of {total / 1e6:.0f}"
    print(f"downloading {url}", file=sys.stderr, flush=True)
    done, said = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said >= _QUIET:
            said = time.monotonic()
            print(f"downloading {name}: {done / 1e6:.0f}{of} MB", file=sys.stderr, flush=True)

    yield advance
