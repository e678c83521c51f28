"""Programs on a device where a kernel that computes waits for every transfer that its rank has posted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import NamedTuple

import pytest

from pipetrain.schedule.actions import (
    ALL,
    RECEIVES,
    SENDS,
    Action,
    Edge,
    Op,
    Program,
    Tie,
    Ties,
    format_program,
    has_norms,
    homes,
    last_backwards,
    ranks_of,
)
from pipetrain.schedule.lower import compute_only, edges, lower
from pipetrain.schedule.policy import ForwardBackward
from pipetrain.schedule.posting_order import Post, Posts, Sum, make_posts
from pipetrain.schedule.programs import one_f_one_b, pipedream
from pipetrain.schedule.replicas import spread_program
from pipetrain.schedule.simulate import Deadlock, simulate
from pipetrain.schedule.transforms import with_norms, with_ties
from tests.schedule.cases import CASES, Case, accepted, replicated

SIZES = [(2, 3, 1), (2, 1, 16), (3, 2, 5), (4, 2, 8), (5, 1, 7), (8, 1, 8), (8, 2, 3)]
LISTED = [case for case in CASES if not isinstance(case.schedule, ForwardBackward)]


# A message: its edge, its ranks, and its number among theirs; a sum; one of two early sums.
What = tuple[Edge, int, int, int] | Sum | tuple[Sum, int]
EARLIER = {Op.TIE: [Op.REDUCE], Op.NORM: [Op.REDUCE, Op.TIE], Op.STEP: [Op.REDUCE, Op.TIE, Op.NORM]}


class Step(NamedTuple):
    """What a rank does next: it posts something, or it needs some to be over."""

    text: str
    posts: What | None = None
    needs: Sequence[What] = ()
    computes: bool = False


def sums_of(program: Program, ties: Ties) -> dict[Tie, tuple[Op, set[int]]]:
    """Return, by tie, which actions tell it, and the ranks that it is a sum over, if they are several."""
    ranks = ranks_of(program)
    told_by = {(stage,): Op.REDUCE for stage in range(len(ranks))} | {(*tie,): Op.TIE for tie in ties}
    told_by |= {ALL: Op.NORM} if has_norms(program) else {}
    over = {tie: {rank for stage in tie or range(len(ranks)) for rank in ranks[stage]} for tie in told_by}
    return {tie: (op, over[tie]) for tie, op in told_by.items() if len(over[tie]) > 1}


def steps_of(program: Program, posts: list[list[Post]], ties: Ties) -> Iterator[list[Step]]:
    """Yield each rank's steps. A sum that is posted before its shares are told needs what never is over.

    Early sums are two, and a last backward that begins them does so at a third and at two thirds of its way.
    """
    home, sums = homes(program), sums_of(program, ties)

    def told_with(action: Action, ops: Sequence[Op]) -> list[Sum]:
        mine = [tie for tie, (op, _) in sums.items() if op in ops and (action.stage in tie or not tie)]
        return [Sum(tie, action.version) for tie in mine]

    for rank, (actions, own) in enumerate(zip(program, posts, strict=True)):
        number = Counter[object]()

        def message(action: Action, ends: str, rank: int = rank, number: Counter[object] = number) -> What:
            other = home[action.peer, action.mb]
            way = (action.edge, rank, other) if action.op in SENDS else (action.edge, other, rank)
            number[way, ends] += 1
            return (*way, number[way, ends])

        steps, last = [], dict(last_backwards(actions))
        ends = {Sum((end.stage,), reduce.version, early=True): end for end, reduce in last.items()}
        for at, action in enumerate(actions):
            begun = list[Step]()
            for one in (one for place, one in own if place == at):
                if isinstance(one, Sum) and one.early:
                    never = [((0, 0), 0, 0, 0)] * (ends[one] in actions[at + 1 :])
                    pair = [(one, half) for half in range(2)]
                    begins = [Step(str(part), part, never) for part in pair]
                    if ends[one] == action:
                        begun += [step for one in begins for step in (Step(str(action), computes=True), one)]
                    else:
                        steps += begins
                elif isinstance(one, Sum):
                    early = any(one in told_with(later, [later.op]) for later in actions[at:])
                    steps.append(Step(str(one), one, [((0, 0), 0, 0, 0)] * early))
                else:
                    steps.append(Step(f"post of {one}", message(one, "posts")))
            steps += begun
            if action.op in SENDS:
                steps.append(Step(str(action), message(action, "sends")))
            elif action.op in RECEIVES:
                steps.append(Step(str(action), None, [message(action, "takes")]))
            else:
                steps.append(Step(str(action), None, told_with(action, EARLIER.get(action.op, [])), True))
        yield steps


def stuck(
    program: Program, posts: list[list[Post]], ties: Ties = (), posting_waits: bool = False
) -> list[str]:
    """Run it; return where ranks stay for good, and what is not posted by all its ranks, once by each.

    A rank computes when all is over that it has posted: each message that both ends have posted, each sum
    that all have. `posting_waits`: so does it send and post, as where that allocates.
    """
    sums, steps = sums_of(program, ties), list(steps_of(program, posts, ties))
    posted = defaultdict[What, list[int]](list)  # by which ranks
    open_: list[list[What]] = [[] for _ in program]

    def over(what: What) -> bool:
        one = what[0] if isinstance(what[0], Sum) else what
        return sorted(posted[what]) == sorted(sums[one.tie][1] if isinstance(one, Sum) else what[1:3])

    at, moved = [0] * len(program), True
    while moved:
        moved = False
        for rank, own in enumerate(steps):
            while at[rank] < len(own):
                step = own[at[rank]]
                open_[rank] = [what for what in open_[rank] if not over(what)]
                waits = step.computes or (posting_waits and step.posts is not None)
                if (waits and open_[rank]) or not all(map(over, step.needs)):
                    break
                if step.posts is not None:
                    posted[step.posts].append(rank)
                    open_[rank].append(step.posts)
                at[rank] += 1
                moved = True
    left = [own[done].text for done, own in zip(at, steps, strict=True) if done < len(own)]
    return left + [f"{what} by ranks {by}" for what, by in posted.items() if not over(what)]


def posted(program: Program, buffer_size: int = 2, ties: Ties = ()) -> Posts:
    run = simulate(program, 1, buffer_size=buffer_size, ties=ties)
    return make_posts(run, dict.fromkeys(edges(program), buffer_size), ties)


def most_open(actions: list[Action], posts: list[Post]) -> int:
    """Return the most receives of an edge that are posted and not received."""
    most, open_ = 0, Counter[Edge]()
    for at, action in enumerate(actions):
        open_.update(receive.edge for place, receive in posts if place == at)
        most = max([most, *open_.values()])
        open_[action.edge] -= action.op in RECEIVES
    return most


@pytest.mark.slow
@pytest.mark.parametrize("buffer_size", [1, 2])
@pytest.mark.parametrize("case", LISTED, ids=str)
def test_no_schedule_hangs_and_no_edge_has_more_open_than_both_its_ends_have_room(case, buffer_size):
    for size, program in accepted(case, SIZES):
        posts = posted(program, buffer_size)
        assert stuck(program, posts.by_rank, posting_waits=True) == [], size
        assert buffer_size <= posts.ahead <= 2 * buffer_size
        assert max(map(most_open, program, posts.by_rank)) <= posts.ahead, size


def test_most_schedules_have_one_receive_of_an_edge_open():
    several = {
        c.name for c in LISTED for _, p in accepted(c, SIZES) if max(map(most_open, p, posted(p).by_rank)) > 1
    }
    assert several == {"interleaved_1f1b", "zb_auto", "zb_h2", "zbv"}


def waited_for(program: Program) -> list[list[Post]]:
    return [[(at, a) for at, a in enumerate(actions) if a.op in RECEIVES] for actions in program]


def test_schedules_hang_where_receives_are_posted_when_they_are_waited_for():
    hang = {c.name for c in LISTED for _, p in accepted(c, SIZES) if stuck(p, waited_for(p))}
    assert hang == {"zbv", "zb_h2", "zb_auto", "v_half", "v_async", "interleaved_1f1b"}


def test_fbp_hangs_where_receives_are_posted_ahead():
    """The forward of rank 0 waits for the gradient that needs it. So its messages are staged on a GPU."""
    [case] = [case for case in CASES if case.name == "fbp"]
    for _, program in accepted(case, SIZES):
        ahead = [[(0, a) for a in actions if a.op in RECEIVES] for actions in program]
        assert "0F0@0" in stuck(program, ahead)


@pytest.mark.parametrize("name", ["zbv", "1f1b"])
def test_a_post_that_is_dropped_doubled_or_comes_too_late_is_noticed(name):
    case = next(case for case in CASES if case.name == name)
    [(_, program)] = accepted(case, [(2, 1, 4)])
    posts = posted(program).by_rank
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
    posts = posted(program)
    said = [
        [f"{receive} before {actions[at]}" for at, receive in own]
        for actions, own in zip(program, posts.by_rank, strict=True)
    ]
    assert said == [
        ["0RECV_B0 before 0RECV_B0", "0RECV_B1 before 0SEND_F2", "0RECV_B2 before 0RECV_B2"],
        ["1RECV_F0 before 1RECV_F0", "1RECV_F1 before 1B0@0", "1RECV_F2 before 1RECV_F2"],
    ]


# Sums over ranks


def summed(case: Case, norms: bool, sizes: Sequence[tuple[int, int, int]]) -> Iterator[tuple[Program, Ties]]:
    """Yield programs in which the first stage shares weights with the last, and with the second."""
    for (_, _, microbatches), program in accepted(case, sizes):
        ties = [(0, len(ranks_of(program)) - 1), (0, 1)][: len(ranks_of(program)) - 1]
        made = with_ties(compute_only(program), ties)
        made = lower(with_norms(made) if norms else made)
        with suppress(Deadlock):
            simulate(made, microbatches, ties=ties)
            yield made, ties


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("case", LISTED, ids=str)
def test_no_schedule_hangs_in_its_sums(case, norms):
    programs = list(summed(case, norms, [(2, 2, 2), (3, 2, 4), (4, 1, 8)]))
    assert len(programs) >= (1 if case.name == "v_async" else 2)
    for program, ties in programs:
        posts = posted(program, 2, ties)
        assert stuck(program, posts.by_rank, ties, posting_waits=True) == []


def test_where_sums_are_posted_when_a_rank_has_told_its_shares_ranks_hang():
    """Rank 1 has told the last stage's share, and the first stage's needs its next backward."""
    [case] = [case for case in LISTED if case.name == "interleaved_1f1b"]
    for program, ties in summed(case, False, [(2, 1, 2), (4, 1, 8)]):
        posts = posted(program, 2, ties).by_rank
        for rank, own in enumerate(posts):
            sums = {one: at for at, one in own if isinstance(one, Sum)}
            for at, action in enumerate(program[rank]):
                if action.op is Op.TIE:
                    told = {Sum(tie, action.version) for tie in ties if action.stage in tie}
                    sums |= dict.fromkeys(told & sums.keys(), at + 1)
            messages = [(at, one) for at, one in own if not isinstance(one, Sum)]
            posts[rank] = sorted([*messages, *((at, one) for one, at in sums.items())], key=itemgetter(0))
        assert stuck(program, posts, ties)


def test_a_sum_is_posted_on_all_ranks_where_the_last_of_them_tells_its_share():
    """Rank 1 tells that of stage 3, then does two backwards of stage 1, for which stage 0 waits."""
    [case] = [case for case in LISTED if case.name == "interleaved_1f1b"]
    [(program, ties)] = summed(case, False, [(2, 1, 2)])
    posts = posted(program, 2, ties)
    assert "3TIE@1 1RECV_B0 1B0@0" in format_program(program)
    said = [
        [(*one.tie, str(actions[at])) for at, one in own if isinstance(one, Sum)]
        for actions, own in zip(program, posts.by_rank, strict=True)
    ]
    assert said == [[(0, 3, f"{rank}STEP@1"), (0, 1, f"{rank}STEP@1")] for rank in (0, 1)]


@pytest.mark.parametrize("norms", [False, True])
def test_replicas_reduce_where_the_last_of_them_has_its_gradient(norms):
    for case in (case for case in LISTED if case.virtual == 1):
        for _, program in accepted(case, [(3, 2, 5)]):
            spread = replicated(compute_only(program), [2, 3, 1], 2, 5)
            spread = lower(with_norms(spread) if norms else spread)
            posts = posted(spread)
            assert stuck(spread, posts.by_rank, posting_waits=True) == [], case
            reduced = [
                [one.tie for _, one in own if isinstance(one, Sum) and one.tie and not one.early]
                for own in posts.by_rank
            ]
            assert reduced == [[(0,)] * 2] * 2 + [[(1,)] * 2] * 3 + [[]]
            early = [
                [(*one.tie, one.version) for _, one in own if getattr(one, "early", False)]
                for own in posts.by_rank
            ]
            assert early == [[(0, 1), (0, 2)]] * 2 + [[(1, 1), (1, 2)]] * 3 + [[]], case


def test_what_replicas_have_finished_is_posted_within_the_last_of_their_last_backwards():
    """Where each began its own at once, rank 2 would wait within 1B1 for 1B2, whose forward waits for 1B1."""
    program = lower(replicated(one_f_one_b(2, 1, 3), [1, 2], 1, 3))
    posts = posted(program).by_rank
    early = {rank: at for rank, own in enumerate(posts) for at, one in own if getattr(one, "early", False)}
    assert {rank: str(program[rank][at]) for rank, at in early.items()} == {1: "1B2@0", 2: "1REDUCE@1"}
    assert stuck(program, posts, posting_waits=True) == []
    for rank, text in {1: "1F2@0", 2: "1B1@0"}.items():  # too early, and where its own begins
        at = [str(action) for action in program[rank]].index(text)
        moved = [(at if getattr(one, "early", False) else place, one) for place, one in posts[rank]]
        mutant = [*posts[:rank], sorted(moved, key=itemgetter(0)), *posts[rank + 1 :]]
        assert stuck(program, mutant), text


def test_nothing_is_early_where_a_replica_has_no_microbatch():
    program = lower(replicated(one_f_one_b(1, 1, 2), [3], 1, 2))
    assert [[one.early for _, one in own] for own in posted(program).by_rank] == [[False]] * 3


def test_rank_0_has_sent_the_inputs_of_others_before_it_waits_for_them():
    """Rank 1 runs the forwards of two batches before it gives its share of the first one's gradient."""
    program = lower(spread_program(pipedream, [(0, 1), (2,)], 4, 1))
    assert format_program(program).splitlines()[1].startswith("0F1@0 0SEND_F1 0F3@0 0SEND_F3 0REDUCE@1")
    deals = [(str(program[0][at]), str(action)) for at, action in posted(program).deals]
    assert deals == [("0F0@0", "0F1@0"), ("0SEND_F0", "0F3@0")]
