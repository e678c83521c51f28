"""How layers compute: in which precision, and with which order of the numbers in memory.

The estimate on paper, the profile and the running stage all call layers through here, so what was planned is
what runs.

Under bf16 each forward has an autocast context of its own: the context caches casts of weights until it ends,
and weights whose storage goes round in a ring would be computed with another version's cast. Whatever leaves
a stage in float32 is cast to bf16, so that a cut's dtype depends neither on the device's list of operations
that autocast keeps in float32 nor on what the layers before it returned.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipetrain.boundary import Value


@dataclass(frozen=True, slots=True)
class Numerics:
    """Precision and layout of a run.

    `dtype` is that of weights, inputs and updates. With `autocast` layers compute in bf16 where it is safe.
    With `channels_last`, images and the weights of convolutions lie in memory with their channels innermost.
    """

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    channels_last: bool = False

    @property
    def memory_format(self) -> str:
        """The layout's name in the configuration."""
        return "channels_last" if self.channels_last else "contiguous"

    def context(self, device: str) -> AbstractContextManager[object]:
        """Return the context of one forward on a type of device."""
        return torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext()

    def arrange(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the run's order: itself where it has it."""
        if self.channels_last and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def arrange_weights(self, module: nn.Module) -> None:
        """Put a module's weights into the run's order."""
        for parameter in module.parameters():
            parameter.data = self.arrange(parameter.data)

    def narrow(self, value: Value) -> Value:
        """Return what leaves a stage as it travels: float32 as bf16 under autocast."""
        if not self.autocast:
            return value
        if isinstance(value, Tensor):
            return _narrow(value)
        return tuple(_narrow(tensor) for tensor in value)


def _narrow(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
