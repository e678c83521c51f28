"""The precision and the memory layout of the layers' computation.

The estimate, the profile and the running stage all use this class, so the plan matches the run.

Under bf16 each forward has its own autocast context, because a context caches its casts of weights until it
ends, and the storage of one weight version is reused by a later one. Float32 outputs of a stage are cast to
bf16, so the dtype at a cut depends neither on the operations that autocast leaves in float32 nor on earlier
layers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True, slots=True)
class Numerics:
    """Precision and layout of a run.

    `autocast`: bf16 where it is safe. `channels_last`: the channels of images and convolutions are innermost.
    """

    autocast: bool = False
    channels_last: bool = False

    @property
    def memory_format(self) -> str:
        return "channels_last" if self.channels_last else "contiguous"

    def context(self, device: str) -> AbstractContextManager[object]:
        return torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext()

    def arrange(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the run's layout, without a copy if it already has it."""
        if self.channels_last and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def arrange_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data = self.arrange(parameter.data)

    def narrow(self, tensor: Tensor) -> Tensor:
        """Return an output as it is sent: under autocast float32 becomes bf16."""
        return tensor.to(torch.bfloat16) if self.autocast and tensor.dtype == torch.float32 else tensor


def numbers_of(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a dense, real tensor."""
    values = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def signed(tensor: Tensor) -> Tensor:
    """Return the bits of unsigned numbers as signed ones: GPUs have `where` and `foreach_copy` for these."""
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor
