"""One slice of a model: what comes out of it, what goes back through it, and what it refuses."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.errors import TrainingStopped
from pipetrain.network.values import Gradients, Value
from pipetrain.runtime.feed import Target
from pipetrain.runtime.microbatch import Saving
from pipetrain.runtime.session import observers_of
from pipetrain.runtime.stage import Stage
from pipetrain.tally import Tally
from pipetrain.tasks import Classification, Task
from tests.support.models import Fork, Join
from tests.support.parts import part_of

SGD = partial(torch.optim.SGD, lr=0.1)
LABELS = torch.tensor([0, 2, 1])

SPLIT = Saving(split=True)


def stage(
    module: nn.Module,
    index: int = 1,
    enters: int = 1,
    leaves: int = 1,
    skips: bool = False,
    entering: Gradients | None = None,
    leaving: Gradients | None = None,
    copies_input: bool = False,
    **arguments: object,
) -> Stage:
    """A stage of these layers; of a later one, the layer before them is layer 4 of the model."""
    if not index:
        entering = Gradients((False,) * enters, (False,) * enters)
    known = {"enters_grad": entering, "leaves_grad": leaving, "copies_input": copies_input}
    part = part_of(module.double(), enters, leaves, before=5 if index else 0, **known)
    made = Stage(index, part, SGD, lambda update: 1.0, **arguments)  # type: ignore[arg-type]
    made.observers = observers_of(made, skips)
    return made


def tallies(of: Stage) -> tuple[Tally, Tally]:
    return of.take_trained(), of.take_evaluated()


def last(module: nn.Module, index: int = 1, **arguments: object) -> Stage:
    return stage(module, index, task=Classification(), **arguments)


def gradients(of: Stage, version: int = 0) -> list[Tensor]:
    return [leaf.grad.clone() for leaf in of.weights.leaves(version) if leaf.grad is not None]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Forward and backward


def test_a_stage_in_the_middle_is_the_module_and_its_derivative():
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    x, grad = randn(2, 4), randn(2, 3)
    plain = x.clone().requires_grad_()
    wanted = module(plain)
    wanted_x, wanted_w, wanted_b = torch.autograd.grad(wanted, [plain, *module.parameters()], grad)
    middle = stage(module)
    (output,) = middle.forward(0, (x,), 0)
    assert torch.equal(output, wanted)
    assert not output.requires_grad
    assert middle.in_flight == 1
    (back,) = middle.backward(0, (grad,), 0)
    assert middle.in_flight == 0
    assert torch.equal(back, wanted_x)
    assert torch.equal(gradients(middle)[0], wanted_w)
    assert torch.equal(gradients(middle)[1], wanted_b)


def test_the_first_stage_has_nothing_to_hand_back():
    first = stage(nn.Linear(4, 3), index=0)
    x = randn(2, 4)
    (output,) = first.forward(0, (x,), 0)
    assert first.backward(0, (torch.ones_like(output),), 0) == ()
    assert not x.requires_grad
    assert torch.equal(gradients(first)[1], torch.full((3,), 2.0, dtype=torch.float64))


def test_the_last_stage_takes_the_loss_for_its_share_of_the_batch():
    module = nn.Linear(4, 3).double()
    x = randn(3, 4)
    plain = x.clone().requires_grad_()
    loss = functional.cross_entropy(module(plain), LABELS)
    (wanted,) = torch.autograd.grad(0.25 * loss, plain)
    final = last(module)
    assert final.forward(0, (x,), 0, Target(LABELS, 3.0, 0.25)) == ()
    (back,) = final.backward(0, (), 0)
    torch.testing.assert_close(back, wanted, rtol=1e-14, atol=1e-14)
    final.reduce()
    trained, _ = tallies(final)
    assert trained.samples == 3
    assert trained.mean_loss == pytest.approx(loss.item())


def test_microbatches_in_flight_do_not_meet():
    middle = stage(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    xs = [randn(2, 4), 2 * randn(2, 4)]
    for mb, x in enumerate(xs):
        middle.forward(mb, (x,), 0)
    assert middle.in_flight == 2
    backs = [middle.backward(mb, (torch.ones(2, 4).double(),), 0)[0] for mb in range(2)]
    for mb, x in enumerate(xs):
        alone = stage(middle.module)
        alone.forward(0, (x,), 0)
        assert torch.equal(alone.backward(0, (torch.ones(2, 4).double(),), 0)[0], backs[mb])


def test_tuples_go_in_and_out_with_a_gradient_for_each_floating_point_tensor():
    class Ids(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            x, ids = pair
            return 2 * x, ids + 1, 3 * x

    middle = stage(Ids(), enters=2)
    x, ids = randn(2, 3), torch.arange(2)
    double, more, triple = middle.forward(0, (x, ids), 0)
    assert more.tolist() == [1, 2]
    assert torch.equal(triple, 3 * x)
    backs = middle.backward(0, (torch.ones_like(double), torch.ones_like(triple)), 0)
    assert [back.tolist() for back in backs] == [[[5.0] * 3] * 2]


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return 2 * pair[0]


def test_an_input_that_the_plan_says_is_not_used_has_no_gradient():
    middle = stage(First(), enters=2, entering=Gradients((True, True), (True, False)))
    (output,) = middle.forward(0, (randn(2), randn(2)), 0)
    (used,) = middle.backward(0, (torch.ones_like(output),), 0)
    assert used.tolist() == [2.0, 2.0]


def test_an_input_that_is_not_used_against_the_plan_stops_the_training():
    """Zeros in its place would move weights that one process leaves alone."""
    middle = stage(First(), enters=2)
    (output,) = middle.forward(4, (randn(2), randn(2)), 0)
    with pytest.raises(TrainingStopped, match="no gradient reaches input 1 of stage 1 in microbatch 4, and"):
        middle.backward(4, (torch.ones_like(output),), 0)


def test_an_input_that_is_used_against_the_plan_stops_the_training():
    """Weights before it would miss its gradient."""
    middle = stage(Join(), enters=2, entering=Gradients((True, True), (True, False)))
    output = middle.forward(4, (randn(2), randn(2)), 0)[0]
    with pytest.raises(
        TrainingStopped, match="a gradient reaches input 1 of stage 1 in microbatch 4, and the"
    ):
        middle.backward(4, (torch.ones_like(output),), 0)


def test_an_output_that_depends_on_weights_against_the_plan_stops_the_training():
    never = Gradients((True, False), (True, False))
    middle = stage(Fork(nn.Linear(3, 3)), leaves=2, leaving=never)
    with pytest.raises(
        TrainingStopped, match="output 1 of stage 1 depends on weights in microbatch 4, and the"
    ):
        middle.forward(4, (randn(2, 3),), 0)


class Trimmed(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x, x + 1) if self.training else (x,)


def test_an_evaluation_may_hand_on_fewer_tensors():
    middle = stage(Trimmed(), leaves=2, leaving=Gradients((True, True), (True, True)))
    slice = middle.module.slice
    middle.module._evaluated = replace(slice, leaves=slice.leaves[:1], leaves_grad=None)
    assert len(middle.forward(0, (randn(2),), 0)) == 2
    assert len(middle.predict((randn(2),))) == 1


class Counts(nn.Module):
    """Hands on a tensor of its own, and changes it at its next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = (torch.zeros(1),)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count[0].add_(1)
        return x, self.count[0]


