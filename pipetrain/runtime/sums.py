"""What the stages tell each other before an update: gradients of the weights that they share, and norms.

A rank tells the others once for all its stages, and goes on until an update needs what the others told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from pipetrain.runtime.channel import Channel
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.actions import Action, Op, Tie

WAITING = frozenset({Op.NORM, Op.STEP})  # for what other stages tell


class Sums:
    """The sums over stages in one window, each of a version that an update makes."""

    def __init__(self, stages: Mapping[int, Stage], channel: Channel, placement: Sequence[int]) -> None:
        self._stages = stages
        self._channel = channel
        self._placement = placement
        self._shares: dict[tuple[Tie, int], dict[int, Tensor]] = {}  # (tie, version) -> stage -> gradients
        self._sums: dict[tuple[Tie, int], Tensor] = {}  # of a tie whose stages are all here
        self._tied: set[tuple[Tie, int]] = set()  # of which the stages here have the sum
        self._squares: dict[int, dict[int, Tensor]] = {}  # version -> stage -> squared norm
        self._norms: dict[int, Tensor] = {}  # version -> of the whole gradient

    @property
    def has_norms(self) -> bool:
        """Whether stages have told their norms."""
        return bool(self._squares)

    def norm(self, version: int) -> Tensor | None:
        """Return the norm of the whole gradient, if the stages have told theirs."""
        return self._norms.get(version)

    def tell_tied(self, action: Action) -> None:
        """Tell the other ranks of each tie, together with the last stage of it on this rank."""
        for tie in self._stages[action.stage].shared.ties:
            mine = self._shares.setdefault((tie, action.version), {})
            mine[action.stage] = self._stages[action.stage].tied(tie)
            here = self._here(tie)
            if len(mine) == len(here):
                total = sum((mine[stage] for stage in here[1:]), mine[here[0]])
                del self._shares[tie, action.version]
                ranks = len({self._placement[stage] for stage in tie})
                if ranks == 1:
                    self._sums[tie, action.version] = total
                else:
                    self._channel.tell_tied(tie, here[0], total, ranks)

    def tell_norm(self, action: Action) -> None:
        """Tell the other ranks, together with the last NORM of this rank for a version."""
        squares = self._squares.setdefault(action.version, {})
        squares[action.stage] = self._stages[action.stage].squared_norm()
        if len(squares) == len(self._stages):
            self._channel.tell_norms(squares, len(self._placement))

    def hear(self, action: Action, waits: Callable[[], None]) -> bool:
        """Wait for what an action needs of other stages, once; return whether there was any.

        `waits` is called before.
        """
        version, heard = action.version, False
        for tie in self._stages[action.stage].shared.ties:
            if (tie, version) not in self._tied:
                waits()
                sums = self._sums.pop((tie, version), None)
                sums = self._channel.hear_tied(tie) if sums is None else sums
                for stage in self._here(tie):
                    self._stages[stage].add_tied(tie, sums)
                self._tied.add((tie, version))
                heard = True
        if action.op is Op.STEP and version in self._squares.keys() - self._norms.keys():
            waits()
            self._norms[version] = self._channel.hear_norms().sum().sqrt()
            heard = True
        return heard

    def held(self) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the tensors that wait for others, with the stages of their sum."""
        for shares in self._shares.values():
            yield from (((stage,), numbers) for stage, numbers in shares.items())
        yield from ((tie, sums) for (tie, _), sums in self._sums.items())

    def _here(self, tie: Tie) -> list[int]:
        return [stage for stage in tie if stage in self._stages]
