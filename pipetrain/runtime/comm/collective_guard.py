"""Collective calls of a Pipeline's ranks: an error of one is raised on all, and equal values are required.

Settings and programs are compared, and tensors are copied from rank 0.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from pipetrain.config.parameter_groups import title
from pipetrain.config.rate import LearningRate
from pipetrain.config.settings import Settings
from pipetrain.errors import ChannelError, ConfigError, Refused, TrainingStopped, of_all, one_line, unsaid
from pipetrain.exit import EXPECTED
from pipetrain.model.specs import bytes_of, specs_of
from pipetrain.runtime.comm.collectives import Ranks
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import Program, format_program

COMPARED_UPDATES = (0, 1, 2, 3, 10)  # updates at which learning rates are compared


class CollectiveGuard:
    """The ranks of a run, until an error of a collective call. `ended`: called after that."""

    def __init__(self, groups: ProcessGroups, ended: Callable[[], None]) -> None:
        self.groups = groups
        self._ended = ended
        self.stopped = ""
        """The error that ended the run."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a part that all ranks run: after an error this rank leaves the others for good."""
        try:
            yield
        except KeyboardInterrupt as stop:
            raise stop from None  # not from a connection that another rank closed at the same Ctrl-C
        except Exception as error:
            try:
                if not isinstance(error, ChannelError):
                    self.groups.check()  # the error that has ended the transfers is the cause
                raise
            except Exception as cause:
                self.stopped = one_line(cause) or type(cause).__name__
                self._ended()
                rank, why = self.groups.first_error(self.stopped)
                self.groups.abandon(self.stopped)
                if isinstance(cause, ChannelError) and rank != self.groups.world.rank:
                    raise unsaid(ChannelError(f"{self.stopped}; rank {rank} stopped: {why}")) from None
                raise

    def on_first(self, purpose: str, read: Callable[[], Any]) -> Any:
        """Return on every rank the result of `read` on rank 0, or raise its error on all."""
        result, error = attempt(read) if self.groups.world.rank == 0 else (None, None)
        with self():
            result, failure = self.groups.broadcast(purpose, [result, failure_of(error)])
        raise_failure(error, failure, 0)
        return result

    def on_all(self, purpose: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make` on each rank, or raise its error on all; one rank prints it."""
        result, error = attempt(make)
        if error is not None and self.stopped:
            raise error  # of a collective call
        try:
            with self():
                failures = self.groups.gather(purpose, failure_of(error))
        except ChannelError:
            raise_failure(error, None, 0)
            raise
        for rank, failure in enumerate(failures):
            if failure:
                if isinstance(error, EXPECTED) and rank != self.groups.world.rank:
                    error = unsaid(error)
                raise_failure(error, failure, rank)
        return result

    def abandon(self, error: BaseException | None) -> None:
        """Leave the other ranks, which may not call `close`, after an error of the program."""
        if self.groups.world.size > 1 and not self.stopped:
            self.stopped = one_line(error) if isinstance(error, Exception) else "interrupted"
            self.groups.abandon(self.stopped)

    def refuse_ended(self) -> None:
        """Refuse to go on after an error. Raises TrainingStopped."""
        if self.stopped:
            raise TrainingStopped(
                f"this Pipeline has ended with an error: {self.stopped}; start the program again, from a "
                f"checkpoint if there is one"
            )


Failure = tuple[str, bool]
"""An error of one rank as sent to the others: a sentence, and whether it refuses a user's value."""


def attempt(read: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of `read`, or its error."""
    try:
        return read(), None
    except Exception as error:  # a loader may raise anything
        return None, error


def failure_of(error: Exception | None) -> Failure | None:
    """Return an error in the form that is sent to the other ranks."""
    if error is None:
        return None
    return one_line(error) or type(error).__name__, isinstance(error, ConfigError)


def raise_failure(error: Exception | None, failure: Failure | None, rank: int) -> None:
    """Raise a rank's error: the error itself on that `rank`, the received failure on the others."""
    if error is not None:
        raise error
    if failure is not None:
        text, refused = failure
        raise unsaid((ConfigError if refused else TrainingStopped)(f"rank {rank} stopped: {text}"))


def values_to_compare(
    settings: Settings, optimizer: Optimizer, program: Program, rate: LearningRate
) -> dict[str, Any]:
    """Return what must be equal on all ranks: settings, program, rates, the optimizer with its options."""
    values: dict[str, Any] = {"optimizer": title(optimizer)}
    for number, group in enumerate(optimizer.param_groups):
        prefix = f"optimizer.{number}" if number else "optimizer"
        values |= {f"{prefix}.{key}": value for key, value in group.items() if key != "params"}
    with suppress(Exception):  # a user's function may not reach these updates
        for update in COMPARED_UPDATES:
            if rate.fraction is not None:
                values[f"lr_schedule({update})"] = rate.fraction(update)
    return {**settings.shared(), **values, "program": digest(program)}


def digest(program: Program) -> int:
    """Return a checksum of a program."""
    return zlib.crc32(format_program(program).encode())


def compare_ranks(ranks: Ranks, purpose: str, local: Mapping[str, Any]) -> None:
    """Refuse ranks with different values under a name. Raises Refused, on all of them."""
    first, *rest = ranks.gather(purpose, {key: json.dumps(v, default=_as_json) for key, v in local.items()})
    for rank, other_values in enumerate(rest, start=1):
        for name in first | other_values:
            expected, other = (texts.get(name, "nothing") for texts in (first, other_values))
            if expected != other:
                refusal = Refused(
                    f"rank {rank} has {name}={other}, and rank 0 has {expected}: give all ranks the same "
                    f"arguments, code and files"
                )
                raise of_all(refusal, ranks.world.rank)


def _as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor | np.generic) else type(value).__name__


def broadcast_from_rank0(groups: Ranks, purpose: str, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors in host memory with those of rank 0.

    Raises ConfigError, on all ranks, if names or forms differ.
    """
    compare_ranks(groups, purpose, {f"tensor {name}": str(specs_of([t])[0]) for name, t in tensors.items()})
    on_cpu = [t.data for t in tensors.values() if t.device.type == "cpu"]
    checksums = groups.gather(purpose, [zlib.crc32(bytes_of(t).numpy().data) for t in on_cpu])
    for tensor, *sums in zip(on_cpu, *checksums, strict=True):
        if len(set(sums)) > 1:
            groups.broadcast_tensor(purpose, tensor)
