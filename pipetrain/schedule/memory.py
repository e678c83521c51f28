"""What the stages of a rank hold while it runs its list: counts by the order of actions, and bytes by sizes.

What a stage holds after each of its rank's actions follows from their order alone, so it is the same for a
simulated and for a measured timeline; times say when. `counts` says it in numbers of microbatches, versions
and messages, and a stage's `Sizes` turn these into bytes by part: a `Held`. What an action needs only while
it runs (the gradients between its layers, workspaces) is not counted.

A stage holds a microbatch from its F until the end of its B or W, in one of three states: `saved` after F or
R, `before_r` after an F whose R is to come, `after_i` between I and W. A receive has its buffer from when it
is posted, `bound` ahead, and a sender keeps what it has sent until `bound` later messages are sent; a sent
activation is a tensor that its microbatch saves anyway, unless it is recomputed. The storage of old weight
versions is used again, and never freed.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipetrain.schedule.actions import RECEIVES, SENDS, UPDATE, Action, Edge, Op, last_uses
from pipetrain.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of one stage; those of a microbatch by its state, each with all that it holds then."""

    saved: int = 0  # a microbatch after F or R: what enters and leaves the stage, and what autograd saves
    before_r: int = 0  # after an F whose R is to come: what enters, and what is not recomputed
    after_i: int = 0  # between I and W
    weights: int = 0  # parameters, buffers, their moving average: always
    version: int = 0  # the trained parameters: each older version
    gradient: int = 0  # of a batch, from its first backward until its STEP
    optimizer: int = 0  # the optimizer's state
    tied: int = 0  # the gradient of weights that it shares with other stages, from TIE until NORM or STEP
    wire: Mapping[Edge, int] = field(default_factory=dict)  # a message, as it travels
    raw: Mapping[Edge, int] = field(default_factory=dict)  # a message, as its tensors


class Counts(NamedTuple):
    """How many microbatches, older versions, gradients and messages one stage holds."""

    saved: int = 0
    before_r: int = 0
    after_i: int = 0
    versions: int = 0
    gradients: int = 0
    tied: int = 0
    wire: tuple[tuple[Edge, int], ...] = ()  # by edge, ascending; posted receives, and sends
    raw: tuple[tuple[Edge, int], ...] = ()  # received and not yet used, or made and not yet sent


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes of one stage, by part."""

    activations: int = 0
    weights: int = 0
    versions: int = 0
    gradients: int = 0
    optimizer: int = 0
    messages: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in PARTS}


PARTS = ("activations", "weights", "versions", "gradients", "optimizer", "messages")


class Moment(NamedTuple):
    """What the stages of a rank hold after one of its actions."""

    time: float
    action: Action
    stages: Mapping[int, Held]

    @property
    def total(self) -> int:
        return sum(held.total for held in self.stages.values())


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a stage holds: in all, and of each part, whose peaks may be at other moments."""

    total: int
    parts: Held


def peak(moments: Sequence[Held]) -> Peak:
    """Return the peak of what a stage holds at some moments."""
    if not moments:
        return Peak(0, Held())
    parts = {name: max(getattr(held, name) for held in moments) for name in PARTS}
    return Peak(max(held.total for held in moments), Held(**parts))


def in_bytes(counts: Counts, sizes: Sizes) -> Held:
    """Return what a stage of these sizes holds."""
    return Held(
        activations=counts.saved * sizes.saved
        + counts.before_r * sizes.before_r
        + counts.after_i * sizes.after_i,
        weights=sizes.weights,
        versions=counts.versions * sizes.version,
        gradients=counts.gradients * sizes.gradient,
        optimizer=sizes.optimizer,
        messages=counts.tied * sizes.tied
        + sum(number * sizes.wire.get(edge, 0) for edge, number in counts.wire)
        + sum(number * sizes.raw.get(edge, 0) for edge, number in counts.raw),
    )


def over_time(
    timeline: Timeline,
    sizes: Sequence[Sizes],
    bounds: Mapping[Edge, int],
    routes: Sequence[Edge] | None = None,
    copied: Collection[Edge] = (),
) -> list[list[Moment]]:
    """Return, by rank, what its stages hold after each action of a timeline; for the rest see `counts`."""
    return [
        [
            Moment(span.end, action, {stage: in_bytes(of, sizes[stage]) for stage, of in held.items()})
            for (action, held), span in zip(
                counts(row.actions, bounds, routes, copied),
                (span for span in row.spans if span.action is not None),
                strict=True,
            )
        ]
        for row in timeline.rows
    ]


