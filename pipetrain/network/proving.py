"""Compares the parts of a chain, as ranks have them, with the chain in one process, where that is cheap.

Layers of one process may tell each other more than what they return: by an attribute, a list, a module that
two of them hold. Ranks have copies, and what is sent is a copy too. So the parts run on copies of their own,
one after the other, and must make what they make on what they share. (A trace has its own comparison, which
also finds what no trace holds: tracing/proving.py.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy

import torch
from torch import Tensor

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.chain import Chain
from pipetrain.network.draws import Beginning, Seeds, drawing
from pipetrain.network.network import INPUT, Made, Part, Slice, evaluating
from pipetrain.network.tensors import SIZES, Results, difference, made_up
from pipetrain.network.values import ValueSpec

MOST_WORK = 2e8  # floating-point operations of a forward of a sample: some tenths of a second in all


def prove_parts(
    chain: Chain, slices: Sequence[tuple[Slice, Slice]], example: ValueSpec, names: Sequence[str]
) -> None:
    """Compare outputs, gradients and buffers, in training and evaluation, for two sizes. Raises ConfigError.

    `slices`: of each part, in training and in evaluation; `names`: of the first layers of all but the first.
    A chain that cannot be copied, or run alone on made-up samples, is not compared.
    """
    twin = chain.spare()
    if twin is chain:
        return
    together = [twin.part(*both) for both in slices]
    try:
        apart = [deepcopy(part) for part in together]
    except Exception:  # a layer may hold anything
        return
    known = _first_names(together)
    for samples in SIZES:
        for training in (True, False):
            try:
                wanted = _results(together, known, example.of(samples), training, copied=False)
            except Exception:  # it does not take these, or not on this device
                return
            try:
                why = difference(wanted, _results(apart, known, example.of(samples), training, copied=True))
            except Exception as error:
                why = one_line(error)[:200]
            if why:
                mode = "training" if training else "evaluation"
                raise ConfigError(
                    f"cut before {', '.join(names)}, the model would not compute in {mode} what it does in "
                    f"one process: {why}; its layers exchange something that they do not return: let them "
                    f"return it, or keep them in one stage by partition="
                )


def _first_names(parts: Sequence[Part]) -> dict[str, str]:
    """Return the first name of the tensor that has each name."""
    first: dict[Tensor, str] = {}
    named = [pair for part in parts for pair in (*part.named_parameters(), *part.named_buffers())]
    return {name: first.setdefault(tensor, name) for name, tensor in named}


def _results(
    parts: Sequence[Part], known: Mapping[str, str], given: ValueSpec, training: bool, copied: bool
) -> Results:
    """Return what parts make of made-up samples; `copied`: each has copies of what the others made.

    `known`: the first name of each tensor in the model.
    """
    mode = nullcontext() if training else evaluating(*parts)
    with Beginning().again(), drawing(Seeds(0, 0, 0)), mode, torch.set_grad_enabled(training):
        torch.default_generator.manual_seed(0)
        values = {Made(INPUT, number): made_up(spec) for number, spec in enumerate(given.specs)}
        for part in parts:
            enters = [values[value].clone() if copied else values[value] for value in part.slice.enters]
            outputs = part(*enters)
            values |= zip(part.slice.leaves, outputs, strict=True)
        found = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
        if training:
            found |= _gradients(parts, known, [t for t in outputs if t.requires_grad])
    for part in parts:
        found |= {f"buffer {name}": buffer.clone() for name, buffer in part.named_buffers()}
    return found


def _gradients(
    parts: Sequence[Part], known: Mapping[str, str], outputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of each parameter; those of its copies in several parts are added up."""
    names = {
        p: known.get(name, name) for part in parts for name, p in part.named_parameters() if p.requires_grad
    }
    if not names or not outputs:
        return {}
    weights = [torch.rand_like(t) for t in outputs]
    grads = torch.autograd.grad(list(outputs), list(names), weights, allow_unused=True)
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, grad in zip(names.values(), grads, strict=True):
        if grad is not None:
            found[f"the gradient of {name}"].append(grad.to_dense())
    return {name: torch.stack(all_of).sum(0) for name, all_of in found.items()}
