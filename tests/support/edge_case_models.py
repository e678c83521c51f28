"""Models at the edge of what a pipeline can see: whatever it does with them, one process must do the same.

Each of the first has a place between two layers where it can be cut so that the edge lies in the open. The
forward of the others is hard to run again: what it depends on changes, or is overwritten.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_planned

from tests.support.models import CLASSES, Lambda, Recompute, Shrink, conv


def ended(*layers: nn.Module, width: int = 12) -> nn.Sequential:
    """48 numbers an image, the layers, a head: cut it before [2] or [3]."""
    flat = nn.Sequential(Shrink(), nn.Flatten(), nn.Linear(48, width), nn.Tanh())
    return nn.Sequential(flat, *layers, nn.Linear(width, CLASSES))


def attend(pair: tuple[Tensor, Tensor]) -> Tensor:
    """Its mask has zeros, whose logarithm has no gradient that could be used."""
    x, mask = pair
    return torch.softmax(x[:, None, :] + mask.log(), -1) @ x[:, :, None]


def masked() -> nn.Sequential:
    """A float mask crosses the cut, that knows nothing of weights."""
    mask = Lambda(lambda x: (x, torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()))
    return ended(nn.Linear(12, 12), mask, Lambda(attend), nn.Flatten())


class Aside(nn.Module):
    """x -> (x, what a layer makes of it, and nobody uses)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.layer(x)


def unused() -> nn.Sequential:
    return ended(Aside(), Lambda(lambda pair: pair[0]), nn.Linear(12, 12))


class Half(torch.autograd.Function):
    """Hands on both of two tensors, and a gradient to the first alone."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def half_a_gradient() -> nn.Sequential:
    return ended(Aside(), Lambda(lambda pair: Half.apply(*pair)), nn.Linear(12, 12))


class Counts(nn.Module):
    """x -> (x, its own buffer), which it changes at each forward of training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 12, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.seen.mul_(0.5).add_(x.detach().mean(0, keepdim=True))
        return x, self.seen


def hands_on_a_buffer() -> nn.Sequential:
    return ended(Counts(), nn.Identity(), Lambda(lambda pair: pair[0] * (1 + pair[1])), nn.Linear(12, 12))


class Recurrent(nn.Module):
    """nn.LSTM keeps its weights in a list beside the registries."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unflatten(1, (3, 4)))[0][:, -2:].flatten(1)


def recurrent() -> nn.Sequential:
    return ended(nn.Linear(12, 12), Recurrent(), nn.Linear(12, 12))


class Tied(nn.Module):
    """Multiplies by another layer's weight, which it has in a list."""

    def __init__(self, weight: nn.Parameter, listed: bool) -> None:
        super().__init__()
        self.tied = [weight] if listed else nn.ParameterList([weight])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.tied[0].T


def tied(listed: bool = True) -> nn.Sequential:
    first = nn.Linear(12, 12)
    return ended(first, nn.Tanh(), Tied(first.weight, listed), nn.Linear(12, 12))


def tied_registered() -> nn.Sequential:
    return tied(listed=False)


class Fourier(nn.Module):
    """Filters with complex weights after a rotation by a complex table."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.register_buffer("table", torch.polar(torch.ones(7), torch.arange(7.0)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.table * self.weight, n=12)


def fourier() -> nn.Sequential:
    return ended(nn.Linear(12, 12), Fourier(), nn.Linear(12, 12))


def fourier_shared() -> nn.Sequential:
    first, second = Fourier(), Fourier()
    second.weight = first.weight
    return ended(first, nn.Tanh(), second)


def unsaved() -> nn.Sequential:
    """A table that a layer makes itself, and leaves out of its state_dict."""
    layer = nn.Linear(12, 12)
    layer.register_buffer("table", torch.arange(12.0), persistent=False)
    return ended(layer, nn.Identity(), nn.Linear(12, 12))


class Words(nn.Module):
    """Looks up what it is given, taken for whole numbers, in a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 12, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((4 * x.detach()).long() % 16).mean(1)


