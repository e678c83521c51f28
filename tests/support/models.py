"""Small models with all that a cut can meet, such as tuples and in-place layers; and codecs of one's own."""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_planned
from torch.utils.checkpoint import checkpoint

from pipetrain.codec import Codec
from pipetrain.model.chain import Pop, Stash
from pipetrain.model.specs import TensorSpec
from pipetrain.models import mlp

CLASSES = 10


Shrink = partial(nn.AvgPool2d, 8)  # [n, 3, 32, 32] -> [n, 3, 4, 4], so that the tests are quick


def keyed(names: dict[int, str], **arguments: Any) -> nn.Module:
    """An MLP, with keys that are numbers in the configuration."""
    assert list(names) == [1], names
    return mlp(**arguments)


class Lambda(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def flat(*more: nn.Module) -> list[nn.Module]:
    """[n, 3, 32, 32] -> [n, 12] in one layer."""
    return [nn.Sequential(Shrink(), nn.Flatten(), nn.Linear(48, 12), *more)]


class Fork(nn.Module):
    """x -> (layer(x), x): the boundary behind it is a tuple."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


class Through(Fork):
    """(x, skip) -> (layer(x), skip)."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(pair[0]), pair[1]


class Join(nn.Module):
    """(x, skip) -> x + skip."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class Recompute(nn.Sequential):
    """A layer that uses torch.utils.checkpoint inside; its parameters are called as without."""

    def __init__(self, layer: nn.Sequential, reentrant: bool) -> None:
        super().__init__(*layer)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def conv(width: int, norm: bool, entry: int | None = None) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(entry or width, width, 3, padding=1)]
    if norm:
        layers.append(nn.BatchNorm2d(width))
    return nn.Sequential(*layers, nn.Tanh())


def small(norm: bool = True, recompute: str = "", width: int = 4) -> nn.Sequential:
    """Ten layers. `recompute`: which form of torch.utils.checkpoint two of them use inside, if any."""

    def maybe(layer: nn.Sequential) -> nn.Module:
        return Recompute(layer, recompute == "reentrant") if recompute else layer

    return nn.Sequential(
        Shrink(),
        conv(width, norm, 3),
        maybe(conv(width, norm)),
        Fork(nn.Conv2d(width, width, 3, padding=1)),
        Through(conv(width, norm)),
        Join(),
        nn.ReLU(inplace=True),  # a cut before it must not let it write into what was sent
        maybe(conv(width, norm)),
        nn.Sequential(nn.Flatten(), nn.Linear(16 * width, 12)),
        nn.Sequential(nn.Tanh(), nn.Linear(12, CLASSES)),
    )


with_norm, without_norm = partial(small), partial(small, norm=False)


recomputing = partial(small, recompute="plain")


recomputing_reentrant = partial(small, norm=False, recompute="reentrant")


def dropping() -> nn.Sequential:
    """Draws random numbers as it trains, and counts statistics."""
    layers = nn.Dropout(0.3), nn.Linear(12, 12), nn.Dropout(0.3), nn.Linear(12, CLASSES)
    return nn.Sequential(*flat(nn.BatchNorm1d(12)), *layers)


class Pair(Fork):
    """x -> (layer(x), 2 x)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), 2 * x


class Gather(nn.Module):
    """Any number of tensors of one shape -> the tanh of their sum, the later ones scaled down."""

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.tanh(sum(t / number for number, t in enumerate(tensors, 1)))


STASHED = 2  # the layer of the outer skip, in these


def skipping(dropout: float = 0.0, norm: bool = True, recompute: str = "", width: int = 4) -> nn.Sequential:
    """Skips one inside the other, as in a U-Net; the inner one is a pair of tensors.

    `recompute`: which form of torch.utils.checkpoint a layer that draws uses inside, if any.
    """
    outer, inner = Stash(), Stash()
    drops = nn.Sequential(*conv(width, False), nn.Dropout(dropout))
    if recompute:
        drops = Recompute(drops, recompute == "reentrant")
    layers = [
        *(Shrink(), conv(width, norm, 3), outer, drops),
        *(Pair(nn.Conv2d(width, width, 3, padding=1)), inner, Gather(), conv(width, norm), Pop(inner)),
        *(Gather(), nn.Sequential(nn.Dropout(dropout), conv(width, norm)), Pop(outer), Join()),
        *(nn.Sequential(nn.Flatten(), nn.Linear(16 * width, 12)), nn.Linear(12, CLASSES)),
    ]
    return nn.Sequential(*layers)


def skipping_struck() -> nn.Sequential:
    """An infinity in one microbatch, in what is kept for later."""
    model = skipping()
    model[1].append(Spoil(6, once=True))
    return model


def flat_then(*layers: nn.Module) -> nn.Sequential:
    """Layers between [n, 12] and [n, 12]."""
    return nn.Sequential(*flat(), *layers, nn.Linear(12, CLASSES))


def explode() -> nn.Sequential:
    """Its loss is not finite."""
    return nn.Sequential(*flat_then(), Lambda(lambda x: x * float("inf")))


def block() -> None:
    """Wait in C++ for good, as for a compiler or another rank: Python runs no handler meanwhile."""
    print("blocked", flush=True)
    dist.HashStore().wait(["never"], timedelta(days=1))


