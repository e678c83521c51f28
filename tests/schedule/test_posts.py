"""Programs on a device where a kernel that computes waits for every transfer that its rank has posted."""

from __future__ import annotations

from collections import Counter

import pytest

from pipetrain.schedule.actions import (
    RECEIVES,
    SENDS,
    Action,
    Edge,
    Program,
    ScheduleError,
    parse_program,
)
from pipetrain.schedule.lower import edges, lower
from pipetrain.schedule.policy import ForwardBackward
from pipetrain.schedule.posts import Post, make_posts
from pipetrain.schedule.programs import one_f_one_b
from tests.schedule.cases import CASES, accepted

SIZES = [(2, 3, 1), (2, 1, 16), (3, 2, 5), (4, 2, 8), (5, 1, 7), (8, 1, 8), (8, 2, 3)]
LISTED = [case for case in CASES if not isinstance(case.schedule, ForwardBackward)]


def stuck(program: Program, posts: list[list[Post]]) -> list[str]:
    """Run it; return the actions at which ranks stay for good. Receives must be posted when they are due."""
    made = [
        [
            step
            for at, a in enumerate(actions)
            for step in (*(("post", r) for p, r in own if p == at), ("do", a))
        ]
        for actions, own in zip(program, posts, strict=True)
    ]
    sent, posted = Counter[Edge](), Counter[Edge]()
    open_: list[list[tuple[Counter[Edge], Edge, int]]] = [[] for _ in program]  # the other end's, by rank
    taken, done, moved = Counter[Edge](), [0] * len(program), True
    while moved:
        moved = False
        for rank, steps in enumerate(made):
            while done[rank] < len(steps):
                what, action = steps[done[rank]]
                open_[rank] = [(ends, edge, k) for ends, edge, k in open_[rank] if ends[edge] <= k]
                if what == "post":
                    open_[rank].append((sent, action.edge, posted[action.edge]))
                    posted[action.edge] += 1
                elif action.op in SENDS:
                    open_[rank].append((posted, action.edge, sent[action.edge]))
                    sent[action.edge] += 1
                elif action.op in RECEIVES:
                    if min(sent[action.edge], posted[action.edge]) <= taken[action.edge]:
                        break
                    taken[action.edge] += 1
                elif open_[rank]:
                    break
                done[rank] += 1
                moved = True
    return [str(steps[at][1]) for at, steps in zip(done, made, strict=True) if at < len(steps)] + [
        f"{edge} has {posted[edge]} posts of {sent[edge]}" for edge in sent if posted[edge] != sent[edge]
    ]


def most_open(actions: list[Action], posts: list[Post]) -> int:
    """Return the most receives of an edge that are posted and not received."""
    most, open_ = 0, Counter[Edge]()
    for at, action in enumerate(actions):
        open_.update(receive.edge for place, receive in posts if place == at)
        most = max([most, *open_.values()])
        open_[action.edge] -= action.op in RECEIVES
    return most


@pytest.mark.parametrize("buffer_size", [1, 2])
@pytest.mark.parametrize("case", LISTED, ids=str)
def test_no_schedule_hangs_and_no_edge_has_more_open_than_its_bound(case, buffer_size):
    for size, program in accepted(case, SIZES):
        posts = make_posts(program, dict.fromkeys(edges(program), buffer_size))
        assert stuck(program, posts.of) == [], size
        assert posts.ahead == buffer_size
        assert max(map(most_open, program, posts.of)) <= buffer_size, size


def waited_for(program: Program) -> list[list[Post]]:
    return [[(at, a) for at, a in enumerate(actions) if a.op in RECEIVES] for actions in program]


def test_schedules_hang_where_receives_are_posted_when_they_are_waited_for():
    hang = {c.name for c in LISTED for _, p in accepted(c, SIZES) if stuck(p, waited_for(p))}
    assert hang == {"zbv", "zb_h2", "zb_auto", "v_half", "v_async", "interleaved_1f1b"}


@pytest.mark.parametrize("name", ["zbv", "1f1b"])
def test_a_post_that_is_dropped_doubled_or_comes_too_late_is_noticed(name):
    case = next(case for case in CASES if case.name == name)
    [(_, program)] = accepted(case, [(2, 1, 4)])
    posts = make_posts(program, dict.fromkeys(edges(program), 2)).of
    for rank, own in enumerate(posts):
        lasts = {receive.edge: receive for _, receive in own}
        for i, (_, receive) in enumerate(own):
            rest = [*own[:i], *own[i + 1 :]]
            mutants = [rest, [*own[: i + 1], *own[i:]]]
            if lasts[receive.edge] == receive:
                late = (program[rank].index(receive) + 1, receive)
                mutants.append(sorted([*rest, late], key=lambda post: post[0]))
            for mutant in mutants:
                assert stuck(program, [*posts[:rank], mutant, *posts[rank + 1 :]]), receive


def test_a_receive_is_posted_where_its_send_is_made():
    """Rank 0 is at its third forward when rank 1 has done its first backward, and so on."""
    program = lower(one_f_one_b(2, 1, 3))
    posts = make_posts(program, {(0, 1): 2, (1, 0): 2})
    said = [
        [f"{receive} before {actions[at]}" for at, receive in own]
        for actions, own in zip(program, posts.of, strict=True)
    ]
    assert said == [
        ["0RECV_B0 before 0RECV_B0", "0RECV_B1 before 0SEND_F2", "0RECV_B2 before 0RECV_B2"],
        ["1RECV_F0 before 1RECV_F0", "1RECV_F1 before 1B0@0", "1RECV_F2 before 1RECV_F2"],
    ]


def test_a_program_that_hangs_is_refused_and_one_that_needs_the_room_of_both_ends_has_it():
    [first, second] = parse_program("0F0@0 0SEND_F0 0F1@0 0SEND_F1 0F2@0 0SEND_F2\n1RECV_F0 1F0@0")
    assert make_posts([first, second], {(0, 1): 2}).ahead == 2
    assert make_posts([first, second], {(0, 1): 1}).ahead == 2
    with pytest.raises(ScheduleError, match="hangs: rank 0 stays at 0SEND_F2"):
        make_posts([first, second[1:]], {(0, 1): 1})