def peaks(moments: Sequence[Sequence[Moment]]) -> list[Peak]:
    """Return the peak of each stage from the moments of all ranks; of replicas that of the fullest."""
    found: dict[int, list[Peak]] = defaultdict(list)
    for of_rank in moments:
        for stage in of_rank[0].stages if of_rank else ():
            found[stage].append(peak([moment.stages[stage] for moment in of_rank]))
    return [max(found[stage], key=lambda one: one.total) for stage in sorted(found)]


def counts(
    actions: Sequence[Action],
    bounds: Mapping[Edge, int],
    routes: Sequence[Edge] | None = None,
    copied: Collection[Edge] = (),
) -> Iterator[tuple[Action, dict[int, Counts]]]:
    """Yield each action of a rank's lowered list, and what its stages hold after it.

    The window is one of many: the storage of the versions is there from its start. `bounds`: of the edges
    between ranks; `routes`: between stages, None: from each to the next; `copied`: the edges over which what
    is sent is a copy, as of a codec.
    """
    rank = _Rank(actions, bounds, routes, copied)
    for position, action in enumerate(actions):
        rank.do(action, position)
        yield action, {stage: rank.counts(stage) for stage in rank.stages}


def fullest(stage: int, microbatches: int, versions: int, bounds: Mapping[Edge, int]) -> Counts:
    """Return the most that a stage may hold whose order is decided while it runs, at these peaks."""
    edges = sorted(edge for edge in bounds if stage in edge and (edge[1] == stage or edge[1] < edge[0]))
    wire = tuple((edge, bounds[edge]) for edge in edges)
    return Counts(
        microbatches, versions=versions - 1, gradients=1, wire=wire, raw=tuple((e, 1) for e in edges)
    )


def most(moments: Sequence[Counts]) -> list[Counts]:
    """Return those of a stage's counts of which no other has as much of everything.

    For any sizes, the peak of all is the peak of these.
    """
    found: list[Counts] = []
    for one in dict.fromkeys(moments):
        if not any(_covers(other, one) for other in found):
            found = [other for other in found if not _covers(one, other)] + [one]
    return found


def _covers(a: Counts, b: Counts) -> bool:
    """Return whether `a` has as much of everything as `b`."""
    messages = all(
        Counter(dict(some)) >= Counter(dict(other)) for some, other in ((a.wire, b.wire), (a.raw, b.raw))
    )
    return messages and all(x >= y for x, y in zip(a[:6], b[:6], strict=True))


@dataclass(slots=True)
class _Stage:
    saved: set[int] = field(default_factory=set)  # microbatches
    before_r: set[int] = field(default_factory=set)
    after_i: set[int] = field(default_factory=set)
    versions: list[int] = field(default_factory=lambda: [0])
    gradients: int = 0
    tied: int = 0


