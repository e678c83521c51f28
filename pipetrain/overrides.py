"""How a person spells an override, and how Hydra wants it.

It imports nothing of ours, and so not torch: the comparison, which must not, reads overrides too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Each may be a plain value or a mapping. Hydra lets a mapping's key replace a plain value only with a plus.
_EITHER = re.compile(r"(partition\.profile|trace\.windows)=")
# A choice from one group for each of two places, which Hydra spells GROUP@PLACE=NAME.
_CODEC = re.compile(r"^([+~]*)(codec\.(?:forward|backward)=)")
# What a `_target_` takes is for that to say: a key of it may be new.
_ARGUMENT = re.compile(r"(model|schedule|optim|codec\.(forward|backward)|data\.(source|augment))\.[^=]+=")


def as_hydra(words: Sequence[str]) -> list[str]:
    """Return a command line's words as Hydra wants them."""
    return [_CODEC.sub(r"\1codec@\2", _plus(word) + word) for word in words]


def _plus(word: str) -> str:
    return "++" if _ARGUMENT.match(word) else "+" if _EITHER.match(word) else ""


def quoted(value: str) -> str:
    """Quote a value for Hydra's override grammar, where it has to be."""
    if re.fullmatch(r"[\w./-]+", value, re.ASCII):
        return value
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"
