"""What is said of a run's epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipetrain.training.history import History, Machine
from tests.support.cases import Case, make_run
from tests.support.figures import figures

RUN = make_run(Case("pipedream", 2, ("partition=[4]",)))


def rows(history: History) -> list[list[str]]:
    return [line.split() for line in history.table().splitlines()[1:]]


def test_a_table_has_every_epoch_of_a_few():
    history = History(RUN)
    for epoch, correct in ((1, 5), (2, 9), (3, 6)):
        history.epochs.append(figures(epoch, correct))
    assert [row[0] for row in rows(history)] == ["1", "2", "3"]
    assert [row[-1] for row in rows(history)] == ["2.0", "best", "2.0"]
    assert rows(history)[1][:5] == ["2", "1.0000", "50.00%", "3.0000", "90.00%"]
    widths = {len(line.removesuffix("  best")) for line in history.table().splitlines()}
    assert len(widths) == 1


@pytest.mark.parametrize("epochs", [40, 41, 100])
def test_a_table_of_many_has_the_last_ones_and_the_best(epochs):
    history = History(RUN)
    for epoch in range(1, epochs + 1):
        history.epochs.append(figures(epoch, correct=9 if epoch == 3 else 5))
    shown = [int(row[0]) for row in rows(history)]
    if epochs <= 40:
        assert shown == list(range(1, epochs + 1))
    else:
        assert shown == [3, *range(epochs - 19, epochs + 1)]
    assert [row[0] for row in rows(history) if row[-1] == "best"] == ["3"]


def test_what_counts_begins_after_a_resume_on_another_partition():
    history = History(RUN)
    history.epochs = [replace(figures(1), stages={}), figures(2)]
    assert [times.stage_time_s for times in history.measured()] == pytest.approx([1.5 / 4, 0.5 / 4])


def test_half_an_epoch_counts_for_a_half():
    """As after a resume on another partition in the middle of it: 2 of 4 batches, 1 of 2 s."""
    history = History(RUN)
    half = {stage: replace(stats, updates=2) for stage, stats in figures(1).stages.items()}
    history.epochs = [replace(figures(1), stages=half)]
    for times in (history.measured()[0], history.measured_last()[0]):
        assert (times.stage_time_s, times.wait) == (pytest.approx(1.5 / 2), pytest.approx(0.4 / 1.0))
    assert history.summary(Machine("2 x cpu", 1, "none"))["bytes_per_epoch"] == 3000.0
