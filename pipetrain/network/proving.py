"""Compares the parts of a chain, as ranks have them, with the chain in one process, where that is cheap.

Layers of one process may tell each other more than what they return: by an attribute, a list, a module that
two of them hold. Ranks have copies, and what is sent is a copy too. So the parts run on copies of their own,
one after the other, and must make what they make on what they share. (A trace has its own comparison, which
also finds what no trace holds: tracing/proving.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import product

from torch import Tensor

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.chain import Chain
from pipetrain.network.draws import Beginning, Seeds, drawing
from pipetrain.network.network import Part, Slice, Tensors, evaluating, run_parts
from pipetrain.network.tensors import SIZES, Results, difference, made_up, results
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
    first: dict[Tensor, str] = {}
    known = {name: first.setdefault(p, name) for part in together for name, p in part.named_parameters()}

    def of(parts: Sequence[Part], given: ValueSpec, training: bool) -> Results:
        def run() -> Tensors:
            return run_parts(parts, [made_up(spec) for spec in given.specs], copied=parts is apart)

        mode = nullcontext() if training else evaluating(*parts)
        with Beginning().again(), drawing(Seeds(0, 0, 0)), mode:
            return results(run, parts, training, known)

    for samples, training in product(SIZES, (True, False)):
        try:
            wanted = of(together, example.of(samples), training)
        except Exception:  # it does not take these, or not on this device
            return
        try:
            why = difference(wanted, of(apart, example.of(samples), training))
        except Exception as error:
            why = one_line(error)[:200]
        if why:
            raise ConfigError(
                f"cut before {', '.join(names)}, the model would not compute in "
                f"{'training' if training else 'evaluation'} what it does in one process: {why}; its layers "
                f"exchange something that they do not return: let them return it, or keep them in one stage "
                f"by partition="
            )
