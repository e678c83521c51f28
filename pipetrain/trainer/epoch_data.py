"""The batches of epochs over a training's loaders, from where a checkpoint was saved.

A loader is read again from the beginning of the epoch, in the state that it had then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipetrain.checkpoint.files import Position
from pipetrain.checkpoint.rank_state import restore_random
from pipetrain.checkpoint.resume import Source
from pipetrain.data.loader_facts import parts_of
from pipetrain.data.loader_state import LoaderStates
from pipetrain.data.reader import Loader
from pipetrain.data.sampling import Sampled
from pipetrain.records.run_folder import RunFolder
from pipetrain.runtime.microbatch_feed import Batches
from pipetrain.trainer.training import Training

EPOCH_RANDOM = "random/0/epoch"  # of rank 0 at the beginning of an epoch
LOADERS = "random/0/loaders"  # what its samples follow from, then or, at the end of one, now


class EpochData:
    """Loaders, or samples by number, of which a run trains and evaluates epochs; the first decides the plan.

    `test`: None where nothing is evaluated. `batches`: of an epoch. `run_folder`: where checkpoints are, if
    there are any. `start`: where the first epoch begins.
    """

    def __init__(
        self,
        training: Training,
        train: Loader | Sampled,
        test: Loader | Sampled | None,
        batches: int,
        run_folder: RunFolder | None,
    ) -> None:
        self._training, self._train, self._test, self.batches = training, train, test, batches
        self.source = run_folder.source if run_folder else None
        self.start = self.source.manifest.position.placed(batches) if self.source else Position()
        keeps = run_folder and not training.rank and not isinstance(train, Sampled)
        self._states = LoaderStates(train=train, test=test) if keeps else None
        self._random: dict[str, Tensor] = {}  # at the beginning of the epoch
        self._ahead: Batches | None = None
        if isinstance(train, Sampled):
            assert isinstance(test, Sampled)
            training.begin_by_number(train, test)
        if self.source is not None:
            self._go_on(self.source)
        if not isinstance(train, Sampled):
            self._ahead = self.train(self.start.epoch, self.start.batch)

    def _go_on(self, source: Source) -> None:
        """Restore the random state with which the epoch began that the checkpoint is of."""
        tensors = source.tensors()

        def restore() -> None:
            if self._states is not None and LOADERS in tensors:
                with source.used():
                    self._states.restore(tensors[LOADERS])

        self._training.guard.on_first("the loaders' states", restore)
        restore_random(source, self._training.groups)
        if self.start.batch and EPOCH_RANDOM in tensors and not self._training.rank:
            torch.set_rng_state(tensors[EPOCH_RANDOM])

    def train(self, epoch: int, done: int) -> Batches:
        """Return the batches of an epoch, the first one is 0, after the first `done`."""
        begun, self._ahead = self._ahead, None
        if begun is not None:
            return begun
        for part in parts_of(self._train).values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        self._random = self._states_now()
        return self._training.batches(self._train, trains=True, epoch=epoch, done=done)

    def evaluate(self) -> Batches:
        """Return the batches of an evaluation."""
        assert self._test is not None, "nothing is evaluated"
        return self._training.batches(self._test)

    def random(self, done: int) -> dict[str, Tensor]:
        """Return the random states from which the epoch's batches come again, after the first `done`."""
        return self._random if done else self._states_now()

    def _states_now(self) -> dict[str, Tensor]:
        if self._states is None:
            return {}
        return {EPOCH_RANDOM: torch.get_rng_state(), LOADERS: self._states.read()}