def test_what_has_no_gradient_is_sent_as_a_copy():
    middle = stage(Counts(), leaves=2, leaving=Gradients((True, False), (True, False)))
    sent = [middle.forward(mb, (randn(2),), 0)[1] for mb in range(3)]
    assert [float(count) for count in sent] == [1.0, 2.0, 3.0]


def test_an_output_that_has_no_gradient_leaves_its_weights_alone():
    middle = stage(Fork(nn.Linear(3, 3)), leaves=2, leaving=Gradients((True, True), (False, True)))
    _, skip = middle.forward(0, (randn(2, 3),), 0)
    (back,) = middle.backward(0, (torch.ones_like(skip),), 0)
    assert back.tolist() == [[1.0] * 3] * 2
    assert gradients(middle) == []  # not zeros, which weight decay would follow


def test_an_output_that_is_an_input_hands_its_gradient_through():
    """Fork returns its own input beside its layer's output: the skip connection crosses the cut."""
    middle = stage(Fork(nn.Linear(3, 3, bias=False)))
    x = randn(2, 3)
    output, skip = middle.forward(0, (x,), 0)
    assert torch.equal(skip, x)
    (back,) = middle.backward(0, (torch.zeros_like(output), torch.ones_like(skip)), 0)
    assert torch.equal(back, torch.ones_like(x))
    joined = stage(Join(), enters=2)
    joined.forward(0, (output, skip), 0)
    assert [t.tolist() for t in joined.backward(0, (torch.ones(2, 3).double(),), 0)] == [[[1.0] * 3] * 2] * 2


