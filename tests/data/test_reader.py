"""What rank 0 reads of a loader: sizes first, batches later."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from pipetrain import ConfigError
from pipetrain.data.batch import NamedTargets
from pipetrain.data.loader_facts import known_sizes
from pipetrain.data.reader import Reader
from pipetrain.model.specs import Size

DATA = TensorDataset(torch.arange(22.0).reshape(22, 1), torch.arange(22))


class Doubling(DataLoader):  # type: ignore[type-arg]
    """Gives each batch twice, and does not say so."""

    def __iter__(self):
        return (batch for batch in super().__iter__() for _ in range(2))


@pytest.mark.parametrize(
    ("loader", "sizes"),
    [
        (DataLoader(DATA, batch_size=8), [8, 8, 6]),
        (DataLoader(DATA, batch_size=8, shuffle=True, drop_last=True), [8, 8]),
        (DataLoader(DATA, batch_size=8, sampler=SubsetRandomSampler(range(9))), [8, 1]),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), None),
        (DataLoader(DATA, batch_size=8, sampler=range(22)), None),
        (DataLoader(DATA, batch_size=8, collate_fn=lambda samples: default_collate(samples)), None),
        (DataLoader(DATA, batch_size=None), None),
        (Doubling(DATA, batch_size=8), None),
        ([*DataLoader(DATA)], None),
    ],
)
def test_only_torchs_own_sampler_tells_sizes_without_being_read(loader, sizes):
    assert known_sizes(loader) == (sizes and [*map(Size, sizes)])
    if sizes is not None:
        assert [len(x) for x, _ in loader] == sizes


def streamed(loader):
    yield from loader


@pytest.mark.parametrize("of", [lambda loader: loader, list, streamed])
@pytest.mark.parametrize("window", [1, 2, 3, None])
def test_windows_cover_the_pass_in_order_and_without_length_there_is_no_whole_one(of, window):
    reader = Reader(of(DataLoader(DATA, batch_size=8)), "batch")
    if window is None and of is streamed:
        with pytest.raises(ConfigError, match=r"a loader without length .* give train\(loader, window=...\)"):
            reader.window(window)
        return
    assert len(reader.first()[0]) == 8
    labels, windows = [], []
    while sizes := reader.window(window):
        windows.append([size.samples for size in sizes])
        labels += [label for size in sizes for label in reader.take(size)[1].tolist()]
    assert labels == list(range(22))
    assert windows == {1: [[8], [8], [6]], 2: [[8, 8], [6]], 3: [[8, 8, 6]], None: [[8, 8, 6]]}[window]


@pytest.mark.parametrize("window", [1, 2, None])
def test_passes_draw_what_loops_draw(window):
    """A sampler draws at its end too, so a pass that stops at its last batch changes the next one's order."""
    orders = []
    for read in (lambda loader: (y for _, y in loader), partial(taken, window)):
        loader = DataLoader(DATA, 11, shuffle=True, generator=torch.Generator().manual_seed(3))
        orders.append([torch.cat([*read(loader)]).tolist() for _ in range(3)])
    assert orders[0] == orders[1]


def taken(window, loader):
    """The targets of a pass in windows."""
    reader = Reader(loader, "batch")
    while sizes := reader.window(window):
        yield from (reader.take(size)[1] for size in sizes)


class Short:
    """Says three batches, and ends earlier or later."""

    def __init__(self, gives: int) -> None:
        self._gives = gives

    def __len__(self) -> int:
        return 3

    def __iter__(self):
        return iter([next(iter(DataLoader(DATA, 4)))] * self._gives)


@pytest.mark.parametrize(
    ("loader", "gives"), [(Short(2), 2), (Short(3), None), (Short(4), 4), (Doubling(DATA, batch_size=8), 6)]
)
def test_a_loader_that_does_not_give_what_it_says_is_named_once_and_what_it_gives_is_taken(
    loader, gives, caplog
):
    reader = Reader(loader, "batch")
    read = 0
    while sizes := reader.window(1):
        read += len(sizes)
        reader.take(*sizes)
    assert not reader.window(1)
    lines = [record.getMessage() for record in caplog.records]
    assert read == (gives or 3)
    assert len(lines) == (gives is not None)
    assert all(f"the loader gave {gives} batches in this pass, and its len() is 3" in line for line in lines)


@pytest.mark.parametrize("window", [1, 2, None])
@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (
            DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, 0)),
            r"the loader's DistributedSampler gives each rank a share of the samples, and rank 0 alone reads "
            r"the loader, for all 2 ranks: give one of all samples",
        ),
        (DataLoader(DATA, 7), r"a batch of 1 sample cannot be cut into microbatches=2: leave it out"),
        (DATA, "the loader is a Dataset"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_the_first_window(loader, says, window):
    """However the others read: an error in a window would be a lost rank."""
    with pytest.raises(ConfigError, match=says):
        Reader(loader, "batch", ranks=2, microbatches=2).window(window)


def test_where_one_process_reads_or_nothing_is_trained_a_loop_would_do_it_too():
    assert Reader(DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, 0)), "batch").window(1) == [Size(2)]
    assert Reader(DataLoader(DATA, 7), "batch").window(None) == [*map(Size, (7, 7, 7, 1))]


