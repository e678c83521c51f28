"""The messages of a rank's stages: handed over between two stages of the rank, or encoded for another rank.

Activations travel along the routes of the cut, gradients the other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from pipetrain.codec import Codecs
from pipetrain.errors import TrainingStopped
from pipetrain.model.network import Tensors, ValueId
from pipetrain.model.specs import Size, are_like, specs_of
from pipetrain.plan.cut import Cut, divide, merge
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.comm.message import Message
from pipetrain.runtime.message_coding import Coding
from pipetrain.runtime.microbatch_feed import Feed
from pipetrain.schedule.actions import Action, Edge, Op, Placement
from pipetrain.schedule.posting_order import Sum

_EdgeValues = tuple[Edge, Sequence[ValueId]]  # and what travels on it


class Mailbox:
    """The messages of the stages of a `rank`, one window at a time."""

    def __init__(
        self, channel: Channel, cut: Cut, placement: Placement, rank: int, coding: Coding | None = None
    ) -> None:
        self.channel = channel
        self.placement, self.rank = placement, rank
        self.cut = cut
        self._rank_of: Any = None  # of the window
        self.coding = coding or Coding(Codecs())
        self._messages: dict[tuple[Edge, int, Size], Message] = {}
        # By stage the edges, and the values on each, of what it hands on and back, and of what it gets.
        self._leaving = [[(r.edge, r.values) for r in routes] for routes in cut.routes_from]
        self._returning = [[(r.way_back, r.returned) for r in routes] for routes in cut.routes_into]
        self._entering = [[(r.edge, r.values) for r in routes] for routes in cut.routes_into]
        self._coming_back = [[(r.way_back, r.returned) for r in routes] for routes in cut.routes_from]
        self._feed: Any = None  # of the window
        self._arrived: dict[tuple[Edge, int], Tensors] = {}  # (edge, microbatch) -> its message
        self._to_send: dict[tuple[Edge, int], Tensors] = {}
        self.raw_bytes: Counter[int] = Counter()
        """The bytes that each stage has sent in the window, before encoding."""

    def begin(
        self, feed: Feed, receives: Iterable[Action], rank_of: Callable[[int, int], int], watched: bool
    ) -> None:
        """Begin a window with all its receives, in order on each edge; `watched`: see Channel.expect.

        `rank_of`: returns the rank that runs a (stage, microbatch).
        """
        self._feed, self._rank_of, self.raw_bytes = feed, rank_of, Counter()
        self.channel.expect([self._message(action) for action in receives], watched)

    def truncate(self, mb: int) -> None:
        """End the window before microbatch `mb`: of it and later ones nothing is received or read."""
        self.channel.truncate(mb)
        self._feed.truncate(mb)

    def end(self) -> None:
        """Drop all tensors of the window: what a feed has sent keeps connections open."""
        self._feed = None
        self._arrived.clear()
        self._to_send.clear()

    def inputs(self, stage: int, mb: int) -> Tensors:
        """Return what enters a stage other than the first."""
        return self._take(mb, self._entering[stage])

    def grads(self, stage: int, mb: int) -> Tensors:
        return self._take(mb, self._coming_back[stage])

    def put_outputs(self, stage: int, mb: int, outputs: Tensors) -> None:
        self._put(mb, self._leaving[stage], outputs)

    def put_input_grads(self, stage: int, mb: int, grads: Tensors) -> None:
        self._put(mb, self._returning[stage], grads)

    def send(self, action: Action) -> None:
        message = self._message(action)
        tensors = self._to_send.pop((message.edge, action.mb))
        if not are_like(tensors, message.plain):  # the receiver would not notice
            actual, planned = (" + ".join(map(str, specs)) for specs in (specs_of(tensors), message.plain))
            raise TrainingStopped(
                f"stage {action.stage} made {actual} for {message.name}, and the plan says {planned}: what a "
                f"layer returns must depend only on the size of what it takes"
            )
        self.channel.send(message, self.coding.encode(message, tensors))
        self.raw_bytes[action.stage] += message.plain_bytes

    def post(self, posted: Action | Sum) -> None:
        """Post a receive, start sums over ranks, or send the inputs of another rank's forward."""
        if isinstance(posted, Sum):
            self.channel.begin(posted.tie, posted.early)
        elif posted.op is Op.F:
            self._feed.send_up_to(posted.mb)
        else:
            self.channel.post(self._message(posted))

    def recv(self, action: Action) -> None:
        message = self._message(action)
        self._arrived[message.edge, action.mb] = self.coding.decode(message, self.channel.recv(message))

    def tensors(self) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the tensors of messages on this rank, with the stages between which they travel."""
        yield from self.channel.buffers()
        for (edge, _), tensors in (*self._arrived.items(), *self._to_send.items()):
            yield from ((edge, tensor) for tensor in tensors)

    # What has arrived

    def arrived(self, receive: Action) -> bool:
        return self.channel.arrived(self._message(receive))

    def room(self, send: Action) -> bool:
        return self.channel.room(self._message(send))

    def wait(self, receives: Iterable[Action], sends: Iterable[Action]) -> None:
        """Wait until one of these receives has arrived, or there is room for one of these sends."""
        self.channel.wait([*map(self._message, receives)], [*map(self._message, sends)])

    def _take(self, mb: int, edges: Sequence[_EdgeValues]) -> Tensors:
        return merge([(values, self._arrived.pop((edge, mb))) for edge, values in edges])

    def _put(self, mb: int, edges: Sequence[_EdgeValues], tensors: Tensors) -> None:
        for (edge, _), part in zip(edges, divide(tensors, [values for _, values in edges]), strict=True):
            local = self._rank_of(edge[1], mb) == self.rank
            (self._arrived if local else self._to_send)[edge, mb] = part

    def _message(self, action: Action) -> Message:
        edge, mb, size = action.edge, action.mb, self._feed.size(action.mb)
        message = self._messages.get((edge, mb, size))
        if message is None:
            plain = self.cut.message(edge, size)
            ranks = self._rank_of(edge[0], mb), self._rank_of(edge[1], mb)
            message = Message(*edge, mb, self.coding.specs(edge, plain), ranks, plain)
            self._messages[edge, mb, size] = message
        return message