def sparse() -> nn.Sequential:
    return ended(nn.Linear(12, 12), Words(), nn.Linear(12, 12))


class Reads(nn.Module):
    """Decides by a number that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if x[0, 0].item() > 0 else x


def reads() -> nn.Sequential:
    return ended(nn.BatchNorm1d(12, momentum=None), Reads(), nn.Linear(12, 12))


class Strikes(nn.Module):
    """Its input times infinity in some forwards of training, counted from 1."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.left = list(at)
        self.done = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not is_planned():
            self.done += 1
            if self.done in self.left:
                return x * float("inf")
        return x


def struck() -> nn.Sequential:
    """Four layers, and infinities at the last one, so that no stage has a gradient of these batches."""
    return ended(nn.Linear(12, 12), nn.Sequential(nn.Tanh(), Strikes(1, 5, 10, 11)))


def strikes() -> nn.Sequential:
    """Statistics before and behind a cut, and a stage that has them and nothing to train."""
    return ended(
        nn.Sequential(Strikes(7, 24, 25), nn.BatchNorm1d(12)),
        nn.Linear(12, 12),
        nn.BatchNorm1d(12, affine=False),
        nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)),
    )


class Struck(nn.Module):
    """Makes infinities in one microbatch of eight, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1 / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.drop(torch.ones((), dtype=x.dtype)) if self.training else x


class Scaled(nn.Module):
    """Draws a factor from Python's, NumPy's, and torch's generator: the last one behind a condition."""

    def forward(self, x: Tensor) -> Tensor:
        factor = random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5)
        return x * factor * (torch.rand(()) + 0.5 if factor > 1 else 1.0)


class Counting(nn.Module):
    """Depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Differentiating(nn.Module):
    """Adds the gradient of its own energy."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(y.pow(4).sum(), y)
        return x + grad


def _model(*middle: nn.Module) -> nn.Sequential:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
    return nn.Sequential(Shrink(), conv(4, True, 3), *middle, flat, nn.Linear(12, CLASSES))


def everything(struck: bool = False) -> nn.Sequential:
    """Nine layers in the middle, with one weight in two of them.

    `spectral_norm` has two buffers that each forward changes, and computes with. What overwrites the results
    of a convolution and of a product would make others from what it has left there.
    """
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return _model(
        spectral_norm(nn.Conv2d(4, 4, 3, padding=1)),
        nn.ReLU(inplace=True),
        nn.Sequential(one, nn.Hardswish(inplace=True), nn.Linear(4, 4)),
        nn.Sequential(nn.Dropout(0.2), nn.Conv2d(4, 4, 3, padding=1), nn.ELU(inplace=True)),
        Recompute(conv(4, True), reentrant=False),
        Struck() if struck else nn.Identity(),
        Recompute(conv(4, False), reentrant=True),
        nn.Dropout(0.2, inplace=True),
        two,
    )


def norms(struck: bool = False, frozen: int = 0, **options: Any) -> nn.Sequential:
    """Two BatchNorms with `options`; the first meets all that strikes. `frozen`: so many first layers."""
    middle = nn.Sequential(nn.BatchNorm2d(4, **options), nn.Conv2d(4, 4, 3, padding=1))
    model = _model(Struck() if struck else nn.Identity(), middle, nn.BatchNorm2d(4, **options), nn.Tanh())
    model[:frozen].requires_grad_(False)
    return model


def scaled() -> nn.Sequential:
    return _model(Scaled(), nn.Conv2d(4, 4, 3, padding=1))


def counting() -> nn.Sequential:
    return _model(Counting())


def differentiating() -> nn.Sequential:
    return _model(Differentiating())


class Attending(nn.Module):
    """Traced: [n, 3, 32, 32] -> [n, 10] by attention over 16 tokens, with a skip and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.query, self.key = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(16)
        self.leave = nn.Linear(16 * 8, CLASSES)
        self.key.weight = self.query.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(nn.functional.avg_pool2d(x, 8).flatten(2).mT)
        y = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), x)
        out: Tensor = self.leave((x + self.drop(torch.relu_(self.norm(y)))).flatten(1))
        return out