def test_a_pass_that_goes_on_leaves_out_what_the_whole_one_did():
    """The first batch says whether targets may not count, and a later one has none."""
    labels = torch.zeros(16, dtype=torch.int64)
    labels[[0, *range(8, 12)]] = -100
    samples = torch.arange(16.0).reshape(16, 1)

    def reader() -> Reader:
        loader = DataLoader(list(zip(samples, labels, strict=True)), batch_size=4)  # type: ignore[arg-type]
        return Reader(loader, "batch", weight=lambda targets: (targets != -100).sum())

    for done in (0, 1):
        going_on = reader()
        assert going_on.skip(done, window=None) == done
        assert going_on.window(None) == [Size(4)] * (3 - done)
        assert going_on.take(Size(4))[0][0] == 4 * done
    labels[0] = 0  # now the first batch says that all count: a streamed window has the empty one too
    for window, left in ((None, [Size(4), Size(4)]), (1, [Size(4)])):
        going_on = reader()
        assert going_on.skip(2, window) == 2
        assert going_on.window(window) == left[:window]


def test_a_dict_may_have_its_inputs_in_another_order_later():
    x, z, y = torch.ones(4, 2), torch.zeros(4, 2), torch.arange(4)
    reader = Reader([{"x": x, "z": z, "y": y}, {"z": z, "y": y, "x": x}], "batch", named=NamedTargets("y"))
    assert reader.window(2) == [Size(4)] * 2
    for _ in range(2):
        inputs, targets = reader.take(Size(4))
        assert ([*inputs], inputs["x"].sum(), targets.tolist()) == (["x", "z"], 8, [0, 1, 2, 3])


# Lengths


def of(*shapes):
    """Batches whose inputs and targets are of these shapes."""
    return [(torch.zeros(x), torch.zeros(y, dtype=torch.int64)) for x, y in shapes]


@pytest.mark.parametrize(
    ("batches", "longest", "inputs", "targets", "largest"),
    [
        ([((2, 5, 3), (2, 5)), ((4, 7, 3), (4, 7))], [], (-1, 3), (-1,), (7,)),
        ([((2, 5, 3), (2, 5)), ((4, 7, 3), (4, 7))], [9], (-1, 3), (-1,), (9,)),
        ([((2, 5, 5), (2, 5)), ((4, 7, 5), (4, 8))], [], (-1, 5), (-2,), (7, 8)),
        ([((2, 5, 5), (2, 5)), ((4, 7, 5), (4, 8))], [9, 6], (-1, 5), (-2,), (9, 6)),
        ([((2, 5, 5), (2, 5)), ((4, 5, 5), (4, 5))], [], (5, 5), (5,), ()),
        ([((2, 5, 3), (2, 5)), ((4, 5, 3), (4, 5))], [9], (-1, 3), (-1,), (9,)),
        ([((2, 5, 3), (2, 5))], [9], (-1, 3), (-1,), (9,)),
        ([((2,), (2,)), ((3,), (3,))], [9], (), (), ()),
        ([((2, 5), (2,)), ((2, 5, 1), (2,))], [], (5,), (), ()),
    ],
)
def test_a_dimension_that_differs_in_the_first_two_batches_is_a_length(
    batches, longest, inputs, targets, largest
):
    reader = Reader(of(*batches), "batch", longest=longest)
    reader.first()
    assert (reader.form.inputs.specs[0].shape, reader.form.targets.specs[0].shape) == (inputs, targets)
    assert reader.largest == largest


def test_batches_of_several_lengths_are_announced_and_taken_in_order():
    batches = of(((2, 5), (2,)), ((4, 7), (4,)), ((3, 1), (3,)))
    reader = Reader(batches, "batch")
    sizes = [Size(2, (5,)), Size(4, (7,)), Size(3, (1,))]
    assert [reader.window(1), reader.window(None)] == [sizes[:1], sizes[1:]]
    assert [reader.take(size)[0].shape for size in sizes] == [(2, 5), (4, 7), (3, 1)]
    assert [reader.window(1), str(sizes[0])] == [[], "2 samples of length 5"]


def test_a_loader_that_may_wait_for_what_a_batch_trains_is_not_read_ahead():
    given = []

    def waiting():
        for batch in of(((2, 5), (2,)), ((2, 6), (2,))):
            given.append(batch)
            yield batch

    reader = Reader(waiting(), "batch", longest=[6])
    assert (reader.window(1), len(given)) == ([Size(2, (5,))], 1)
    reader.take(Size(2, (5,)))
    assert (reader.window(1), len(given)) == ([Size(2, (6,))], 2)


def test_a_loader_of_one_batch_has_no_second_and_no_warning(caplog):
    reader = Reader(DataLoader(DATA, batch_size=22, collate_fn=default_collate, sampler=range(22)), "batch")
    assert [reader.window(1), reader.take(Size(22)) and reader.window(1)] == [[Size(22)], []]
    assert not caplog.records


def test_an_error_of_the_second_batch_comes_with_it():
    class Failing(list):
        def __iter__(self):
            yield from super().__iter__()
            raise OSError("the disk is gone")

    reader = Reader(Failing(of(((2, 5), (2,)))), "batch")
    assert reader.window(1) == [Size(2)]
    reader.take(Size(2))
    with pytest.raises(OSError, match="the disk is gone"):
        reader.window(1)