class Blocked(nn.Module):
    """A module that is traced, which takes for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3072, 10)

    def forward(self, x: Tensor) -> Tensor:
        block()
        return self.head(x.flatten(1))


class Fault(nn.Module):
    """Hands on what it is given, until this process's rank has its forward number `at` in training.

    `sleep`: it does so every time, after `at` milliseconds, and says so after SAID of them; after HELD of
    them it waits as long as there is a file `hold`.
    """

    SAID, HELD = 12, 120

    def __init__(self, kind: str, rank: int, at: int) -> None:
        super().__init__()
        self._due = at if int(os.environ.get("RANK", "0")) == rank else -1
        self._kind = kind
        self._done = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not is_planned():
            self._done += 1
            if self._kind == "sleep":
                time.sleep(max(self._due, 0) / 1000)
                if self._due > 0 and self._done == self.SAID:
                    print("slept", self._done, "times", flush=True)
                while self._due > 0 and self._done == self.HELD and Path("hold").exists():
                    time.sleep(0.01)
            elif self._done == self._due:
                self._strike()
        return x

    def _strike(self) -> None:
        if self._kind in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, self._kind))
        elif self._kind == "exit":
            os._exit(7)
        elif self._kind == "memory":
            torch.empty(2**60)
        elif self._kind == "block":
            block()
        else:
            raise ValueError("this layer had enough")


class Spoil(nn.Module):
    """Hands on what it is given; from its forward number `at` on, its output or its gradient is nan.

    `once`: in that forward alone.
    """

    def __init__(self, at: int, gradient: bool = False, once: bool = False) -> None:
        super().__init__()
        self._left, self._gradient, self._once = at, gradient, once

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or is_planned():
            return x
        self._left -= 1
        if self._left > 0 or (self._once and self._left < 0):
            return x
        if not self._gradient:
            return x * float("nan")
        x = x * 1
        x.register_hook(lambda grad: grad * float("nan"))
        return x


def spoilt(layer: int, at: int, gradient: bool) -> nn.Sequential:
    """Six layers, one of which is to blame."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Sequential(Shrink(), nn.Flatten()))
    for number in range(1, 5):
        spoil = [Spoil(at, gradient)] if number == layer else []
        layers[f"layer{number}"] = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), *spoil)
    return nn.Sequential(layers | {"head": nn.Linear(48, CLASSES)})


def faulty(kind: str, rank: int, at: int) -> nn.Sequential:
    """Two stages' worth of layers, one of which fails on one rank. Cut it before layer 2."""
    return nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(),
            first=nn.Sequential(nn.Linear(3072, 16), Fault(kind, rank, at)),
            second=nn.Sequential(nn.Linear(16, 16), Fault(kind, rank, at)),
            head=nn.Linear(16, 10),
        )
    )


def not_a_module() -> list[nn.Module]:
    return [nn.Linear(3, 3)]


def tied() -> nn.Sequential:
    """Two layers that share a weight, far apart."""
    first, last = nn.Linear(48, 48), nn.Linear(48, 48)
    last.weight = first.weight
    layers = nn.Sequential(Shrink(), nn.Flatten()), first, nn.Tanh(), last, nn.Linear(48, CLASSES)
    return nn.Sequential(*layers)


def reused() -> nn.Sequential:
    """One activation object between all layers, as people write it."""
    act = nn.Tanh()
    return flat_then(act, nn.Linear(12, 12), act, nn.Linear(12, 12), act)


def shared_statistics() -> nn.Sequential:
    """Two layers that count into one BatchNorm."""
    norm = nn.BatchNorm1d(12, affine=False)
    second = nn.Sequential(nn.Linear(12, 12), norm)
    return nn.Sequential(*flat(norm), nn.Linear(12, 12), second, nn.Linear(12, CLASSES))


def in_place_behind_a_view() -> nn.Sequential:
    """The fourth layer writes into what the second made, if a cut does not come between."""
    views = nn.Flatten(), nn.Identity(), nn.ReLU(inplace=True)
    return nn.Sequential(Shrink(), nn.Conv2d(3, 4, 3, padding=1), *views, nn.Linear(64, CLASSES))


class Caching(nn.Module):
    """Makes a table in its first forward and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return x * self.table


def caching() -> nn.Sequential:
    return flat_then(nn.Identity(), Caching(), nn.Linear(12, 12))


class WiderInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1) if self.training else x


def wider_in_training() -> nn.Sequential:
    return flat_then(WiderInTraining(), Lambda(lambda x: x[:, :12]))


def fickle() -> nn.Sequential:
    """A layer returns something else once it is no longer planned."""
    return flat_then(Lambda(lambda x: x if is_planned() else x[:, :6]))


def frozen_end() -> nn.Sequential:
    """The last stage may have nothing to train; what is before it has."""
    model = without_norm()
    for parameter in model[-2:].parameters():
        parameter.requires_grad_(False)
    return model


def hooked() -> nn.Sequential:
    model = without_norm()
    next(model.parameters()).register_hook(lambda grad: grad * 0)
    return model


def complex_inside() -> nn.Sequential:
    return flat_then(Lambda(torch.fft.rfft), Lambda(torch.fft.irfft))


class Same(Codec):
    """Changes nothing, but is not the identity that needs no coded channel."""

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (spec,)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.clone(),)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        return tensors[0]


class Signs(Codec):
    """A bool a number: whether it is positive."""

    error_feedback = True

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec(spec.shape, torch.bool),)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor > 0,)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        return (tensors[0].to(spec.dtype) * 2 - 1) * self._scale


class Raises(Same):
    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        raise ZeroDivisionError("mine")


class Lies(Same):
    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec(spec.shape, torch.float16),)


class Forgets(Lies):
    """Leaves a message in the dtype in which it travelled."""

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.half(),)
