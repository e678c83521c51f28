"""Fetch a file over the network, with bounds on time and size, a check of its MD5, and signs of progress.

The caller gives a name that nobody else uses; that the file is whole is proved before this returns.

urllib bounds how long the server is silent, and nothing else: one that sends a byte now and then, even of its
headers, it would listen to for ever. So a thread of its own listens, and is waited for only so long.
"""

from __future__ import annotations

import hashlib
import http.client
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from urllib.error import HTTPError, URLError

from tqdm import tqdm

_BLOCK = 1 << 18
_QUIET = 10.0  # seconds between two lines where stderr is not a terminal

_Block = tuple[bytes, int | None]
"""Some of what comes, and how many bytes there are in all, where the server says so."""


class DownloadFailed(Exception):
    """A file that could not be fetched whole. The message is the reason, in a few words."""


def download(url: str, target: Path, md5: str, timeout: float, total_timeout: float, max_bytes: int) -> None:
    """Write what `url` gives to `target`, a new file.

    `timeout` is how many seconds the server may be silent, `total_timeout` how many all of it may take, and
    `max_bytes` how much may come. Raises DownloadFailed where it does not answer, goes on beyond one of them,
    stops before the end, or sends something with another MD5, and OSError where the file cannot be written.
    """
    digest = hashlib.md5(usedforsecurity=False)
    blocks = _in_time(_blocks(url, timeout, max_bytes), total_timeout)
    with target.open("xb") as file, closing(blocks), _progress(url, total_timeout) as advance:
        for block, total in blocks:
            file.write(block)
            digest.update(block)
            advance(len(block), total)
    if digest.hexdigest() != md5:
        raise DownloadFailed(f"what came has MD5 {digest.hexdigest()}, not {md5}")


def _in_time(blocks: Generator[_Block, None, None], seconds: float) -> Generator[_Block, None, None]:
    """Give what comes within so many seconds; a thread fetches each block when it is asked for.

    The thread ends with this, or, where time is up or this is interrupted, with the block that it waits for.
    """
    deadline = time.monotonic() + seconds
    asked: SimpleQueue[Future[_Block | None] | None] = SimpleQueue()

    def answer() -> None:
        with closing(blocks):
            while (answered := asked.get()) is not None:
                try:
                    answered.set_result(next(blocks, None))
                except BaseException as error:
                    answered.set_exception(error)

    Thread(target=answer, daemon=True, name="download").start()
    received = 0
    try:
        while True:
            future: Future[_Block | None] = Future()
            asked.put(future)
            block = future.result(deadline - time.monotonic())
            if block is None:
                return
            received += len(block[0])
            yield block
    except TimeoutError as error:
        raise DownloadFailed(
            f"the download took longer than {seconds:g} s ({received:,} bytes came)"
        ) from error
    finally:
        asked.put(None)


def _blocks(url: str, timeout: float, max_bytes: int) -> Generator[_Block, None, None]:
    """Give the body piece by piece; an error of the network is a DownloadFailed."""
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length is not None else None
            if total is not None and total > max_bytes:
                raise DownloadFailed(f"the server offers {total:,} bytes, and {max_bytes:,} may come")
            # read1 gives what is there; it is not asked again once all is, as it may wait for more.
            while received != total and (block := response.read1(_BLOCK)):
                received += len(block)
                if received > max_bytes:
                    raise DownloadFailed(f"the server sent more than the {max_bytes:,} bytes that may come")
                yield block, total
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
def _progress(url: str, seconds: float) -> Iterator[Callable[[int, int | None], None]]:
    """Give what to call with how many bytes came, of how many: a bar on a terminal, lines elsewhere."""
    name = url.rsplit("/", 1)[-1]
    if sys.stderr.isatty():
        with tqdm(unit="B", unit_scale=True, desc=name, file=sys.stderr) as bar:

            def move(count: int, total: int | None) -> None:
                bar.total = total
                bar.update(count)

            yield move
        return
    print(f"downloading {url}, for {seconds:g} s at most", file=sys.stderr, flush=True)
    done, said = 0, time.monotonic()

    def advance(count: int, total: int | None) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said >= _QUIET:
            said = time.monotonic()
            of = "" if total is None else f" of {total / 1e6:.0f}"
            print(f"downloading {name}: {done / 1e6:.0f}{of} MB", file=sys.stderr, flush=True)

    yield advance
