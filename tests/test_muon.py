"""Muon: of matrices torch's own, of kernels that of their matrix, in any memory format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipetrain.muon import Muon


def numbers(*shape: int) -> Tensor:
    return torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def stepped(optimizer_class, weight: Tensor, *gradients: Tensor) -> Tensor:
    parameter = nn.Parameter(weight.clone())
    optimizer = optimizer_class([parameter], lr=0.1, weight_decay=0.5)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_a_matrix_and_a_kernel_as_a_matrix_move_as_by_torch_s_muon_bit_for_bit():
    for shape in ((3, 5), (6, 2), (4, 3, 3, 2), (9, 2, 2)):
        weight, *gradients = numbers(*shape)
        wanted = stepped(torch.optim.Muon, weight.flatten(1), *(g.flatten(1) for g in gradients))
        assert torch.equal(stepped(Muon, weight, *gradients), wanted.view(shape)), shape


def test_a_kernel_in_channels_last_moves_in_its_place_whatever_the_layout_of_its_gradient():
    weight, *gradients = numbers(4, 3, 3, 2)
    wanted = stepped(Muon, weight, *gradients)
    for laid_out in (gradients, [g.contiguous(memory_format=torch.channels_last) for g in gradients]):
        moved = stepped(Muon, weight.contiguous(memory_format=torch.channels_last), *laid_out)
        assert moved.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(moved, wanted, rtol=0, atol=0.01)  # of steps of .1, in bfloat16
        assert (moved - weight).norm() > 0.1


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="norms and biases need another optimizer"):
        Muon([nn.Parameter(torch.ones(3))])
