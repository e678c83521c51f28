"""Two ranks for all tests of a pytest worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks that run a function: `first, second = ranks(function, *arguments)`."""
    two = Ranks(2)
    yield two
    two.close()
