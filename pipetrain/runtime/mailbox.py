"""The messages of a window: tensors are handed over between two stages of a rank, or sent to another.

Activations travel along the routes of the cut, gradients the other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipetrain.errors import TrainingStopped
from pipetrain.network.values import TensorSpec, specs_of
from pipetrain.plan.cut import Cut, divide, merge
from pipetrain.runtime.channel import Channel, Message
from pipetrain.runtime.coding import Coding
from pipetrain.runtime.feed import Feed
from pipetrain.runtime.microbatch import Tensors
from pipetrain.schedule.actions import Action, Edge
from pipetrain.schedule.policy import Wait


@dataclass(frozen=True, slots=True)
class Transport:
    """How stages exchange tensors. `placement[stage]` is a stage's rank; `coding`: None for none."""

    channel: Channel
    cut: Cut
    placement: Sequence[int]
    coding: Coding | None = None


class Mailbox:
    """The messages of one window of a rank's stages, `mine`."""

    def __init__(self, transport: Transport, mine: Collection[int], feed: Feed) -> None:
        self.channel = transport.channel
        self._cut = transport.cut
        self._placement = transport.placement
        self._coding = transport.coding
        self._mine = mine
        self._feed = feed
        self._specs: dict[tuple[Edge, int], tuple[TensorSpec, ...]] = {}  # by samples, too
        self._arrived: dict[tuple[Edge, int], Tensors] = {}  # (edge, microbatch) -> its message
        self._to_send: dict[tuple[Edge, int], Tensors] = {}
        self.raw_bytes: Counter[int] = Counter()
        """The bytes that each stage has sent, before encoding."""

    def expect(self, receives: Iterable[Action], watched: bool) -> None:
        """Announce all receives of the window, in order on each edge; `watched`: to a policy."""
        self.channel.expect([self._on_wire(self._message(action)) for action in receives], watched)

    def inputs(self, stage: int, mb: int) -> Tensors:
        """Return what enters a stage, the first one from the feed."""
        if stage == 0:
            return self._feed.input(mb)
        routes = self._cut.routes_into[stage]
        return merge((route.values, self._arrived.pop((route.edge, mb))) for route in routes)

    def grads(self, stage: int, mb: int) -> Tensors:
        """Return the gradients of what has left a stage."""
        routes = self._cut.routes_from[stage]
        return merge((route.returned, self._arrived.pop((route.way_back, mb))) for route in routes)

    def hand_on(self, stage: int, mb: int, outputs: Tensors) -> None:
        """Take what leaves a stage."""
        routes = self._cut.routes_from[stage]
        parts = divide(outputs, [route.values for route in routes])
        self._put(mb, [route.edge for route in routes], parts)

    def hand_back(self, stage: int, mb: int, grads: Tensors) -> None:
        """Take the gradients of what has entered a stage."""
        routes = self._cut.routes_into[stage]
        parts = divide(grads, [route.returned for route in routes])
        self._put(mb, [route.way_back for route in routes], parts)

    def send(self, action: Action) -> None:
        message = self._message(action)
        tensors = self._to_send.pop((message.edge, action.mb))
        if specs_of(tensors) != message.specs:  # the receiver would not notice
            made, planned = (" + ".join(map(str, specs)) for specs in (specs_of(tensors), message.specs))
            raise TrainingStopped(
                f"stage {action.stage} made {made} for {message.name}, and the plan says {planned}: what a "
                f"layer returns must depend only on the number of samples"
            )
        sent = tensors if self._coding is None else self._coding.encode(message, tensors)
        self.channel.send(self._on_wire(message), sent)
        self.raw_bytes[action.stage] += message.nbytes

    def recv(self, action: Action) -> None:
        message = self._message(action)
        arrived = self.channel.recv(self._on_wire(message))
        tensors = arrived if self._coding is None else self._coding.decode(message, arrived)
        self._arrived[message.edge, action.mb] = tensors

    @property
    def coded(self) -> float:
        """Seconds of encoding and decoding so far."""
        return 0.0 if self._coding is None else self._coding.seconds

    def held(self) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the tensors of messages that this rank holds, with the stages between which they travel."""
        yield from self.channel.buffers()
        for messages in (self._arrived, self._to_send):
            for (edge, _), tensors in messages.items():
                yield from ((edge, tensor) for tensor in tensors)

    # What an order sees

    def arrived(self, receive: Action) -> bool:
        return self.channel.arrived(self._on_wire(self._message(receive)))

    def room(self, send: Action) -> bool:
        return self.channel.room(self._on_wire(self._message(send)))

    def forget(self, mb: int) -> None:
        self.channel.forget(mb)

    def wait(self, wait: Wait) -> None:
        receives, sends = (
            [self._on_wire(self._message(action)) for action in actions]
            for actions in (wait.receives, wait.sends)
        )
        self.channel.wait(receives, sends)

    def _put(self, mb: int, edges: Sequence[Edge], parts: Sequence[Tensors]) -> None:
        for edge, tensors in zip(edges, parts, strict=True):
            (self._arrived if edge[1] in self._mine else self._to_send)[edge, mb] = tensors

    def _on_wire(self, message: Message) -> Message:
        return message if self._coding is None else self._coding.on_wire(message)

    def _message(self, action: Action) -> Message:
        edge = source, target = action.edge
        size = self._feed.size(action.mb)
        if (specs := self._specs.get((edge, size))) is None:
            specs = self._specs[edge, size] = self._cut.message(edge, size)
        return Message(source, target, action.mb, specs, (self._placement[source], self._placement[target]))
