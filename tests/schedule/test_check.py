from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest

from pipetrain.schedule.actions import Action, Edge, Program, ScheduleError, parse_program
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import compute_only, lower
from pipetrain.schedule.simulate import simulate
from tests.schedule.cases import CASES, NAMES, Case, accepted, replicated
from tests.schedule.mutants import mutants

PIPEDREAM = """
0F0@0 0F1@0 0B0@0 0STEP@1 0F2@1 0B1@0 0STEP@2 0B2@1 0STEP@3
1F0@0 1B0@0 1STEP@1 1F1@1 1B1@1 1STEP@2 1F2@2 1B2@2 1STEP@3
"""
# The first stage's weight gradients fill the time in which it would wait: as in zero-bubble schedules.
SPLIT = """
0F0@0 0F1@0 0I0@0 0F2@0 0I1@0 0W0@0 0I2@0 0W1@0 0W2@0 0STEP@1
1F0@0 1I0@0 1W0@0 1F1@0 1B1@0 1F2@0 1I2@0 1W2@0 1STEP@1
"""


module = sys.modules[check.__module__]
SOUND = "0F0@0 0SEND_F0 0RECV_B0 0B0@0 0REDUCE@1 0STEP@1\n1RECV_F0 1F0@0 1B0@0 1SEND_B0 1REDUCE@1 1STEP@1"
# The input gradient of the next batch adds nothing to the gradient, and may come before a step; its W does.
EARLY = "0F0@0 0F1@0 0I0@0 0I1@0 0W0@0 0STEP@1 0W1@0 0STEP@2"
LATE = """
    0F0@0 0F1@0+1 0B0@0 0STEP@1 0B1@0+1 0STEP@2+1
    1F0@0 1B0@0 1STEP@1 1F1@1 1B1@1 1STEP@2"""
UNSOUND: dict[str, list[tuple[str, str, str]]] = {
    PIPEDREAM: [
        ("0F1@0 ", "", "rank 0 has 0F2@1: its forwards must ascend, each once, .* of microbatch 1"),
        ("1F0@0 1B0@0", "1B0@0 1F0@0", "rank 1 has 1B0@0: it comes before .* among the forwards"),
        ("0B1@0", "0B1@1", "rank 0 has 0B1@1: its forward read version 0"),
        ("0STEP@1 0F2@1", "0F2@1 0STEP@1", "rank 0 has 0F2@1: version 1 is not made yet; the newest is 0"),
        ("0STEP@1", "0STEP@1 0STEP@1", "rank 0 has 0STEP@1: the next STEP makes version 2"),
        ("0B2@1 0STEP@3", "0B2@1", "rank 0, at its end, has done of stage 0 2 updates of 3"),
        ("1F2@2 1B2@2 1STEP@3", "", "rank 1, at its end, has done of stage 1 2 forwards of 3"),
        ("1STEP@3", "1STEP@3 1F3@3 1B3@3 1STEP@4", "its forwards must ascend, each once, and all are done"),
    ],
    SPLIT: [
        ("0I0@0 0F2@0", "0I0@0 0B0@0 0F2@0", "rank 0 has 0B0@0: its input gradients must ascend"),
        ("0W2@0 ", "", r"rank 0 has 0STEP@1: it comes after 2 weight gradients, and .* number 3"),
        ("1I0@0 1W0@0", "1W0@0 1I0@0", "rank 1 has 1W0@0: it comes before .* among the input gradients"),
    ],
    EARLY: [("0STEP@1 0W1@0", "0W1@0 0STEP@1", r"0W1@0: it is of batch 1, yet batch 0 is still to STEP")],
    LATE: [
        ("0F1@0+1", "0F1@0+2", r"rank 0 has 0F1@0\+2: it predicts beyond its own update, that of batch 1"),
        ("0B1@0+1", "0B1@0", "rank 0 has 0B1@0: its forward read version 0, 1 ahead"),
        ("0STEP@2+1", "0STEP@2+2", r"rank 0 has 0STEP@2\+2: its batch is 1 updates late"),
        ("1STEP@2", "1STEP@2+1", r"rank 1 has 1STEP@2\+1: its batch is 0 updates late"),
    ],
    SOUND: [
        ("0SEND_F0 ", "", "rank 0 has 0RECV_B0 where 0SEND_F0 belongs: its communication must be what"),
        ("1STEP@1", "1STEP@1 1SEND_B0", "rank 1 has 1SEND_B0 where nothing belongs"),
    ],
}
SIZE = {PIPEDREAM: (3, 1), SPLIT: (1, 3), EARLY: (2, 1), LATE: (2, 1), SOUND: (1, 1)}


