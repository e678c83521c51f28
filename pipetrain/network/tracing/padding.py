"""What PyTorch's fast path does to padded places, for the trace.

Without gradients an nn.TransformerEncoder in evaluation mode runs on nested tensors if the padding of all
samples is to their right, and its padded places become 0. torch.export takes the other way, on which they are
numbers like others; so hooks, which are there while it runs, add operations that put in the zeros. (Under
autocast there is no such path on a GPU, and on a CPU it fails.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def zeros_of_the_fast_path(model: nn.Module, training: bool) -> Iterator[None]:
    """Let the nn.TransformerEncoders of a model make the zeros that they make in one process.

    `training`: with gradients.
    """
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    hooks = [
        encoder.layers[-1].register_forward_hook(partial(_with_zeros, encoder, training), with_kwargs=True)
        for encoder in encoders
        if len(encoder.layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_zeros(
    encoder: nn.TransformerEncoder,
    training: bool,
    layer: nn.Module,
    args: Any,
    given: dict[str, Any],
    output: Tensor,
) -> Tensor:
    """Return the output of the last layer as one process has it: the conditions are those of `forward`."""
    padding, mask = given.get("src_key_padding_mask"), given.get("src_mask")
    nested = encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled() and output.dim() == 3
    if not nested or encoder.layers[0].training or padding is None or mask is not None:
        return output
    if training and torch.is_grad_enabled() and output.requires_grad:
        return output
    kept = padding.logical_not()  # of a mask of 0 and -inf
    zero = kept.logical_not()
    if getattr(encoder, "mask_check", True):
        zero = zero & (kept[:, 1:] <= kept[:, :-1]).all()
    return output.masked_fill(zero.unsqueeze(-1), 0.0)
