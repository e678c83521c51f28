"""A loader that goes on from the state of an epoch's beginning gives what it would have given."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pipetrain.data.loader_state import LoaderStates

DATA: Any = TensorDataset(torch.arange(12))


class Ordered(Sampler[int]):
    """Gives the order that a function makes of it."""

    def __init__(self, order: Any, **held: Any) -> None:
        self._order = order
        vars(self).update(held)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter(self._order(self))


def counting(sampler: Any) -> list[int]:
    sampler.epoch += 1
    return torch.randperm(12, generator=torch.Generator().manual_seed(sampler.epoch)).tolist()


def in_place(sampler: Any) -> list[int]:
    random.shuffle(sampler.ids)
    return [*sampler.ids]


class Drawing(Dataset):  # type: ignore[type-arg]
    """An augmentation with generators of its own."""

    def __init__(self) -> None:
        self.generators = {"torch": torch.Generator().manual_seed(1), "python": random.Random(1)}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        drawn = torch.rand((), generator=self.generators["torch"]).item()  # type: ignore[arg-type]
        return index + drawn + self.generators["python"].random() + np.random.rand()  # type: ignore[union-attr]


class Counting(Dataset):  # type: ignore[type-arg]
    """A curriculum: each sample is another one the more have been read."""

    read = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index + self.read


class Streaming(IterableDataset):  # type: ignore[type-arg]
    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter(range(self.epoch, 12))


class Telling:
    """A loader whose state only it can tell; once loaded its next pass would go on from there."""

    def __init__(self) -> None:
        self._orders, self.begins = deque([[1, 2, 3], [2, 3, 1], [3, 1, 2]]), None

    def __iter__(self) -> Any:
        order = self._orders[0][self.begins or 0 :]
        self.begins = None
        self._orders.rotate(-1)
        return iter(torch.tensor(order))

    def state_dict(self) -> dict[str, Any]:
        return {"orders": [*self._orders], "read": (3, torch.tensor(3), b"3")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["read"] == (3, torch.tensor(3), b"3")
        self._orders, self.begins = deque(state["orders"]), state["read"][0]


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Any] = {
    "a generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=seeded()),
    "weights": lambda: DataLoader(
        DATA, 4, sampler=WeightedRandomSampler(torch.arange(1.0, 13), 12, generator=seeded())
    ),
    "torch's": lambda: DataLoader(
        DATA, 4, sampler=Ordered(lambda s: torch.randperm(12, generator=s.g).tolist(), g=seeded())
    ),
    "numpy's": lambda: DataLoader(
        DATA, 4, sampler=Ordered(lambda s: s.g.permutation(12).tolist(), g=np.random.default_rng(3))
    ),
    "numpy's of old": lambda: DataLoader(
        DATA, 4, sampler=Ordered(lambda s: s.g.permutation(12).tolist(), g=np.random.RandomState(3))
    ),
    "a count": lambda: DataLoader(DATA, 4, sampler=Ordered(counting, epoch=0)),
    "a list in place": lambda: DataLoader(DATA, 4, sampler=Ordered(in_place, ids=[*range(12)])),
    "a data set that draws": lambda: DataLoader(Drawing(), 4),
    "a data set that counts": lambda: DataLoader(Counting(), 4),
    "a data set that streams": lambda: DataLoader(Streaming(), 4),
    "within another": lambda: [DataLoader(DATA, 4, shuffle=True, generator=seeded())],
    "persistent workers": lambda: DataLoader(
        DATA, 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "a state_dict": Telling,
}


def epoch_of(loader: Any) -> list[Any]:
    batches = loader[0] if isinstance(loader, list) else loader
    return [torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist() for batch in batches]


@pytest.mark.parametrize("name", LOADERS)
def test_from_the_beginning_of_any_epoch_it_gives_the_same(name):
    """Also a second time, and on a loader that has read something else meanwhile."""
    random.seed(1)
    np.random.seed(1)
    loader = LOADERS[name]()
    states, saved, epochs = LoaderStates(train=loader), [], []
    for _ in range(4):
        saved.append(states.read())
        epochs.append(epoch_of(loader))
    assert len({str(epoch) for epoch in epochs}) > 1
    for start in (0, 1, 3):
        other = LOADERS[name]()
        for _ in range(2):
            going_on = LoaderStates(train=other)
            going_on.restore(saved[start])
            for number in range(start, 4):
                assert torch.equal(going_on.read(), saved[number])
                assert epoch_of(other) == epochs[number]


def test_what_it_was_made_with_and_does_not_change_is_its_own():
    """Another number of workers, say, or the length of a pass."""
    states = LoaderStates(train=DataLoader(DATA, 4, sampler=Ordered(counting, epoch=0, length=12)))
    other: Any = DataLoader(DATA, 3, sampler=Ordered(counting, epoch=7, length=13), num_workers=2)
    LoaderStates(train=other).restore(states.read())
    assert (other.num_workers, other.batch_size, other.sampler.length, other.sampler.epoch) == (2, 3, 13, 7)


def test_what_cannot_be_kept_is_named_once(caplog):
    class Strange(Telling):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": object()}

    states = LoaderStates(train=Strange(), test=None)
    states.restore(states.read())
    states.read()
    LoaderStates(train=DataLoader(DATA, 4, num_workers=1, persistent_workers=True))
    LoaderStates(train=DataLoader(DATA, 4, num_workers=1))
    strange, workers = (record.getMessage() for record in caplog.records)
    assert "train has a state_dict with values of type object, which a checkpoint cannot keep" in strange
    assert "the loader train has persistent workers, and what they draw is not in a checkpoint" in workers
