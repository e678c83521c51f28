"""Open microbatches of a stage, and the batch until its update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from pipetrain.model.network import Tensors
from pipetrain.model.specs import as_tuple
from pipetrain.runtime.microbatch_feed import Target
from pipetrain.runtime.stage.objective import Counted
from pipetrain.runtime.stage.recompute import Recompute
from pipetrain.runtime.stage.split_backward import Deferred
from pipetrain.schedule.actions import Read


class Saving(NamedTuple):
    """What a forward saves for its backward: for two halves, or for a recompute."""

    split: bool = False
    recomputed: bool = False


WHOLE = Saving()


@dataclass(slots=True)
class Microbatch:
    """An open microbatch. Before its recompute there are no outputs, and after I no inputs either."""

    mb: int
    inputs: Tensors
    read: Read
    saving: Saving
    target: Target | None = None
    outputs: Tensors = ()
    grads: Tensors = ()  # of the outputs, if W is the whole backward
    deferred: Deferred | None = None  # the weight gradients to be made in W
    recompute: Recompute | None = None  # between the forward and its recompute
    counted: Counted | None = None  # at the last stage

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds itself, besides what autograd saves."""
        yield from (*self.inputs, *self.outputs, *self.grads)
        if self.target is not None:
            yield from as_tuple(self.target.value)
        if self.recompute is not None:
            yield from self.recompute.tensors
        if self.deferred is not None:
            yield from self.deferred.tensors


@dataclass(slots=True)
class Batch:
    """The microbatches whose gradients make one update."""

    mbs: list[int] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)  # at the last stage
    losses: Tensor | None = None  # [n], at the last stage: each times its share of the batch's loss
    skipped: Tensor | None = None  # a scalar, 1 if the update is skipped; None: no update ever is
