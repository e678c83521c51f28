"""What TensorBoard's file is made of: bytes that are the same whenever they are made."""

from __future__ import annotations

from dataclasses import replace

from pipetrain.records import events
from pipetrain.records.history import History
from tests.support.cases import Case, make_run
from tests.support.figures import figures

RUN = make_run(Case("pipedream", 2, ("partition=[4]",))).about


def test_an_epoch_s_points_are_the_same_however_many_epochs_have_come_after_it():
    history = History(RUN)
    then = []
    for epoch in (1, 2, 3):
        history.epochs.append(figures(epoch, correct=5 + epoch))
        then.append(events.points(history))
    assert [events.points(history.until(epochs)) for epochs in (1, 2, 3)] == then
    assert len(set(then)) == 3


def test_of_another_pipeline_s_epochs_the_stages_points_are_missing_later_too():
    history = History(RUN)
    history.epochs = [replace(figures(1), stages={}), figures(2)]
    assert b"stages/bubble" not in events.stage_points(history.until(1), 0)
    assert b"stages/bubble" in events.stage_points(history.until(2), 0)
