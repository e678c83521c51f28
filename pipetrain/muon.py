"""Muon, for matrices and for the kernels of convolutions."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch.optim.Muon, which treats a kernel as the matrix [out, in * height * width].

    As does Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__([torch.zeros(1, 1)], **options)  # only this refuses kernels
        torch.optim.Optimizer.__init__(self, params, self.defaults)
        if any(p.dim() < 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon takes matrices and kernels: norms and biases need another optimizer")

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        for p in group["params"]:
            if p.grad is not None:  # with the layout of the parameter, which a gradient need not have
                self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        is_complex = bool(super()._init_group(group, params_with_grad, grads, muon_momentum_bufs))
        for number, p in enumerate([*params_with_grad]):
            # Columns in memory order, so that a channels_last kernel becomes a view, not a copy.
            order = 0, *sorted(range(1, p.dim()), key=p.stride, reverse=True)
            params_with_grad[number] = p.permute(order).view(len(p), -1)
            grads[number] = grads[number].permute(order).reshape(len(p), -1)
            muon_momentum_bufs[number] = muon_momentum_bufs[number].permute(order).view(len(p), -1)
        return is_complex
