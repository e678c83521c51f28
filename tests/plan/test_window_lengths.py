"""How long windows are: epoch by epoch, and where a correction drains the pipeline."""

from __future__ import annotations

import pytest

from pipetrain.correction import Hybrid
from pipetrain.plan.window_lengths import WindowLengths


@pytest.mark.parametrize(
    ("done", "lengths"), [(0, [3, 3, 2]), (3, [3, 2]), (4, [2, 2]), (6, [2]), (7, [1]), (8, [])]
)
def test_windows_end_where_they_would_have_ended_however_the_last_one_was_left(done, lengths):
    assert [*WindowLengths(3).lengths(8, done)] == lengths
    assert [*WindowLengths(None).lengths(8, done)] == [8 - done] * (done < 8)


@pytest.mark.parametrize(
    ("first", "epochs"),
    [(True, [[1, 1, 1, 1, 2, 2], [3, 3, 2]]), (False, [[3, 3, 2], [3, 1, 1, 1, 1, 1]])],
)
def test_synchronous_updates_are_windows_of_their_own(first, epochs):
    """A quarter of 16 first, or five of them last: then windows end again where they always do."""
    schedule = WindowLengths(3, Hybrid(share=0.25 if first else 0.3, first=first), updates=16)
    assert [[*schedule.lengths(8, update=update)] for update in (0, 8)] == epochs
