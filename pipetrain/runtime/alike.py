"""What is alike on all ranks: settings and programs are compared, and tensors are taken from rank 0."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from pipetrain.errors import Refused
from pipetrain.network.values import bytes_of, specs_of
from pipetrain.rate import Rate
from pipetrain.runtime.ranks import Ranks
from pipetrain.schedule.actions import Program, format_program
from pipetrain.settings import Settings

COMPARED_UPDATES = (0, 1, 2, 3, 10)  # whose learning rates are compared


def conditions(settings: Settings, optimizer: Optimizer, program: Program, rate: Rate) -> dict[str, Any]:
    """Return what must be the same on all ranks: settings, program, rates, the optimizer with its options."""
    found: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        of = f"optimizer.{number}" if number else "optimizer"
        found |= {f"{of}.{key}": value for key, value in group.items() if key != "params"}
    with suppress(Exception):  # a user's function may end before
        for update in COMPARED_UPDATES:
            found[f"lr_schedule({update})"] = rate(update)
    return {**settings.shared(), **found, "program": digest(program)}


def digest(program: Program) -> int:
    """Return a checksum of a program."""
    return zlib.crc32(format_program(program).encode())


def prove_same(ranks: Ranks, what: str, mine: Mapping[str, Any]) -> None:
    """Refuse ranks that have different values under a name. Raises Refused, on all of them alike."""
    first, *others = ranks.gather(what, {key: json.dumps(v, default=_in_words) for key, v in mine.items()})
    for rank, theirs in enumerate(others, start=1):
        for name in first | theirs:
            expected, other = (texts.get(name, "nothing") for texts in (first, theirs))
            if expected != other:
                raise Refused(
                    f"rank {rank} has {name}={other}, and rank 0 has {expected}: give all ranks the same "
                    f"arguments, code and files"
                )


def _in_words(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor | np.generic) else type(value).__name__


def level(mesh: Ranks, what: str, tensors: Mapping[str, Tensor]) -> None:
    """Give tensors in host memory the numbers that they have on rank 0.

    Raises ConfigError, on all ranks alike, if they have other names or forms.
    """
    prove_same(mesh, what, {f"tensor {name}": str(specs_of([t])[0]) for name, t in tensors.items()})
    held = [t.data for t in tensors.values() if t.device.type == "cpu"]
    told = mesh.gather(what, [zlib.crc32(bytes_of(t).numpy().data) for t in held])
    for tensor, *sums in zip(held, *told, strict=True):
        if len(set(sums)) > 1:
            mesh.copy_from_first(what, tensor)