class _Rank:
    """The stages and the messages of one rank."""

    def __init__(
        self,
        actions: Sequence[Action],
        bounds: Mapping[Edge, int],
        routes: Sequence[Edge] | None,
        copied: Collection[Edge],
    ) -> None:
        self.stages = {stage: _Stage() for stage in sorted({action.stage for action in actions})}
        last = max(self.stages, default=0)
        routes = routes if routes is not None else [(n, n + 1) for n in range(last)]
        self._inner = [route for route in routes if route[0] in self.stages and route[1] in self.stages]
        self._bounds, self._copied = bounds, copied
        self._recomputed = {
            stage: {a.mb for a in actions if a.op is Op.R and a.stage == stage} for stage in self.stages
        }
        self._last_uses = last_uses(actions)
        self._to_post: Counter[Edge] = Counter(a.edge for a in actions if a.op in RECEIVES)
        self._posted: Counter[Edge] = Counter()
        self._sent: dict[Edge, deque[int]] = {}
        self._raw: set[tuple[Edge, int]] = set()  # messages whose tensors wait to be used or sent
        self._sends = {(a.edge, a.mb) for a in actions if a.op in SENDS}
        self._edges: dict[int, list[Edge]] = {stage: [] for stage in self.stages}
        for edge in sorted({a.edge for a in actions if a.op in SENDS | RECEIVES} | set(self._inner)):
            self._edges_of(edge)
        for route in self._inner:
            self._edges_of(route[::-1])
        for edge in list(self._to_post):
            self._post(edge)
        self._ring = self._versions_at_most(actions)

    def _edges_of(self, edge: Edge) -> None:
        """Give an edge to its stage here; one between two stages of the rank to the receiver."""
        owner = edge[1] if edge[1] in self.stages else edge[0]
        self._edges[owner].append(edge)

    def _versions_at_most(self, actions: Sequence[Action]) -> dict[int, int]:
        """Return the most older versions of each stage, whose storage is used again."""
        held: dict[int, list[int]] = {stage: [0] for stage in self.stages}
        found = dict.fromkeys(self.stages, 0)
        for position, action in enumerate(actions):
            if action.op is Op.STEP:
                stage = action.stage
                kept = [v for v in held[stage] if self._last_uses.get((stage, v), -1) > position]
                held[stage] = [*kept, action.version]
                found[stage] = max(found[stage], len(kept))
        return found

    def do(self, action: Action, position: int) -> None:
        stage, mb = self.stages[action.stage], action.mb
        if action.op in RECEIVES:
            self._posted[action.edge] -= 1
            self._raw.add((action.edge, mb))
            self._post(action.edge)
        elif action.op in SENDS:
            sent = self._sent.setdefault(action.edge, deque(maxlen=self._bounds[action.edge]))
            sent.append(mb)
            self._raw.discard((action.edge, mb))
        elif action.op is Op.F:
            self._use(action.stage, mb, forward=True)
            states = stage.before_r if mb in self._recomputed[action.stage] else stage.saved
            states.add(mb)
            self._make(action.stage, mb, forward=True)
        elif action.op is Op.R:
            stage.before_r.discard(mb)
            stage.saved.add(mb)
        elif action.op in (Op.B, Op.I):
            self._use(action.stage, mb, forward=False)
            stage.saved.discard(mb)
            if action.op is Op.I:
                stage.after_i.add(mb)
            else:
                stage.gradients = 1
            self._make(action.stage, mb, forward=False)
        elif action.op is Op.W:
            stage.after_i.discard(mb)
            stage.gradients = 1
        elif action.op in UPDATE:
            stage.tied = int(action.op is Op.TIE)
            if action.op is Op.STEP:
                stage.gradients = 0

    def _post(self, edge: Edge) -> None:
        while self._to_post[edge] and self._posted[edge] < self._bounds[edge]:
            self._to_post[edge] -= 1
            self._posted[edge] += 1

    def _use(self, stage: int, mb: int, forward: bool) -> None:
        """Take the messages that have come to a stage for a compute action."""
        self._raw = {
            (edge, of)
            for edge, of in self._raw
            if not (of == mb and edge[1] == stage and (edge[0] < stage) is forward)
        }

    def _make(self, stage: int, mb: int, forward: bool) -> None:
        """Put what a compute action makes where its SEND, or the next stage on this rank, finds it."""
        inner = self._inner if forward else [route[::-1] for route in self._inner]
        self._raw |= {(edge, mb) for edge in inner if edge[0] == stage}
        outer = [edge for edge in self._edges[stage] if edge[0] == stage and (edge, mb) in self._sends]
        self._raw |= {(edge, mb) for edge in outer if (edge[0] < edge[1]) is forward}

    def counts(self, stage: int) -> Counts:
        of = self.stages[stage]
        wire: Counter[Edge] = Counter()
        raw: Counter[Edge] = Counter()
        for edge in self._edges[stage]:
            forward = edge[0] == stage and edge[0] < edge[1]
            shared = of.saved - self._recomputed[stage] if forward else set()
            sent = self._sent.get(edge, ())
            held = sent if edge in self._copied else [mb for mb in sent if mb not in shared]
            wire[edge] = self._posted[edge] + len(held)
            raw[edge] = sum(over == edge and mb not in shared for over, mb in self._raw)
        return Counts(
            len(of.saved),
            len(of.before_r),
            len(of.after_i),
            self._ring[stage],
            of.gradients,
            of.tied,
            _listed(wire),
            _listed(raw),
        )


def _listed(numbers: Counter[Edge]) -> tuple[tuple[Edge, int], ...]:
    return tuple(sorted((edge, number) for edge, number in numbers.items() if number))
