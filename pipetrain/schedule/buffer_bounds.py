"""The bound of each edge: how many receives are posted ahead, and how many sends may be unfinished.

Neighbours receive messages about as fast as they are made, so a small bound is enough. A message that skips
stages waits until those stages have done their part: with S stages of 1F1B, the first stage has made S such
messages when the last stage receives the first. A smaller bound would delay the pipeline, or block it for
good if the rank must first run another of its stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pipetrain.schedule.actions import COMMUNICATION, SENDS, BothWays, Edge, Op, Program, Ties
from pipetrain.schedule.lower import Link, Lowering, edges
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Timeline


def edge_bounds(
    program: Program, routes: Sequence[Edge] | None, sizes: BothWays, ties: Ties = ()
) -> dict[Edge, int]:
    """Return the bound of each edge of a lowered program, for `simulate` and for the channel.

    Neighbours have what `sizes` has for their direction. A skip has room for that many and for the messages
    on the way when one is sent, at unit costs and if only the neighbours' edges block. It needs at most half
    of the microbatches that its source holds open: both ends together then have room for all of them. An
    evaluation (`forward_only`) has the same bounds for any number of microbatches. Raises Deadlock if a
    program with skips blocks on the neighbours' edges alone.
    """
    used = edges(program, routes)
    if not any(action.op in (Op.B, Op.I) for actions in program for action in actions):
        # Ranks that advance together have at most d + 1 messages on the way over d stages.
        return {edge: _size(edge, sizes) + (edge[1] - edge[0]) // 2 for edge in used}
    bounds = free_skips(used, sizes, 1 + max(action.mb for actions in program for action in actions))
    if not all(map(_near, bounds)):
        run = simulate(program, 1, buffer_size=bounds, routes=routes, ties=ties)
        ahead, activations = _ahead(run, Lowering.for_program(program, routes)), run.activations
        for edge in bounds:
            if not _near(edge):
                size = _size(edge, sizes)
                enough = max(size, -(-activations[min(edge)] // 2))
                bounds[edge] = min(size + -(-ahead[edge] // 2), enough)
    return bounds


def free_skips(edges: Iterable[Edge], sizes: BothWays, microbatches: int) -> dict[Edge, int]:
    """Return bounds with which so many microbatches block on the neighbours' edges only."""
    most = max(*sizes, microbatches)
    return {edge: _size(edge, sizes) if _near(edge) else most for edge in edges}


def widest(bounds: Sequence[dict[Edge, int]]) -> dict[Edge, int]:
    """Return the largest bound of each edge, for a channel that serves several programs."""
    return {
        edge: max(program_bounds.get(edge, 0) for program_bounds in bounds)
        for edge in sorted(set().union(*bounds))
    }


def _size(edge: Edge, sizes: BothWays) -> int:
    return sizes[edge[0] > edge[1]]


def _near(edge: Edge) -> bool:
    return abs(edge[0] - edge[1]) == 1


def _ahead(run: Timeline, lowering: Lowering) -> dict[Edge, int]:
    """Return, by edge, the most messages on the way on a link when another one is sent."""
    sent: dict[Link, list[float]] = defaultdict(list)  # when, in order
    received: dict[Link, list[float]] = defaultdict(list)
    for rank, row in enumerate(run.rows):
        for action, _, end, *_ in row.spans:
            if action is not None and action.op in COMMUNICATION:
                ranks = rank, lowering.rank(action.peer, action.mb)
                if action.op in SENDS:
                    sent[action.edge, ranks].append(end)
                else:
                    received[action.edge, ranks[::-1]].append(end)
    ahead: dict[Edge, int] = defaultdict(int)
    for link, times in sent.items():
        for index, at in enumerate(times):
            waiting = index - bisect_right(received[link], at, hi=index)
            ahead[link[0]] = max(ahead[link[0]], waiting)
    return ahead
