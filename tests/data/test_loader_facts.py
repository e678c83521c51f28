"""What is known of a loader before it is read."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from pipetrain.data.loader_facts import MOST_LISTED, parts_of, share_in

DATA = TensorDataset(torch.arange(8.0))


class Holding(Dataset):  # type: ignore[type-arg]
    """A data set with attributes."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __getitem__(self, index: int) -> Any:
        return index

    def __len__(self) -> int:
        return 8


def test_parts_are_found_once_by_the_way_to_them():
    generator = torch.Generator()
    loader = DataLoader(DATA, 2, shuffle=True, generator=generator)
    parts = parts_of(loader)
    assert parts[""] is loader
    assert parts["generator"] is generator
    assert parts["sampler"] is loader.sampler
    assert parts["dataset"] is DATA
    assert list(map(id, parts.values())) == [*dict.fromkeys(map(id, parts.values()))]


def test_modules_numbers_iterators_and_long_lists_are_none():
    inner = [Holding() for _ in range(MOST_LISTED + 1)]
    held = Holding(model=nn.Linear(2, 2), begun=iter(()), many=inner, few=inner[:2], by_name={"a": inner[2]})
    assert [*parts_of(held)] == ["", "few.0", "few.1", "by_name.a"]
    held.loop = held  # type: ignore[attr-defined]
    assert len(parts_of(held)) == 4
    assert parts_of(iter([1])).keys() == {""}  # the loader itself may be one


@dataclass
class Split:
    """As what datasets.distributed.split_dataset_by_node leaves in a data set."""

    rank: int
    world_size: int


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, split: Split) -> None:
        self._distributed = split

    def __iter__(self) -> Any:
        return iter(())


class AskingTorch(Stream):
    def __iter__(self) -> Any:
        return iter(range(dist.get_rank(), 8, dist.get_world_size()))


class AskingTorchrun(Holding):
    def __len__(self) -> int:
        return 8 // int(os.environ["WORLD_SIZE"])


class Sharing(BatchSampler):
    """As the batch samplers of accelerate and others."""

    def __init__(self, shares: int) -> None:
        super().__init__(RandomSampler(DATA), 2, False)
        self.num_processes, self.process_index = shares, 0


class Wrapper:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


@pytest.mark.parametrize(
    ("loader", "share"),
    [
        *(
            (DataLoader(DATA, 2, sampler=DistributedSampler(DATA, n, 0)), name)
            for n, name in ((2, "DistributedSampler"), (1, ""))
        ),
        *((DataLoader(DATA, batch_sampler=Sharing(n)), name) for n, name in ((3, "Sharing"), (1, ""))),
        *((DataLoader(Stream(Split(0, n))), name) for n, name in ((2, "Stream"), (1, ""))),
        (DataLoader(Holding(rank=0, world_size=2)), "Holding"),
        (DataLoader(AskingTorch(Split(0, 1))), "AskingTorch"),
        (DataLoader(AskingTorchrun()), "AskingTorchrun"),
        (Wrapper(DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, 1))), "DistributedSampler"),
        (DataLoader(Holding(options=Namespace(rank=0, world_size=2))), ""),  # of a program, which may do else
        (DataLoader(DATA, 2, shuffle=True), ""),
        ([(torch.ones(2), torch.ones(2))], ""),
    ],
)
def test_what_gives_a_rank_a_share_alone_is_found(loader, share):
    assert share_in(loader) == share
