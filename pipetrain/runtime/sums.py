"""What the stages tell each other before an update: gradients of the weights that they share, and norms.

A rank tells the others once for all its stages, and goes on until an update needs what the others told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from pipetrain.runtime.channel import ALL
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.actions import Action, Op, Tie

WAITING = frozenset({Op.NORM, Op.STEP})  # for what other stages tell
_Key = tuple[Tie, int]  # with the version that an update makes


class Sums:
    """The sums over stages in one window."""

    def __init__(self, stages: Mapping[int, Stage], mail: Mailbox) -> None:
        self._stages, self._channel, self._placement = stages, mail.channel, mail.placement
        self._shares: dict[_Key, dict[int, Tensor]] = {}  # by stage
        self._sums: dict[_Key, Tensor] = {}  # of a tie whose stages are all here
        self._unheard: dict[_Key, None] = {}  # told, in order
        self.norms: dict[int, Tensor] = {}
        """By version the norm of the whole gradient, where stages tell theirs."""

    def tell_tied(self, action: Action) -> None:
        stage = self._stages[action.stage]
        for tie in stage.shared.ties:
            self._tell(tie, action, stage.tied(tie))

    def tell_norm(self, action: Action) -> None:
        """Tell a stage's norm, at a place of its own: the sum is the same on every rank, to the last bit."""
        square = self._stages[action.stage].gradient_norm().double() ** 2
        numbers = square.new_zeros(len(self._placement))
        numbers[action.stage] = square
        self._tell(ALL, action, numbers)

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
        if len(here) == len(tie or self._placement):
            self._sums[key] = total
        else:
            self._channel.tell(tie, total)

    def hear(self, action: Action, waits: Callable[[], None]) -> bool:
        """Wait for what an action needs of other stages, once; return whether there was any.

        `waits` is called before.
        """
        ties = [*self._stages[action.stage].shared.ties, *([ALL] if action.op is Op.STEP else [])]
        left = [(tie, action.version) for tie in ties if (tie, action.version) in self._unheard]
        for key in left:
            waits()
            sums = self._sums.pop(key) if key in self._sums else self._channel.hear(key[0])
            del self._unheard[key]
            if key[0] == ALL:
                self.norms[action.version] = sums.sum().sqrt()
                continue
            for stage in self._here(key[0]):
                self._stages[stage].add_tied(key[0], sums)
        return bool(left)

    def held(self) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the tensors that wait for others, with the stages of their sum."""
        for (tie, _), shares in self._shares.items():
            yield from (((stage,), numbers) for stage, numbers in shares.items() if tie)
        yield from ((tie, sums) for (tie, _), sums in self._sums.items() if tie)

    def _here(self, tie: Tie) -> list[int]:
        return [stage for stage in tie or range(len(self._placement)) if stage in self._stages]
