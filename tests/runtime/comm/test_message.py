"""What a message is called, and what the errors of those who wait say."""

from __future__ import annotations

import pytest
import torch

from pipetrain.errors import cause_of
from pipetrain.model.specs import TensorSpec
from pipetrain.runtime.comm import message as module
from pipetrain.runtime.comm.message import Message, message_error
from pipetrain.schedule.actions import ALL

SPECS = (TensorSpec((2, 3), torch.float64), TensorSpec((2,), torch.int64))


def message(src: int, dst: int, mb: int = 7, ranks: tuple[int, int] | None = None) -> Message:
    return Message(src, dst, mb, SPECS, ranks or (src, dst))


@pytest.mark.parametrize(
    ("receives", "sends", "late", "lost"),
    [
        (
            [message(2, 0)],  # two routes may lead from one rank to another
            [message(0, 1)],
            "0 waited 60 s for the gradient of microbatch 7 (stage 2 to 0) from rank 2 or for rank 1 to take "
            "the activation of microbatch 7",
            "0 lost rank 2 at the gradient of microbatch 7 (stage 2 to 0)",
        ),
        (
            [message(1, 2, ranks=(1, 0))],  # up the stages, and down the ranks
            [],
            "0 waited 60 s for the activation of microbatch 7 from rank 1",
            "0 lost rank 1 at the activation of microbatch 7",
        ),
    ],
)
def test_an_error_says_who_waits_for_what(receives, sends, late, lost):
    assert str(message_error(receives, sends, 60, "")) == f"rank {late}"
    assert str(message_error(receives, sends, 60, "gone")) == f"rank {lost}: gone"


@pytest.mark.parametrize(
    ("tie", "ranks", "what", "whom"),
    [
        ((1,), [0, 2], "the gradients of the replicas of stage 1", "rank 2"),
        ((0, 2), [0, 1, 3], "the gradients of shared weights", "one of ranks 1, 3"),
        (ALL, [0, 1], "the gradient norms", "rank 1"),
    ],
)
def test_an_error_of_a_sum_says_who_may_be_lost(tie, ranks, what, whom, monkeypatch):
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module.dist, "get_process_group_ranks", lambda group: group)
    assert str(module.sum_error(tie, ranks, 60, "")) == f"rank 0 waited 60 s for {what} of {whom}"
    assert str(module.sum_error(tie, ranks, 60, "gone")) == f"rank 0 lost {whom} at {what}: gone"


def test_the_cause_of_a_failure_is_one_sentence_without_gloo_s_source_line():
    said = (
        "[/a/gloo/pair.cc:553] Connection closed by peer [::1]:14. This is typically caused by a crash. GLHF!"
    )
    assert cause_of(RuntimeError(said)) == "Connection closed by peer [::1]:14"
    assert cause_of(RuntimeError("Timed out. Bye.\nmore")) == "Timed out. Bye."
