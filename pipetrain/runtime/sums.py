"""What the stages tell each other before an update: gradients of the weights that they share, and norms.

A rank tells the others once for all its stages, and goes on until an update needs what the others told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from pipetrain.runtime.channel import ALL, Channel
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.actions import Action, Op, Tie

WAITING = frozenset({Op.NORM, Op.STEP})  # for what other stages tell


class Sums:
    """The sums over stages in one window, each of a version that an update makes."""

    def __init__(self, stages: Mapping[int, Stage], channel: Channel, placement: Sequence[int]) -> None:
        self._stages = stages
        self._channel = channel
        self._placement = placement
        self._shares: dict[tuple[Tie, int], dict[int, Tensor]] = {}  # (tie, version) -> stage -> numbers
        self._sums: dict[tuple[Tie, int], Tensor] = {}  # of a tie whose stages are all here
        self._told: set[tuple[Tie, int]] = set()
        self._heard: set[tuple[Tie, int]] = set()
        self._norms: dict[int, Tensor] = {}  # version -> of the whole gradient

    @property
    def has_norms(self) -> bool:
        return bool(self._norms)

    def norm(self, version: int) -> Tensor | None:
        """Return the norm of the whole gradient, if the stages have told theirs."""
        return self._norms.get(version)

    def tell_tied(self, action: Action) -> None:
        """Tell a stage's gradient of the weights of each of its ties."""
        stage = self._stages[action.stage]
        for tie in stage.shared.ties:
            self._tell(tie, action, stage.tied(tie))

    def tell_norm(self, action: Action) -> None:
        """Tell a stage's norm, at a place of its own: the sum is the same on every rank, to the last bit."""
        square = self._stages[action.stage].squared_norm()
        numbers = square.new_zeros(len(self._placement))
        numbers[action.stage] = square
        self._tell(ALL, action, numbers)

    def _tell(self, tie: Tie, action: Action, numbers: Tensor) -> None:
        """Tell the other ranks of a tie, together with the last stage of it on this rank."""
        key = tie, action.version
        shares = self._shares.setdefault(key, {})
        shares[action.stage] = numbers
        self._told.add(key)
        here = self._here(tie)
        if len(shares) < len(here):
            return
        total = sum((shares[stage] for stage in here[1:]), shares[here[0]])
        del self._shares[key]
        if len(here) == len(tie or self._placement):
            self._sums[key] = total
        else:
            self._channel.tell(tie, total)

    def hear(self, action: Action, waits: Callable[[], None]) -> bool:
        """Wait for what an action needs of other stages, once; return whether there was any.

        `waits` is called before.
        """
        keys = [(tie, action.version) for tie in self._stages[action.stage].shared.ties]
        if action.op is Op.STEP and (ALL, action.version) in self._told:
            keys.append((ALL, action.version))
        left = [key for key in keys if key not in self._heard]
        for tie, version in left:
            waits()
            sums = self._sums.pop((tie, version), None)
            sums = self._channel.hear(tie) if sums is None else sums
            self._heard.add((tie, version))
            if tie == ALL:
                self._norms[version] = sums.sum().sqrt()
                continue
            for stage in self._here(tie):
                self._stages[stage].add_tied(tie, sums)
        return bool(left)

    def held(self) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the tensors that wait for others, with the stages of their sum."""
        for (tie, _), shares in self._shares.items():
            yield from (((stage,), numbers) for stage, numbers in shares.items() if tie)
        yield from ((tie, sums) for (tie, _), sums in self._sums.items() if tie)

    def _here(self, tie: Tie) -> list[int]:
        return [stage for stage in tie or range(len(self._placement)) if stage in self._stages]
