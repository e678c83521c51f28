"""The modes of a model's modules, training and evaluation, which are the user's.

An evaluation puts all modules into evaluation mode, and then each back into its own. Training runs them as
they are: a BatchNorm that the user has put into eval() keeps its statistics, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules, and all below them, into evaluation mode, and in the end each into the mode it had."""
    before = {module: module.training for root in modules for module in root.modules()}
    for root in modules:
        root.eval()
    try:
        yield
    finally:
        for module, mode in before.items():
            if module.training != mode:
                module.train(mode)  # by its own method, which may do more
        for module, mode in before.items():  # one that is in two places may have another by now
            module.training = mode
