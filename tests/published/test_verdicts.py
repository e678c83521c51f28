"""Each line of a verdict that came back can fail: there is a wrong number of the results that fails it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from comparison.request import RECORDS
from published import cli
from published.record import Finding, Findings, Results

FACTORS = 50.0, 0.02, 1.5, 0.7
FEW = 300  # numbers, of which each is made wrong alone too

Place = tuple[Any, Any]
"""A dict or list, and the key of a number in it."""


def places(node: Any, path: str = "") -> Iterator[tuple[str, Place]]:
    """Yield each number's place, with its path."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        inner = f"{path}/{key}"
        if isinstance(value, dict | list):
            yield from places(value, inner)
        elif isinstance(value, int | float | str):
            yield inner, (node, key)


def groups(results: Any) -> Iterator[list[Place]]:
    """Yield numbers that are made wrong together: of one list, of alike paths, and each of few alone."""
    found = [*places(results)]
    for pattern in (r"(?<=/)\d+(?=/|$)", r"\d+", *[r"$^"] * (len(found) < FEW)):
        alike: dict[str, list[Place]] = {}
        for path, place in found:
            alike.setdefault(re.sub(pattern, "#", path), []).append(place)
        yield from alike.values()


def wrong(value: Any, factor: float) -> Any:
    if isinstance(value, str):
        return "another"
    return round(value * factor) + 1 if isinstance(value, int) else value * factor


@pytest.mark.parametrize("name", [n for n in RECORDS if not n.startswith((cli.STUDY, cli.MAP))])
def test_every_line_that_came_back_can_fail(name: str) -> None:
    made = json.loads(cli.file_of(cli.KEPT[cli.ALL], name).read_text())
    record, results = cli.record_of(name), {key: step["result"] for key, step in made.items()}
    assert cannot_fail(record.show, results) == set()


def cannot_fail(show: Callable[[Results], Iterator[Finding]], results: Results) -> set[str]:
    """Return the lines of a verdict that came back, and do so with any wrong number in the results."""

    def verdict() -> dict[str, bool | None]:
        return {check.what: check.came_back for check in Findings.of(show(results)).checks}

    left = {what for what, came in verdict().items() if came}
    for group, factor in chain.from_iterable([(g, f) for f in FACTORS] for g in groups(results)):
        if not left:
            break
        before = [of[key] for of, key in group]
        for (of, key), value in zip(group, before, strict=True):
            of[key] = wrong(value, factor)
        try:
            left -= {what for what, came in verdict().items() if came is False}
        except Exception:  # such results cannot be
            continue
        finally:
            for (of, key), value in zip(group, before, strict=True):
                of[key] = value
    return left