def test_a_backward_of_another_version_than_its_forward_s_is_refused():
    middle = stage(nn.Linear(2, 2))
    (output,) = middle.forward(0, (randn(1, 2),), 0)
    middle.step(keep=True)
    with pytest.raises(AssertionError, match="microbatch 0 ran forward over 0, not 1"):
        middle.backward(0, (torch.ones_like(output),), 1)


def test_a_microbatch_may_not_outlive_its_window():
    middle = stage(nn.Linear(2, 2))
    middle.forward(5, (randn(1, 2),), 0)
    with pytest.raises(AssertionError, match=r"microbatches \[5\] outlived their window"):
        middle.begin_window()


# A split backward


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_the_two_halves_of_a_backward_equal_the_whole(place):
    def make() -> Stage:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
        return last(module) if place == "last" else stage(module, index=place == "middle")

    whole, split = make(), make()
    inputs = [randn(3, 4), 2 * randn(3, 4)]
    grads = () if place == "last" else (randn(3, 3),)
    for mb, x in enumerate(inputs):
        for of in (whole, split):
            of.forward(mb, (x,), 0, Target(LABELS, 3.0, 0.5), Saving(split=of is split))
    wanted = [whole.backward(mb, grads, 0) for mb in range(2)]
    halves = [split.backward_input(mb, grads, 0) for mb in range(2)]  # both, before either weight gradient
    assert gradients(split) == []
    assert split.in_flight == 2  # what W needs is still held
    for mb in range(2):
        split.backward_weight(mb, 0)
    assert split.in_flight == 0
    torch.testing.assert_close(halves, wanted, rtol=0, atol=0)
    assert len(halves[0]) == (0 if place == "first" else 1)
    torch.testing.assert_close(gradients(split), gradients(whole), rtol=0, atol=0)
    for of in (whole, split):
        of.reduce()
        of.step(keep=False)
    for a, b in zip(whole.module.state_dict().values(), split.module.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_split_backward_of_a_stage_without_parameters():
    middle = stage(nn.Sequential(nn.Tanh()))
    (output,) = middle.forward(0, (torch.zeros(2).double(),), 0, saving=SPLIT)
    (back,) = middle.backward_input(0, (torch.ones_like(output),), 0)
    middle.backward_weight(0, 0)
    assert back.tolist() == [1.0, 1.0]
    assert middle.in_flight == 0


# What a stage must not touch


def test_a_first_layer_that_works_in_place_gets_a_copy():
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    x = randn(2, 3)
    before = x.clone()
    careful = stage(module, copies_input=True)
    (output,) = careful.forward(0, (x,), 0)
    (back,) = careful.backward(0, (torch.ones_like(output),), 0)
    assert torch.equal(x, before)
    assert bool((back[before < 0] == 0).all())
    assert bool((before < 0).any())
    careful.predict((x,))
    assert torch.equal(x, before)


def test_a_backward_is_over_the_weights_of_its_forward():
    middle = stage(nn.Linear(2, 2, bias=False))
    weight = middle.module.get_parameter("0.weight")
    before = weight.detach().clone()
    for mb in range(2):
        middle.forward(mb, (randn(1, 2),), 0)
    middle.backward(0, (torch.ones(1, 2).double(),), 0)
    middle.reduce()
    middle.step(keep=True)
    assert not torch.equal(weight, before)
    (back,) = middle.backward(1, (torch.ones(1, 2).double(),), 0)
    torch.testing.assert_close(back, before.sum(0, keepdim=True))


# Loss and evaluation


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_update_and_says_where(value):
    final = stage(nn.Linear(3, 3), 3, task=Task(lambda output, labels: output.mean() * 0 + value))
    before = {name: tensor.clone() for name, tensor in final.module.state_dict().items()}
    with pytest.raises(TrainingStopped) as stop:
        final.forward(7, (randn(3, 3),), 0, Target(LABELS, 3.0, 1.0))
    first = " (first in the loss itself, which needs weight= where targets may not count)" * math.isnan(value)
    assert str(stop.value).startswith(
        f"the loss of microbatch 7 is {value}{first} at stage 3, update 0: stopped before the update"
    )
    assert "\n" not in str(stop.value)
    assert final.weights.updates == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in final.module.state_dict().items())


