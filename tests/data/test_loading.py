"""What rank 0 reads of a loader: sizes first, batches later."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, default_collate

from pipetrain import ConfigError
from pipetrain.data.loading import BadBatch, Form, Reader, known_sizes, pair, unlabelled
from pipetrain.network.values import TensorSpec, ValueSpec, as_tuple

DATA = TensorDataset(torch.arange(22.0).reshape(22, 1), torch.arange(22))


def batches(count: int, size: int = 4) -> list:
    return [(torch.full((size, 1), float(i)), torch.full((size,), i)) for i in range(count)]


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
        (batches(3), None),
    ],
)
def test_only_torchs_own_sampler_tells_sizes_without_being_read(loader, sizes):
    assert known_sizes(loader) == sizes
    if sizes is not None:
        assert [len(x) for x, _ in loader] == sizes


@pytest.mark.parametrize("loader", [DataLoader(DATA, batch_size=8), list(DataLoader(DATA, batch_size=8))])
@pytest.mark.parametrize("window", [1, 2, 3, None])
def test_windows_cover_the_pass_in_order(loader, window):
    reader = Reader(loader, "batch")
    assert len(reader.first()[0]) == 8
    labels, windows = [], []
    while sizes := reader.window(window):
        windows.append(sizes)
        labels += [label for size in sizes for label in reader.take(size)[1].tolist()]
    assert labels == list(range(22))
    assert windows == {1: [[8], [8], [6]], 2: [[8, 8], [6]], 3: [[8, 8, 6]], None: [[8, 8, 6]]}[window]


def test_a_pass_that_goes_on_leaves_out_what_the_whole_one_did():
    """The first batch says whether targets may not count, and a later one has none."""
    labels = torch.zeros(16, dtype=torch.int64)
    labels[[0, *range(8, 12)]] = -100
    samples = torch.arange(16.0).reshape(16, 1)
    for done in (0, 1):
        loader = DataLoader(list(zip(samples, labels, strict=True)), batch_size=4)  # type: ignore[arg-type]
        reader = Reader(loader, "batch", weight=lambda targets: (targets != -100).sum())
        assert reader.skip(done, window=None) == done
        assert reader.window(None) == [4] * (3 - done)
        assert reader.take(4)[0][0] == 4 * done
    labels[0] = 0  # now the first batch says that all count: a streamed window has the empty one too
    for window, left in ((None, [4, 4]), (1, [4])):
        loader = DataLoader(list(zip(samples, labels, strict=True)), batch_size=4)  # type: ignore[arg-type]
        reader = Reader(loader, "batch", weight=lambda targets: (targets != -100).sum())
        assert reader.skip(2, window) == 2
        assert reader.window(window) == left[:window]


def test_an_iterable_without_length_is_read_by_windows_and_refused_as_a_whole_pass():
    reader = Reader(iter(batches(3)), "batch")
    assert (reader.window(2), reader.take(4), reader.take(4))[0] == [4, 4]
    assert reader.window(2) == [4]
    with pytest.raises(ConfigError, match=r"a loader without length .* give train\(loader, window=...\)"):
        Reader(iter(batches(3)), "batch").window(None)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (torch.ones(4), "batch 7 must be a pair (inputs, targets); it is a Tensor of 4"),
        ({"x": 1}, "batch 7 must be a pair (inputs, targets); it is a dict of x: let the loader give"),
        ((torch.ones(4), 3), "must be a tensor [n, ...], or a tuple or a dict of them; got int"),
        ((torch.ones(4), torch.ones(3)), "batch 7 has 4 inputs and 3 targets: each sample needs one"),
        (((torch.ones(4), torch.ones(5)), torch.ones(4)), "batch 7 has 4 inputs and 5 inputs"),
        ((torch.ones(0), torch.ones(0)), "batch 7 has no sample"),
    ],
)
def test_what_is_no_batch_is_refused(batch, sentence):
    with pytest.raises(BadBatch) as caught:
        pair(batch, "batch 7")
    assert sentence in str(caught.value)


def test_lists_of_tensors_as_dataloader_makes_them_are_tuples():
    inputs, targets = pair([[torch.ones(2), torch.zeros(2, 3)], torch.ones(2)], "batch")
    assert isinstance(inputs, tuple)
    assert isinstance(targets, torch.Tensor)


def test_a_prediction_takes_the_inputs_with_targets_or_without():
    a, b, y = torch.ones(4, 2), torch.ones(4, 3), torch.ones(4)
    for inputs, batches in ((a, [a, [a], (a, y)]), ((a, b), [(a, b), [a, b], ([a, b], y)])):
        form = Form(ValueSpec.in_batch(inputs), ValueSpec.in_batch(y))
        for batch in batches:
            value, targets = unlabelled(batch, "batch", form, None)
            assert as_tuple(value) == as_tuple(inputs)
            assert targets.tolist() == [0] * 4
    with pytest.raises(BadBatch, match=r"batch has inputs float32\[3\] a sample"):
        unlabelled((b, y), "batch", Form(ValueSpec.in_batch(a), ValueSpec.in_batch(y)), None)


def test_a_form_survives_json_and_refuses_another():
    form = Form(
        ValueSpec((TensorSpec((3, 2), torch.float64), TensorSpec((), torch.int64)), single=False),
        ValueSpec((TensorSpec((), torch.bool),)),
    )
    assert Form.from_json(form.to_json()) == form
    mine = (torch.ones(5, 3, 2).double(), torch.arange(5))
    form.refuse_other(mine, torch.ones(5, dtype=torch.bool), "batch 1")
    with pytest.raises(BadBatch, match=r"batch 1 has targets float32\[\] a sample, and .* were bool\[\]"):
        form.refuse_other(mine, torch.ones(5), "batch 1")
