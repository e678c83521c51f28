"""What a row of a comparison is: a method, which is a name and the overrides that make it.

A schedule alone is the method of its own name. What goes with a schedule, a codec or a rate, is a method
too, so that everything the command line can say can be compared, and nothing here needs to know what it
means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipetrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Method:
    """A name, such as `fbp + topk`, and its overrides, such as `schedule=fbp codec.backward=topk`."""

    name: str
    overrides: tuple[str, ...]

    @property
    def slug(self) -> str:
        """The name as a part of a folder's: `fbp_topk`. A schedule's is the schedule."""
        return re.sub(r"[^\w.]+", "_", self.name, flags=re.ASCII).strip("._")

    @property
    def schedule(self) -> str:
        """The schedule among the overrides."""
        return next(value for name, value in map(split, self.overrides) if name == "schedule")


def split(word: str) -> tuple[str, str]:
    """Return an override's key, without what says to add or remove it, and its value."""
    name, _, value = word.partition("=")
    return name.lstrip("+~"), value


def of_schedule(name: str) -> Method:
    """Return the method that is a schedule alone."""
    return Method(name, (f"schedule={name}",))


def parse(text: str, known: Iterable[Method] = ()) -> Method:
    """Read `NAME: OVERRIDES`, or the NAME of a known method. Raises ConfigError."""
    name, colon, words = (part.strip() for part in text.partition(":"))
    if not colon:
        by_name = {method.name: method for method in known}
        if name in by_name:
            return by_name[name]
        choices = f"choose from {', '.join(by_name)}, or say" if by_name else "say"
        raise ConfigError(f"--method: there is no {name}; {choices} what it is: '{name}: schedule=...'")
    return make(name, words.split(), f"--method {name}")


def make(name: str, overrides: Sequence[str], where: str) -> Method:
    """Make a method of what a person wrote. Raises ConfigError where it is none, which says `where`."""
    for word in overrides:
        if word.startswith("-") or "=" not in word:
            raise ConfigError(f"{where}: {word} is no override, such as codec.backward=int8")
    method = Method(name, tuple(overrides))
    if not method.slug:
        raise ConfigError(f"{where}: a method needs a name with letters or digits, for its folder")
    keys = [key for key, _ in map(split, overrides)]
    if keys.count("schedule") != 1:
        raise ConfigError(f"{where}: a method needs one schedule=NAME among its overrides")
    for key in ("seed", "model", "run_dir"):
        if key in keys:
            raise ConfigError(f"{where}: {key} is not the method's to say; leave {key}= out of it")
    return method


def refuse_alike(methods: Sequence[Method]) -> None:
    """Refuse two methods that one folder, or one row, would have to hold. Raises ConfigError."""
    seen: dict[str, Method] = {}
    for method in methods:
        other = seen.setdefault(method.slug.lower(), method)
        if other is not method:
            same = other.name == method.name
            raise ConfigError(
                f"the method {method.name} stands there twice"
                if same
                else f"the methods {other.name} and {method.name} would share the folder {method.slug}; "
                f"rename one"
            )