class Root(nn.Module):
    """Has a gradient of infinity at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0).sqrt()


def steep() -> nn.Sequential:
    """Its loss is finite; the gradient of its first layer is not where an input is 0."""
    first = nn.Linear(3, 3)
    nn.init.zeros_(first.weight)
    nn.init.zeros_(first.bias)
    return nn.Sequential(OrderedDict(first=first, root=Root(), head=nn.Linear(3, 3)))


def test_the_layer_where_a_loss_stopped_being_finite_is_named():
    module = nn.Sequential(OrderedDict(fine=nn.Linear(3, 3), bad=nn.Linear(3, 3), head=nn.Linear(3, 3)))
    nn.init.constant_(module.bad.weight, math.inf)
    final = last(module, 2)
    with pytest.raises(
        TrainingStopped, match=r"microbatch 4 is nan \(first in layer bad\) at stage 2, update 0"
    ):
        final.forward(4, (randn(3, 3),), 0, Target(LABELS, 3.0, 1.0))
    with pytest.raises(TrainingStopped, match="first in what came from layer 4, in an earlier stage"):
        last(nn.Linear(3, 3), 2).forward(4, (randn(3, 3) / 0,), 0, Target(LABELS, 3.0, 1.0))


def test_a_gradient_that_is_not_finite_stops_before_the_update_and_names_microbatch_and_layer():
    final = last(steep())
    final.forward(3, (randn(3, 3),), 0, Target(LABELS, 3.0, 1.0))
    with pytest.raises(
        TrainingStopped,
        match=r"gradient of microbatch 3 is not finite \(first in layer root\) at stage 1, up",
    ):
        final.backward(3, (), 0)
    assert final.weights.updates == 0


@pytest.mark.parametrize("halves", [False, True])
def test_the_first_stage_hands_no_gradient_on_and_names_what_came(halves):
    first = stage(nn.Sequential(OrderedDict(first=nn.Linear(3, 3))), 0)
    for mb in range(2):
        first.forward(mb, (randn(3, 3),), 0, saving=Saving(split=halves and mb == 1))
    first.backward(0, (randn(3, 3),), 0)
    nothing = (torch.full((3, 3), math.nan).double(),)
    if halves:
        first.backward_input(1, nothing, 0)
    with pytest.raises(
        TrainingStopped, match=r"microbatch 1 is not finite \(first in what came back to layer 0 from a l"
    ):
        first.backward_weight(1, 0) if halves else first.backward(1, nothing, 0)


def test_a_gradient_that_only_the_sum_shows_names_weights_and_microbatches():
    first = stage(nn.Linear(3, 3), 0)
    for mb in (4, 5):
        first.forward(mb, (randn(3, 3),), 0)
        first.backward(mb, (randn(3, 3),), 0)
    first.weights.leaf(0, "0.weight").grad[0, 0] = math.inf
    with pytest.raises(
        TrainingStopped, match=r"the gradient of 0.weight, microbatches 4 to 5, is not finite at stage 0, upd"
    ):
        first.reduce()


def test_an_activation_that_is_not_finite_never_leaves_its_stage():
    module = nn.Sequential(OrderedDict(fine=nn.Linear(3, 3), bad=nn.Linear(3, 3), relu=nn.ReLU(inplace=True)))
    nn.init.constant_(module.bad.bias, math.inf)
    for index in range(2):
        with pytest.raises(
            TrainingStopped, match=r"activation of microbatch 4 is not finite \(first in layer bad\) at stage"
        ):
            stage(module, index).forward(4, (randn(3, 3),), 0)
    with pytest.raises(TrainingStopped, match="first in what came from the data"):
        stage(nn.Linear(3, 3), 0).forward(4, (randn(3, 3) / 0,), 0)


class Masked(nn.Linear):
    """Hands a mask on beside what it computes."""

    def forward(self, x):
        return super().forward(x), torch.full((3, 3), -math.inf, dtype=x.dtype).triu(1)


def test_a_mask_may_have_infinities():
    (_, mask) = stage(Masked(3, 3), 0).forward(4, (randn(3, 3),), 0)
    assert mask.isinf().any()


def test_an_update_whose_gradient_is_not_finite_can_be_skipped_and_is_counted():
    final = last(steep(), skips=True)
    before = [p.clone() for p in final.module.parameters()]
    for update, skipped in enumerate((1, 1)):
        final.forward(update, (randn(3, 3),), update, Target(LABELS, 3.0, 1.0))
        final.backward(update, (), update)
        final.reduce()
        final.step(keep=False)
        assert (final.skipped, final.weights.updates) == (update + skipped, update + 1)
    assert all(torch.equal(p, old) for p, old in zip(final.module.parameters(), before, strict=True))
    nn.init.ones_(final.module.first.bias)
    final.forward(2, (randn(3, 3),), 2, Target(LABELS, 3.0, 1.0))
    final.backward(2, (), 2)
    final.reduce()
    final.step(keep=False)
    assert final.skipped == 2
    assert not torch.equal(final.module.head.weight, before[2])


def trained(of: Stage, update: int, norm: float | None = None) -> None:
    of.forward(update, (randn(3, 3),), update, Target(LABELS, 3.0, 1.0))
    of.backward(update, (), update)
    of.reduce()
    of.step(keep=False, norm=None if norm is None else torch.tensor(norm, dtype=torch.float64))


def test_an_update_whose_norm_is_not_finite_elsewhere_is_skipped_with_its_statistics():
    final = last(nn.Sequential(OrderedDict(a=nn.BatchNorm1d(3))), skips=True, clip_grad_norm=1.0)
    before = {name: tensor.clone() for name, tensor in final.module.state_dict().items()}
    trained(final, 0, norm=math.inf)
    assert final.skipped == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in final.module.state_dict().items())
    trained(final, 1, norm=2.0)
    assert final.skipped == 1
    assert not any(torch.equal(t, before[name]) for name, t in final.module.state_dict().items())


def test_a_sparse_gradient_is_clipped_as_the_dense_one_of_its_sum():
    ended = []
    for sparse in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(OrderedDict(a=nn.Embedding(5, 3, sparse=sparse), b=nn.Linear(3, 3)))
        final = last(module, 0, clip_grad_norm=0.01)
        final.forward(0, (torch.tensor([1, 1, 2]),), 0, Target(LABELS, 3.0, 1.0))
        final.backward(0, (), 0)
        final.reduce()
        final.step(keep=False)
        ended.append([float(p.detach().sum()) for p in module.parameters()])
    assert ended[1] == pytest.approx(ended[0], rel=1e-12)


def test_a_loss_that_is_not_finite_is_skipped_and_not_counted():
    final = last(nn.Linear(3, 3), skips=True)
    final.forward(0, (randn(3, 3) / 0,), 0, Target(LABELS, 3.0, 1.0))
    final.backward(0, (), 0)
    final.reduce()
    final.step(keep=False)
    assert final.skipped == 1
    assert tallies(final)[0].samples == 0


def test_predict_is_in_evaluation_mode_and_leaves_training_mode():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    final = last(module)
    final.forward(0, (randn(3, 3),), 0, Target(LABELS, 3.0, 1.0))
    final.backward(0, (), 0)
    before = {name: tensor.clone() for name, tensor in final.module.state_dict().items()}
    outputs = [final.predict((randn(3, 3),), Target(LABELS, 3.0, 1.0)) for _ in range(2)]
    assert outputs == [(), ()]
    assert final.module.training
    assert all(layer.training for layer in final.module.children())
    assert all(torch.equal(tensor, before[name]) for name, tensor in final.module.state_dict().items())
    assert final.in_flight == 0
    final.module.eval()
    (wanted,) = final.module(randn(3, 3))
    evaluated = tallies(final)[1]
    assert evaluated.samples == 6
    assert evaluated.mean_loss == pytest.approx(functional.cross_entropy(wanted, LABELS).item())
    accuracy = (wanted.argmax(1) == LABELS).double().mean().item()
    assert Classification().values(evaluated)["acc"] == pytest.approx(accuracy)


def test_predict_hands_on_plain_tensors_and_training_mode_survives_an_error():
    middle = stage(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9)))
    x = randn(2, 3)
    (a,), (b,) = middle.predict((x,)), middle.predict((x,))
    assert torch.equal(a, b)
    assert not a.requires_grad
    with pytest.raises(RuntimeError):
        middle.predict((randn(2, 5),))
    assert middle.module.training


def test_smoothing_is_for_training_alone():
    smooth = stage(nn.Linear(3, 3), task=Classification(label_smoothing=0.5))
    x = randn(3, 3)
    smooth.forward(0, (x,), 0, Target(LABELS, 3.0, 1.0))
    smooth.backward(0, (), 0)
    smooth.reduce()
    smooth.predict((x,), Target(LABELS, 3.0, 1.0))
    (output,) = smooth.module(x)
    trained, evaluated = tallies(smooth)
    assert evaluated.mean_loss == pytest.approx(functional.cross_entropy(output, LABELS).item())
    assert trained.mean_loss == pytest.approx(
        functional.cross_entropy(output, LABELS, label_smoothing=0.5).item()
    )


# Tasks


class Heads(nn.Module):
    """(x, skip) -> two outputs of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.names = nn.Linear(3, 2), nn.Linear(3, 3)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.boxes(pair[0]), self.names(pair[1])


