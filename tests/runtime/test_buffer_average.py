"""The buffers of replicas: weighted means of what each has seen, and sums of what each has counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.runtime.buffer_average import BufferAverager


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("flag", torch.tensor(True))


def test_means_are_weighted_by_samples_and_counters_add_up() -> None:
    told: list[Tensor] = []
    replicas = []
    for _ in range(2):
        groups: Any = SimpleNamespace(
            placement=[(0, 1)], sum_over_ranks=lambda tie, numbers: told.append(numbers) or numbers
        )
        module = Kept()
        stages: Any = {0: SimpleNamespace(module=module, observers=[])}
        replicas.append((module, BufferAverager(stages, groups), groups))
    for index, (module, leveller, _) in enumerate(replicas):
        leveller.before_window()
        module.mean += torch.tensor([1.0, 10.0]) * (index + 1)
        module.count += index + 1
        leveller.count(0, 30 if index else 10)
        leveller.average()  # which tells what this replica has
    for module, leveller, groups in replicas:
        module.count.fill_(5)
        leveller.before_window()
        module.count += 1  # is what the sum below says instead
        groups.sum_over_ranks = lambda tie, numbers: sum(told[:2])
        leveller.average()
        torch.testing.assert_close(module.mean, torch.tensor([1.75, 17.5]))
        assert (int(module.count), bool(module.flag)) == (8, True)
    before = len(told)
    for _, leveller, _ in replicas:
        leveller.average()  # nothing was trained since
    assert len(told) == before


def test_a_replica_without_samples_does_not_make_an_infinity_nan() -> None:
    """As a mask has them. A short window may have fewer microbatches than replicas."""
    told: list[Tensor] = []
    groups: Any = SimpleNamespace(
        placement=[(0, 1)], sum_over_ranks=lambda tie, numbers: told.append(numbers) or numbers
    )
    module = Kept()
    module.mean.fill_(-torch.inf)
    leveller = BufferAverager({0: SimpleNamespace(module=module, observers=[])}, groups)  # type: ignore[dict-item]
    leveller.before_window()
    leveller.average()
    assert told[0].tolist() == [0] * 4
