from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event
from typing import Any

import pytest

from pipetrain.runtime.watch import Watch


class Work:
    """A transfer's work that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = Event()
        self.error: Exception | None = None

    def wait(self, timeout: timedelta) -> None:
        assert self.ended.wait(20)
        if self.error:
            raise self.error


@dataclass
class Transfer:
    works: list[Any] = field(default_factory=lambda: [Work()])
    finished: bool = False
    failure: BaseException | None = None


def test_a_transfer_is_finished_when_all_its_works_are():
    watch, transfer = Watch(["edge"]), Transfer([Work(), Work()])
    watch.add("edge", transfer)
    transfer.works[0].ended.set()
    assert not watch.wait(lambda: transfer.finished, 0.05)
    transfer.works[1].ended.set()
    assert watch.wait(lambda: transfer.finished, 20)
    assert transfer.failure is None
    watch.close()


def test_edges_do_not_wait_for_each_other_and_transfers_of_an_edge_do():
    watch, first, second, other = Watch("ab"), Transfer(), Transfer(), Transfer()
    for edge, transfer in (("a", first), ("a", second), ("b", other)):
        watch.add(edge, transfer)
    second.works[0].ended.set()
    other.works[0].ended.set()
    assert watch.wait(lambda: other.finished, 20)
    assert not second.finished
    first.works[0].ended.set()
    assert watch.wait(lambda: second.finished, 20)
    watch.close()


def test_a_failure_is_handed_on_and_the_thread_goes_on():
    watch, bad, good = Watch(["edge"]), Transfer(), Transfer()
    bad.works[0].error = RuntimeError("connection closed by peer")
    for transfer in (bad, good):
        watch.add("edge", transfer)
        transfer.works[0].ended.set()
    assert watch.wait(lambda: good.finished, 20)
    assert str(bad.failure) == "connection closed by peer"
    assert good.failure is None
    watch.close()


def test_what_the_question_raises_is_raised():
    watch = Watch(["edge"])
    with pytest.raises(ZeroDivisionError):
        watch.wait(lambda: bool(1 / 0), 1)
    watch.close()
