"""Messages between two ranks, and the errors of waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from pipetrain.errors import ChannelError
from pipetrain.model.specs import TensorSpec
from pipetrain.schedule.actions import Edge, Tie
from pipetrain.schedule.lower import Link


@dataclass(frozen=True)
class Message:
    """The tensors of one microbatch on one link of an edge.

    `specs`: on the wire; `ranks`: source and destination rank; `plain`: the specs before encoding.
    """

    src: int
    dst: int
    mb: int
    specs: tuple[TensorSpec, ...]
    ranks: tuple[int, int]
    plain: tuple[TensorSpec, ...] = ()

    @cached_property
    def edge(self) -> Edge:
        return (self.src, self.dst)

    @cached_property
    def link(self) -> Link:
        return self.edge, self.ranks

    @cached_property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def plain_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.plain)

    @property
    def name(self) -> str:
        """Its description, with the stages if it skips some."""
        name = f"the {'activation' if self.src < self.dst else 'gradient'} of microbatch {self.mb}"
        return name if abs(self.src - self.dst) == 1 else f"{name} (stage {self.src} to {self.dst})"


ErrorOf = Callable[[str], ChannelError]
"""Makes the error of a wait, given why the connection was lost, or "" for an expired deadline."""


def message_error(
    receives: Sequence[Message], sends: Sequence[Message], timeout: float, why: str
) -> ChannelError:
    """Return the error of waiting for any of these messages. See ErrorOf."""
    first = (*receives, *sends)[0]
    rank, peer = first.ranks[::-1] if receives else first.ranks
    if why:
        return ChannelError(f"rank {rank} lost rank {peer} at {first.name}: {why}")
    awaited = [f"{message.name} from rank {message.ranks[0]}" for message in receives]
    awaited += [f"rank {message.ranks[1]} to take {message.name}" for message in sends]
    return ChannelError(f"rank {rank} waited {timeout:g} s for {' or for '.join(awaited)}")


def sum_error(tie: Tie, group: Any, timeout: float, why: str) -> ChannelError:
    """Return the error of waiting for the sum over the ranks of a tie. See ErrorOf."""
    summed = "the gradients of shared weights" if tie else "the gradient norms"
    if len(tie) == 1:
        summed = f"the gradients of the replicas of stage {tie[0]}"
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    peers = ", ".join(str(peer) for peer in ranks if peer != rank)
    peers_text = f"one of ranks {peers}" if len(ranks) > 2 else f"rank {peers}"
    expired = f"rank {rank} waited {timeout:g} s for {summed} of {peers_text}"
    return ChannelError(f"rank {rank} lost {peers_text} at {summed}: {why}" if why else expired)
