"""Writes the Python code of a slice of a traced model, and compiles it.

torch.fx could write it too; this code looks up no operator, reads each weight straight from its module (so
that another version can be put in its place) and seeds the generators before a layer that draws.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipetrain.network import draws
from pipetrain.network.tracing.operations import Autocast, Choice, Constant, Device, Held, Op, select

Function = Callable[..., tuple[Tensor, ...]]
_numbers = itertools.count()


class Code:
    """The code of a function of tensors, for one mode. `holders`: the place of each weight's module."""

    def __init__(self, name: str, training: bool, holders: dict[str, int]) -> None:
        self._name = name
        self._training = training
        self._holders = holders
        self._lines: list[tuple[str, list[str], list[str]]] = []  # code, names used, names made
        self._names: dict[Op, str] = {}
        self._globals: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._inputs: list[str] = []

    def __contains__(self, op: Op) -> bool:
        return op in self._names

    def enter(self, op: Op) -> None:
        """Add a parameter of the function, the value of an operation."""
        self._names[op] = f"x{len(self._inputs)}"
        self._inputs.append(self._names[op])

    def begin(self, layer: int) -> None:
        """Seed the generators for a layer."""
        self._lines.append((f"{self._global(draws.begin)}({layer})", [], []))

    def size(self, op: Op, of: Op, dimension: int, times: int) -> None:
        """Make the value of an operation from the size of a tensor."""
        name = self._names[op] = f"v{len(self._names)}"
        used: list[str] = []
        tensor = self._text(of, used)
        factor = f" * {times}" if times != 1 else ""
        self._lines.append((f"{name} = {tensor}.size({dimension}){factor}", used, [name]))

    def run(self, op: Op) -> None:
        """Run an operation."""
        used: list[str] = []
        name = f"v{len(self._names)}"
        if select(op):
            choice = op.args[0]
            code = self._text(choice, used)
        else:
            given = [self._text(arg, used) for arg in op.args]
            given += [f"{key}={self._text(arg, used)}" for key, arg in op.kwargs.items()]
            function = self._global(op.target)
            if op.autocast is not None:
                given[:0] = [self._global(op.autocast), function]
                function = self._global(_in_region)
            code = f"{function}({', '.join(given)})"
        self._names[op] = name
        place = f"  # {op.calls[-1].path if op.calls else 'model'} {op.where}".rstrip()
        self._lines.append((f"{name} = {code}{place}", used, [name]))

    def compile(self, leaves: Sequence[Op]) -> Function:
        """Return the function, of the module and tensors, that returns the values of `leaves`."""
        used: list[str] = []
        result = "".join(f"{self._text(leaf, used)}, " for leaf in leaves)
        lines = [*self._lines, (f"return ({result})", used, [])]
        last = {name: index for index, (_, names, made) in enumerate(lines) for name in (*names, *made)}
        body = [f"def forward(self, {', '.join(self._inputs)}):"]
        if any("held[" in code for code, _, _ in lines):
            body.append("    held = self.holders")
        if any("device" in names for _, names, _ in lines):
            body.append(f"    device = {self._device()}")
        ended: dict[int, list[str]] = {}
        for name, index in last.items():
            ended.setdefault(index, []).append(name)
        for index, (code, _, _) in enumerate(lines):
            body.append(f"    {code}")
            dead = [name for name in ended.get(index, ()) if name != "device"]
            if dead and index < len(lines) - 1:
                body.append(f"    del {', '.join(dead)}")
        source = "\n".join(body) + "\n"
        file = f"<{self._name} {next(_numbers)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        space = dict(self._globals)
        exec(compile(source, file, "exec"), space)
        function: Function = space["forward"]
        return function

    def _device(self) -> str:
        if self._inputs:
            return f"{self._inputs[0]}.device"
        return f"{self._global(_device_of)}(self)"

    def _text(self, value: Any, used: list[str]) -> str:
        """Return the code of an argument, and add the names that it uses."""
        if isinstance(value, Op):
            if isinstance(value.source, Held):
                owner, _, key = value.source.name.rpartition(".")
                kind = "_parameters" if value.source.parameter else "_buffers"
                return f"held[{self._holders[owner]}].{kind}[{key!r}]"
            if isinstance(value.source, Constant):
                return f"self.constants.tensors[{value.source.name!r}]"
            used.append(self._names[value])
            return self._names[value]
        if isinstance(value, Choice):
            return self._text(value.training if self._training else value.evaluation, used)
        if isinstance(value, Device):
            used.append("device")
            return "device"
        if type(value) is tuple or isinstance(value, list):
            inside = ", ".join(self._text(item, used) for item in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
        if type(value) is slice:
            return f"slice({', '.join(self._text(v, used) for v in (value.start, value.stop, value.step))})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._global(value)

    def _global(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"g{len(self._known)}"
            self._globals[name] = value
        return name


def _in_region(region: Autocast, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operation in its autocast region, on the device of its first tensor."""
    device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
    if not region.enabled and not torch.is_autocast_enabled(device):
        return function(*args, **kwargs)
    with torch.autocast(device, region.dtype, enabled=region.enabled):
        return function(*args, **kwargs)


def _device_of(module: torch.nn.Module) -> torch.device:
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device