def box_and_name(outputs: Value, targets: Value) -> Tensor:
    (boxes, scores), (corners, labels) = outputs, targets
    return functional.mse_loss(boxes, corners) + functional.cross_entropy(scores, labels)


def right_names(outputs: Value, targets: Value) -> Tensor:
    return (outputs[1].argmax(1) == targets[1]).double().mean()


def test_inputs_outputs_and_targets_may_be_tuples():
    task = Task(box_and_name, {"names": right_names})
    final = stage(Heads(), task=task, enters=2)
    inputs, targets = (randn(3, 3), 2 * randn(3, 3)), (randn(3, 2), LABELS)
    plain = tuple(t.clone().requires_grad_() for t in inputs)
    loss = box_and_name(final.module(*plain), targets)
    wanted = torch.autograd.grad(0.25 * loss, plain)
    assert final.forward(0, inputs, 0, Target(targets, 3.0, 0.25)) == ()
    torch.testing.assert_close(final.backward(0, (), 0), wanted, rtol=1e-14, atol=1e-14)
    final.reduce()
    assert final.predict(inputs, Target(targets, 3.0, 1.0)) == ()
    right = right_names(final.module(*inputs), targets).item()
    for tally in tallies(final):
        assert tally.mean_loss == pytest.approx(loss.item())
        assert (tally.samples, task.values(tally)) == (3, {"names": pytest.approx(right)})