@pytest.mark.parametrize(
    ("text", "old", "new", "message"), [(text, *of) for text, table in UNSOUND.items() for of in table]
)
def test_what_is_not_sound_is_named(text: str, old: str, new: str, message: str) -> None:
    def whole(text: str) -> Program:
        program = parse_program(text)
        return program if "SEND" in text else lower(program)

    assert text.count(old) == 1
    check(whole(text), *SIZE[text])
    with pytest.raises(ScheduleError, match=message):
        check(whole(text.replace(old, new)), *SIZE[text])


def test_a_rank_without_work_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"ranks \[1\] have nothing to do"):
        check([*parse_program("0F0@0 0B0@0 0REDUCE@1 0STEP@1"), []], 1, 1)


# Mutants: one action got wrong, in every way, anywhere.


@pytest.fixture(autouse=True)
def lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of a message has its program's computations, which are lowered once for all of these."""

    @lru_cache(maxsize=4)
    def of(compute: tuple[tuple[Action, ...], ...], routes: Any) -> Program:
        return lower([[*actions] for actions in compute], routes)

    monkeypatch.setattr(module, "lower", lambda compute, routes: of(tuple(map(tuple, compute)), routes))


SIZES = [(1, 2, 2), (2, 2, 2), (3, 3, 1), (3, 1, 3)]

# Sound programs with the same figures, so no mistake that paper can show: on one rank no message pins the
# order. GPipe may begin one batch's backwards before its last forward; another batch still holds the peak. Of
# the two stages of a V either may go first.
EQUIVALENT = {
    ("gpipe", (1, 2, 2)): [
        "rank 0: swap 0F1@0 [1] and 0B0@0 [2]",
        "rank 0: swap 0F3@1 [7] and 0B2@1 [8]",
    ],
    ("zbv", (1, 2, 2)): [
        "rank 0: swap 1W0@0 [3] and 0F1@0 [4]",
        "rank 0: swap 0F1@0 [4] and 0I0@0 [5]",
        "rank 0: swap 0W0@0 [6] and 1F1@0 [7]",
        "rank 0: swap 1W2@1 [19] and 0F3@1 [20]",
        "rank 0: swap 0F3@1 [20] and 0I2@1 [21]",
        "rank 0: swap 0W2@1 [22] and 1F3@1 [23]",
    ],
}
TWO_WEIGHT_GRADIENTS = re.compile(r"rank \d: swap \d+W\S+ \S+ and (\d+W|0I)")


def refused(program: Program, batches: int, microbatches: int, routes: Sequence[Edge] | None = None) -> bool:
    try:
        check(program, batches, microbatches, routes)
    except ScheduleError:
        return True
    return False


def figures(program: Program, microbatches: int) -> tuple[object, ...] | None:
    """What simulate says of a program; None for a deadlock."""
    try:
        result = simulate(program, microbatches)
    except ScheduleError:
        return None
    return result.makespan, result.activations, result.versions, result.staleness


def survivors(size: tuple[int, int, int], program: Program) -> Iterator[str]:
    _, batches, microbatches = size
    right = figures(program, microbatches)
    for what, mutant in mutants(program, reach=5):
        if not refused(mutant, batches, microbatches) and figures(mutant, microbatches) == right:
            yield what


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_no_mutant_survives_check_and_simulate(case: Case) -> None:
    """A schedule that the theory does not know may have swaps that make another sound schedule.

    So may one in which a rank has the weight gradients of two stages to do, for which nobody waits, or the
    backward of stage 0.
    """
    for size, program in accepted(case, SIZES):
        left = [what for what in survivors(size, program) if not TWO_WEIGHT_GRADIENTS.match(what)]
        if case.theory(*size) is None:
            left = [what for what in left if "swap" not in what]
        assert left == EQUIVALENT.get((case.name, size), [])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_an_author_who_drops_doubles_or_misnames_an_action_is_told_by_check_alone(case: Case) -> None:
    """The mutants of what a schedule's author writes, lowered after."""
    for (_, batches, microbatches), program in accepted(case, SIZES[1:]):
        for what, mutant in mutants(compute_only(program), reach=0):
            try:
                lowered = lower(mutant)
            except ScheduleError:
                continue
            assert refused(lowered, batches, microbatches), what


@pytest.mark.parametrize("case", [case for case in CASES if case.virtual == 1], ids=lambda case: case.name)
def test_no_mutant_survives_with_replicas(case: Case) -> None:
    for (ranks, batches, m), program in accepted(case, [(2, 2, 3), (3, 1, 4)]):
        made = lower(replicated(compute_only(program), [2, 3, 1][:ranks], batches, m))
        check(made, batches, m)
        for what, mutant in mutants(made, reach=0):
            assert refused(mutant, batches, m), what
