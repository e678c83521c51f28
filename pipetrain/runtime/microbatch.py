"""What a stage holds of each open microbatch, and of a batch until its update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from pipetrain.runtime.feed import Target
from pipetrain.runtime.objective import Counted
from pipetrain.runtime.recompute import Recompute
from pipetrain.runtime.split import Deferred

Tensors = tuple[Tensor, ...]


class Saving(NamedTuple):
    """What a forward saves for its backward, which may come in two halves, or after a recomputation."""

    split: bool = False
    recomputed: bool = False


WHOLE = Saving()


@dataclass(slots=True)
class Microbatch:
    """An open microbatch. Before a recomputation there are no outputs, and after I no inputs either."""

    mb: int
    inputs: Tensors
    version: int
    saving: Saving
    target: Target | None = None
    outputs: Tensors = ()
    grads: Tensors = ()  # of the outputs, where W is all of the backward
    deferred: Deferred | None = None  # the weight gradients to be made in W
    recompute: Recompute | None = None  # between the forward and its recomputation
    counted: Counted | None = None  # at the last stage


@dataclass(slots=True)
class Batch:
    """The microbatches whose gradients make one update."""

    mbs: list[int] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)  # at the last stage
    losses: Tensor | None = None  # [n], at the last stage: each times its share of the batch's
    skipped: bool = False  # whether the update is left out
    unless: Tensor | None = None  # on a GPU: 1 where the gradient is not finite
