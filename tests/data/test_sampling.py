from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipetrain.data import Sampler, loaded
from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.model.specs import Size

IMAGES = torch.zeros(40, 3, 32, 32)


def workers_left() -> list[str]:
    """The data workers that still live after a while; other tests' processes have other names."""
    deadline = time.monotonic() + 10
    while True:
        left = [
            child.name for child in multiprocessing.active_children() if child.name.startswith("Process-")
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def flat(batches: list[list[Tensor]]) -> list[int]:
    return [i for batch in batches for ids in batch for i in ids.tolist()]


@given(st.integers(8, 200), st.integers(1, 8), st.integers(0, 5), st.integers(0, 2**31), st.booleans())
def test_every_sample_comes_once_an_epoch_in_pieces_as_even_as_tensor_split_s(samples, m, epoch, seed, drop):
    if not drop and 0 < samples % 8 < m:
        return
    sampler = Sampler(samples, batch_size=8, microbatches=m, seed=seed, drop_last=drop)
    batches, whole = sampler.epoch(epoch), samples - samples % 8 * drop
    assert len({*flat(batches)} & {*range(samples)}) == sum(sampler.batch_sizes) == whole
    sizes = [[len(ids) for ids in batch] for batch in batches]
    assert sizes == [[size.samples for size in Size(n).pieces(m)] for n in sampler.batch_sizes]
    assert sampler.batch_sizes[:-1] == [8] * (len(batches) - 1)


def test_order_depends_on_the_seed_and_the_epoch_and_not_on_how_updates_are_cut():
    """So that schedules with other numbers of microbatches learn from the same updates."""
    which = [(m, seed, epoch) for m in (1, 2) for seed in (0, -1) for epoch in (0, 1)]
    orders = [flat(Sampler(50, 10, m, seed).epoch(epoch)) for m, seed, epoch in which]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[:4] == orders[4:]


def test_order_of_a_seed_never_changes():
    """Pinned: a run that is resumed by another version must see the samples that it would have seen."""
    assert Sampler(100, 16, 2, seed=3).epoch(1)[0][0].tolist() == [84, 76, 56, 94, 46, 86, 93, 64]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"samples": 66, "microbatches": 4}, "data.drop_last=true, another batch_size"),
        ({"samples": 63, "microbatches": 1, "drop_last": True}, "smaller batch_size"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments, says):
    with pytest.raises(ConfigError, match=says):
        Sampler(batch_size=64, seed=0, **arguments)


@dataclass(frozen=True)
class Misbehave:
    """A data set that does something at sample 12."""

    what: str

    def __call__(self, ids: Tensor) -> Tensor:
        if 12 in ids and self.what:
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "hang":
                time.sleep(1.5)
            raise ValueError("this image is no good")
        return IMAGES[ids]


@pytest.mark.parametrize(
    ("what", "timeout", "says"),
    [
        ("die", 30.0, r"exited unexpectedly|killed by signal|reset by peer"),
        ("hang", 0.5, r"timed out after 0\.5 seconds"),
        ("raise", 30.0, "no good"),
    ],
)
def test_a_worker_that_fails_is_said_in_one_sentence(what, timeout, says):
    with pytest.raises(TrainingStopped) as stop:
        list(loaded(Misbehave(what), torch.arange(40).split(8), workers=1, timeout=timeout))
    assert re.search(says, str(stop.value))
    assert "data workers (1)" in str(stop.value)
    assert "\n" not in str(stop.value)
    assert not workers_left()


def test_microbatches_may_have_any_size_the_random_state_is_left_alone_and_workers_end_early():
    before, ids = torch.get_rng_state(), [torch.tensor([3]), torch.tensor([5, 1, 2]), torch.tensor([7])]
    made = loaded(Misbehave(""), ids, workers=2, timeout=30)
    assert [next(made).shape for _ in range(2)] == [(1, 3, 32, 32), (3, 3, 32, 32)]
    made.close()
    assert not workers_left()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="no good"):  # without workers, as it is
        list(loaded(Misbehave("raise"), [torch.tensor([12])]))
