"""The sums over ranks before an update: of replicas' gradients, those of shared weights, and norms.

Each replica of a stage has the gradient of its own microbatches. REDUCE adds them up to that of the batch, as
each microbatch's loss is a share of the batch's already. Behind it the first replica speaks for the stage.

Each stage has its own copy of a weight that layers in several stages share. Before an update the stages add
up their gradients of it. So every copy makes the same step, with the same optimizer state, and the copies
stay equal to the last bit. A rank tells the others one sum for all its stages, and goes on until an update
needs what the others tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipetrain.errors import TrainingStopped
from pipetrain.network.numerics import numbers_of
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.actions import ALL, Action, Op, Placement, Tie

WAITING = frozenset({Op.TIE, Op.NORM, Op.STEP})  # for what other ranks tell
_Key = tuple[Tie, int]  # with the version that an update makes


class Sums:
    """The sums over stages in one window."""

    def __init__(self, stages: Mapping[int, Stage], mail: Mailbox) -> None:
        self._stages, self._channel = stages, mail.channel
        self._placement, self._rank = mail.placement, mail.rank
        self._names: dict[Tie, list[str]] = {tie: [] for tie in mail.cut.ties}  # of weights, alike everywhere
        for name, tie in sorted(mail.cut.shared.items()):
            self._names[tie].append(name)
        self._shares: dict[_Key, dict[int, Tensor]] = {}  # by stage
        self._sums: dict[_Key, Tensor] = {}  # of a tie whose stages are all here
        self._unheard: dict[_Key, None] = {}  # told, in order
        self.norms: dict[int, Tensor] = {}
        """By version the norm of the whole gradient, where stages tell theirs."""

    def reduce(self, action: Action) -> None:
        """End a stage's batch, and tell its gradient to the other replicas, if there are some."""
        stage = self._stages[action.stage]
        stage.reduce()
        if len(ranks := self._placement[action.stage]) > 1 and stage.weights.live:
            more = stage.tells(ranks.index(self._rank), len(ranks))
            self._tell(
                (action.stage,), action, torch.cat([packed(stage.weights.live, stage.leaves_out), *more])
            )

    def tell_tied(self, action: Action) -> None:
        stage = self._stages[action.stage]
        for tie in self._ties(action):
            gradient = packed(self._weights(tie, stage), stage.leaves_out)
            self._tell(tie, action, gradient if self._speaks(action.stage) else torch.zeros_like(gradient))

    def tell_norm(self, action: Action) -> None:
        """Tell a stage's norm, at a place of its own: the sum is the same on every rank, to the last bit."""
        square = self._stages[action.stage].gradient_norm().double() ** 2
        numbers = square.new_zeros(len(self._placement))
        if self._speaks(action.stage):
            numbers[action.stage] = square
        self._tell(ALL, action, numbers)

    def _speaks(self, stage: int) -> bool:
        return self._placement[stage][0] == self._rank

    def _tell(self, tie: Tie, action: Action, numbers: Tensor) -> None:
        """Tell the other ranks of a tie, together with the last stage of it on this rank."""
        key = tie, action.version
        shares = self._shares.setdefault(key, {})
        shares[action.stage] = numbers
        self._unheard[key] = None
        here = self._here(tie)
        if len(shares) < len(here):
            return
        del self._shares[key]
        total = sum((shares[stage] for stage in here[1:]), shares[here[0]])
        if all(ranks == (self._rank,) for ranks in self._ranks(tie)):
            self._sums[key] = total
        else:
            self._channel.tell(tie, total)

    def hear(self, action: Action, waits: Callable[[], None]) -> None:
        """Wait for what an action needs of other stages, once; `waits` is called before."""
        ties: list[Tie] = [(action.stage,)]
        if action.op is not Op.TIE:
            ties += self._ties(action)
        if action.op is Op.STEP:
            ties.append(ALL)
        left = [(tie, action.version) for tie in ties if (tie, action.version) in self._unheard]
        for key in left:
            waits()
            sums = self._sums.pop(key) if key in self._sums else self._channel.hear(key[0])
            del self._unheard[key]
            if key[0] == ALL:
                self.norms[action.version] = sums.sum().sqrt()
                continue
            if key[0] == (action.stage,):
                stage = self._stages[action.stage]
                count = sum(numbers_of(weight).numel() + 1 for weight in stage.weights.live.values())
                unpack(stage.weights.live, sums[:count], copies=False)
                stage.hear(sums[:count])
                stage.hears(sums[count:])
                continue
            for stage in map(self._stages.__getitem__, self._here(key[0])):
                unpack(self._weights(key[0], stage), sums)
                stage.hear(sums)

    def tensors(self) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the tensors that wait for others, with the stages of their sum."""
        for (tie, _), shares in self._shares.items():
            yield from (((stage,), numbers) for stage, numbers in shares.items() if tie)
        yield from ((tie, sums) for (tie, _), sums in self._sums.items() if tie)

    def _ties(self, action: Action) -> list[Tie]:
        return [tie for tie in self._names if action.stage in tie]

    def _here(self, tie: Tie) -> list[int]:
        return [stage for stage in tie or range(len(self._placement)) if stage in self._stages]

    def _ranks(self, tie: Tie) -> Placement:
        return [self._placement[stage] for stage in tie] if tie else self._placement

    def _weights(self, tie: Tie, stage: Stage) -> dict[str, Tensor]:
        return {name: stage.weights.live[name] for name in self._names[tie]}


def packed(weights: Mapping[str, Tensor], skip: Tensor | None) -> Tensor:
    """Return the gradients of weights [n], and behind them for each weight a 1 if it has one.

    `skip`: 1 if the stage leaves this update out; then all must, which a NaN in these places says.
    """
    parts, there = [], []
    for name, weight in weights.items():
        if weight.grad is not None and weight.grad.layout is not torch.strided:
            raise TrainingStopped(
                f"the gradient of {name}, which ranks add up, is sparse: make the layer with sparse=False, "
                f"or keep the layers that share it in one stage by partition=, without replicas"
            )
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        parts.append(numbers_of(gradient).flatten())
        there.append(float(weight.grad is not None))
    # Filled on the device: a host's list would be copied to it, for which the host waits.
    counts = torch.cat([parts[0].new_full((1,), number) for number in there])
    if skip is not None:
        counts = torch.where(skip > 0, math.nan, counts)
    return torch.cat([*parts, counts])


def unpack(weights: Mapping[str, Tensor], sums: Tensor, copies: bool = True) -> None:
    """Set the gradients to sums of what `packed` returned, or without `copies` to views of it.

    The counts are looked at only for a weight without a gradient here: a GPU's host would wait for them.
    """
    sizes = [numbers_of(weight).numel() for weight in weights.values()]
    *parts, counts = torch.split(sums, [*sizes, len(sizes)])
    for weight, part, count in zip(weights.values(), parts, counts, strict=True):
        # A copy: clipping scales it in place, and another stage of the rank may take the same sums.
        if copies or weight.is_complex() or part.dtype != weight.dtype or not weight.is_contiguous():
            gradient = torch.empty_like(weight)
            numbers_of(gradient).copy_(part.view_as(numbers_of(gradient)))
        else:
            gradient = part.view_as(weight)
        weight.grad = gradient if weight.grad is not None or count.item() != 0 else None
