"""What holds for every test."""

from __future__ import annotations

import gc
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fork_server import context, joined, offered
from tests.support.process_ranks import Ranks

# A shell starts what runs in its background deaf to Ctrl-C, and so would be all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Half a million objects are imported, and stay: they are not looked through for garbage, now or later.
gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a pytest worker of the server that forks for all."""
    node.workerinput["server"] = offered()


def pytest_configure(config: Any) -> None:
    if hasattr(config, "workerinput"):
        joined(config.workerinput["server"])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A run takes all cores, and what comes after it would spin there with those of other tests."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_server(request: pytest.FixtureRequest) -> None:
    """Whoever starts processes first, the server that forks them is that of all."""
    if request.node.get_closest_marker("processes"):
        context()


def staying(size: int) -> Iterator[Ranks]:
    made = Ranks(size)
    yield made
    made.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two ranks for all tests of a pytest worker: `first, second = ranks(function, *arguments)`."""
    yield from staying(2)


@pytest.fixture(scope="session")
def three() -> Iterator[Ranks]:
    """Likewise three ranks."""
    yield from staying(3)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="run no test that starts processes or is marked slow; of one that has several cases run the "
        "first and the last, but all of what a schedule is on paper",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with tests that wait for a deadline or a process: at the end nothing else would run."""
    if config.getoption("--quick"):
        kept = quick(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: item.path.stem not in ("test_faults", "test_stops"))


def quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of a quick answer, which is about everything: see --quick."""
    cases = defaultdict(list)
    for item in items:
        if not (any(map(item.get_closest_marker, ("processes", "slow"))) or uses_ranks(item)):
            cases[item.nodeid.partition("[")[0]].append(item)
    on_paper = Path(__file__).parent / "schedule"
    return {
        item
        for several in cases.values()
        for item in (several if on_paper in several[0].path.parents else several[:: max(1, len(several) - 1)])
    }


def uses_ranks(item: pytest.Item) -> bool:
    """Return whether a test runs on ranks that stay; a case of some may have a number of that name."""
    own = item.callspec.params if hasattr(item, "callspec") else {}
    return bool({"ranks", "three"} & set(getattr(item, "fixturenames", ())) - own.keys())
