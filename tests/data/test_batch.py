"""What is a batch, and what form batches have."""

from __future__ import annotations

import pytest
import torch

from pipetrain.data.batch import BadBatch, Form, pair, unlabelled
from pipetrain.model.specs import TensorSpec, ValueSpec, as_tuple

RAGGED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (torch.ones(4), "batch 7 must be a pair (inputs, targets); it is a Tensor of 4"),
        ({"x": 1}, "batch 7 must be a pair (inputs, targets); it is a dict of x: let the loader give"),
        ((torch.ones(4), 3), "must be a tensor [n, ...], or a tuple or a dict of them; got int"),
        ((torch.ones(4), torch.ones(3)), "batch 7 has 4 inputs and 3 targets: each sample needs one"),
        (((torch.ones(4), torch.ones(5)), torch.ones(4)), "batch 7 has 4 inputs and 5 inputs"),
        ((torch.ones(0), torch.ones(0)), "batch 7 has no sample"),
        ((torch.ones(4), torch.ones(())), "got a number"),
        ((torch.ones(4), torch.ones(4).to_sparse()), "the targets of batch 7 must be a tensor [n, ...]"),
        ((torch.ones(4).to_sparse(), torch.ones(4)), "got a sparse one: make it dense"),
        ((torch.ones(4, device="meta"), torch.ones(4)), "got one on the device meta, without numbers"),
        ((RAGGED, torch.ones(2)), "got a nested one: pad it"),
    ],
)
def test_what_is_no_batch_is_refused(batch, sentence):
    with pytest.raises(BadBatch) as caught:
        pair(batch, "batch 7")
    assert sentence in str(caught.value)


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


def test_a_form_survives_json_and_refuses_another_and_lists_are_tuples():
    form = Form(
        ValueSpec((TensorSpec((3, 2), torch.float64), TensorSpec((), torch.int64)), single=False),
        ValueSpec((TensorSpec((), torch.bool),)),
    )
    assert Form.from_json(form.to_json()) == form
    given = [torch.ones(5, 3, 2).double(), torch.arange(5)]  # as a DataLoader makes them
    mine, targets = pair([given, torch.ones(5, dtype=torch.bool)], "batch")
    assert isinstance(mine, tuple)
    form.refuse_other(mine, targets, "batch 1")
    with pytest.raises(BadBatch, match=r"batch 1 has targets float32\[\] a sample, and .* were bool\[\]"):
        form.refuse_other(mine, torch.ones(5), "batch 1")