@pytest.mark.parametrize("halves", [False, True])
def test_a_microbatch_whose_targets_are_all_ignored_trains_nothing_and_stops_nothing(halves):
    """Its mean loss is NaN in torch, as that of no target."""
    final, ignored = last(nn.Linear(3, 3)), torch.full((3,), -100)
    final.forward(0, (randn(3, 3),), 0, Target(ignored, 0.0, 0.0), Saving(split=halves))
    (back,) = final.backward_input(0, (), 0) if halves else final.backward(0, (), 0)
    if halves:
        final.backward_weight(0, 0)
    assert not back.any()
    assert not any(gradient.any() for gradient in gradients(final))
    final.reduce()
    final.step(keep=False)
    assert final.skipped == 0
    assert final.take_losses() == [0.0]
    final.predict((randn(3, 3),), Target(ignored, 0.0, 0.0))
    for tally in tallies(final):
        assert (tally.samples, tally.weight, tally.loss, tally.sums) == (3, 0, 0, {"acc": [0, 0]})


def test_a_batch_in_which_nothing_counts_has_no_mean_loss_and_stops():
    final, ignored = last(nn.Linear(3, 3), 2), torch.full((3,), -100)
    with pytest.raises(TrainingStopped, match="microbatch 0, update 0, none of the targets counts: leave it"):
        final.forward(0, (randn(3, 3),), 0, Target(ignored, 0.0, 0.5))


# Through torch.compile


@pytest.mark.slow
def test_a_compiled_stage_finds_each_version_in_forward_and_backward(monkeypatch):
    # All of torch.compile but the last step, the generated C++, which takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    def run(compile: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh())
        middle = stage(module, compile=compile)
        seen = []
        for version in range(3):  # microbatch 0 stays open over an update
            (output,) = middle.forward(version, (randn(5, 4) + version,), version)
            seen.append(output)
            if version < 2:
                seen += middle.backward(version, (randn(5, 3),), version) if version else ()
                for leaf in middle.weights.leaves(version):
                    leaf.grad = leaf.grad if leaf.grad is not None else torch.ones_like(leaf)
                middle.reduce()
                middle.step(keep=version == 0)
        seen += middle.backward(0, (randn(5, 3),), 0)
        seen += middle.backward(2, (randn(5, 3),), 2)
        seen += [*gradients(middle, 0), *gradients(middle, 2), *middle.predict((randn(5, 4),))]
        return [*seen, *(buffer.double() for buffer in module.buffers())]

    plain, compiled = run(False), run(True)
    assert len(plain) == len(compiled) > 8
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
