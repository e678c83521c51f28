"""One slice of a model: what it refuses, skips and counts. What it computes, and sends: whole/test_bugs."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetrain.config.rate import LearningRate
from pipetrain.errors import TrainingStopped
from pipetrain.model.chain import Chain
from pipetrain.model.network import Part, Slice, ValueId
from pipetrain.model.specs import Gradients, ValueSpec
from pipetrain.runtime.microbatch_feed import Target
from pipetrain.runtime.stage.stage import Stage
from pipetrain.runtime.stage.stage_factory import observers_of
from pipetrain.runtime.stage.stage_options import StageOptions
from pipetrain.tasks import Classification, Task
from tests.runtime.stage.test_weight_versions import Kernels
from tests.support.models import Fork, Join

LABELS = torch.tensor([0, 2, 1])
IGNORED = torch.full((3,), -100)
ONE, TWO_OF_ONE = Gradients((True, False), (True, False)), Gradients((True, True), (True, False))


def part_of(module: nn.Module, enters: int = 1, leaves: int = 1, before: int = 0, **known: Any) -> Part:
    """Return the layers of an nn.Sequential, or one layer named 0, as the end of a longer model.

    `enters` and `leaves`: how many tensors do; `before`: the number of layers of the model before these;
    `known`: more of a Slice.
    """
    layers = module._modules if isinstance(module, nn.Sequential) else {"0": module}
    model = nn.Sequential(*(nn.Identity() for _ in range(before)))
    model._modules = {f"before{name}": layer for name, layer in model._modules.items()} | layers
    slice = Slice(
        start=before,
        end=len(model),
        enters=tuple(ValueId(before - 1, number) for number in range(enters)),
        leaves=tuple(ValueId(len(model) - 1, number) for number in range(leaves)),
        form=ValueSpec((), single=enters == 1),
        **known,
    )
    return Chain(model).part(slice)


def stage(
    module: nn.Module,
    index: int = 1,
    enters: int = 1,
    leaves: int = 1,
    skips: bool = False,
    entering: Gradients | None = None,
    leaving: Gradients | None = None,
    **arguments: object,
) -> Stage:
    """A stage of these layers; of a later one, the layer before them is layer 4 of the model."""
    if not index:
        entering = Gradients((False,) * enters, (False,) * enters)
    known = {"enters_grad": entering, "leaves_grad": leaving}
    part = part_of(module.double(), enters, leaves, before=5 if index else 0, **known)
    sgd = partial(torch.optim.SGD, lr=0.1)
    chosen = {f.name: arguments.pop(f.name) for f in fields(StageOptions) if f.name in arguments}
    made = Stage(index, part, sgd, LearningRate(), StageOptions(**chosen), **arguments)  # type: ignore[arg-type]
    made.add_observers(*observers_of(made, skips))
    return made


def last(module: nn.Module, index: int = 1, **arguments: object) -> Stage:
    return stage(module, index, task=Classification(), **arguments)


def gradients(of: Stage, version: int = 0) -> list[Tensor]:
    return [leaf.grad.clone() for leaf in of.store.leaves(version) if leaf.grad is not None]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def updated(
    of: Stage,
    x: Tensor | None = None,
    target: Tensor = LABELS,
    weight: float = 3.0,
    norm: float | None = None,
) -> None:
    """Train a batch of one microbatch over the newest version."""
    version, share = of.store.newest, float(weight > 0)
    of.forward(version, (randn(3, 3) if x is None else x,), version, Target(target, weight, share))
    of.backward(version, (), version)
    of.reduce()
    of.step(keep=False, norm=None if norm is None else torch.tensor(norm, dtype=torch.float64))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Forward and backward


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return 2 * pair[0]


@pytest.mark.parametrize(
    ("module", "known", "says"),
    [
        # Zeros in the place of a missing gradient would move weights that one process leaves alone.
        (First(), {"enters": 2}, "no gradient reaches input 1"),
        # Weights before it would miss its gradient.
        (Join(), {"enters": 2, "entering": TWO_OF_ONE}, "a gradient reaches input 1"),
        (Fork(nn.Linear(3, 3)), {"leaves": 2, "leaving": ONE}, "output 1 depends on weights"),
    ],
)
def test_what_goes_against_the_plan_stops_the_training(module, known, says):
    middle, x = stage(module, **known), randn(2, 3)

    def trained() -> None:
        output = middle.forward(4, (x,) * known.get("enters", 1), 0)[0]
        middle.backward(4, (torch.ones_like(output),), 0)

    with pytest.raises(TrainingStopped, match=f"{says} in microbatch 4 of stage 1, and the plan, made"):
        trained()


# Numbers that are not finite


class Root(nn.Module):
    """Has a gradient of infinity at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def steep() -> nn.Sequential:
    """Its loss is finite; the gradient of its first layer is not where an input is 0."""
    first = nn.Linear(3, 3)
    nn.init.zeros_(first.weight)
    nn.init.zeros_(first.bias)
    return nn.Sequential(OrderedDict(first=first, root=Root(), head=nn.Linear(3, 3)))


def spoilt() -> nn.Sequential:
    """Its second layer makes infinities, and the third one works in their place."""
    bad = nn.Linear(3, 3)
    nn.init.constant_(bad.bias, math.inf)
    return nn.Sequential(OrderedDict(fine=nn.Linear(3, 3), bad=bad, after=nn.ReLU(inplace=True)))


NOTHING = Task(lambda output, labels: output.mean() * math.nan)
LOSS, ACTIVATION = r"loss of microbatch 4 is nan \(", r"activation of microbatch 4 is not finite \("


@pytest.mark.parametrize(
    ("make", "x", "says"),
    [
        (lambda: last(nn.Linear(3, 3), 2), math.inf, f"{LOSS}first in what came from layer 4, in an earlier"),
        (
            lambda: stage(nn.Linear(3, 3), 3, task=NOTHING),
            1,
            f"{LOSS}first in the loss itself, as where no t",
        ),
        (lambda: stage(spoilt()), 1, f"{ACTIVATION}first in layer bad"),
        (lambda: stage(nn.Linear(3, 3), 0), math.inf, f"{ACTIVATION}first in what came from the data"),
    ],
)
def test_what_is_not_finite_never_leaves_its_stage_and_where_it_began_is_named(make, x, says):
    with pytest.raises(TrainingStopped, match=says):
        make().forward(4, (randn(3, 3) * x,), 0, Target(LABELS, 3.0, 1.0))


class Masked(nn.Linear):
    """Hands a mask on beside what it computes."""

    def forward(self, x):
        return super().forward(x), torch.full((3, 3), -math.inf, dtype=x.dtype).triu(1)


def test_a_mask_may_have_infinities():
    assert stage(Masked(3, 3), 0).forward(4, (randn(3, 3),), 0)[1].isinf().any()


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (steep, {}),  # where an input of the root is 0
        (lambda: nn.Linear(3, 3), {"x": randn(3, 3) / 0}),
        (lambda: nn.BatchNorm1d(3, affine=False), {"x": randn(3, 3) / 0}),  # which has no gradient
        (lambda: nn.BatchNorm1d(3), {"norm": math.inf}),  # elsewhere
    ],
)
def test_an_update_of_what_is_not_finite_can_be_skipped_with_its_statistics_and_is_counted(make, bad):
    final = last(make(), skips=True, clip_grad_norm=1.0 if "norm" in bad else None)
    before = {name: tensor.clone() for name, tensor in final.module.state_dict().items()}

    def unchanged() -> set[bool]:
        return {torch.equal(tensor, before[name]) for name, tensor in final.module.state_dict().items()}

    for update in (1, 2):
        updated(final, **bad)
        assert (final._skipped, final.weights.updates, unchanged()) == (update, update, {True})
    assert final.take_trained().samples == (0 if "x" in bad else 6)
    for name, parameter in final.module.named_parameters():
        parameter.data += name == "first.bias"
    updated(final, norm=2.0 if "norm" in bad else None)
    assert (final._skipped, False in unchanged()) == (2, True)


# Loss and update


def test_the_gradient_of_the_loss_is_made_once_for_microbatches_of_one_share():
    final, made = last(nn.Linear(3, 3)), []
    for mb, share in enumerate((0.25, 0.25, 0.5)):
        final.forward(mb, (randn(3, 3),), 0, Target(LABELS, 3.0, share))
        with Kernels() as seen:
            final.backward(mb, (), 0)
        made.append(seen.ran["full_like"])
    assert made == [1, 0, 1]


@pytest.mark.parametrize(("device", "ran"), [("cpu", {"add_": 2}), ("cuda", {"_foreach_add_": 1})])
def test_a_gpu_alone_adds_a_microbatch_s_gradients_by_one_kernel(device, ran):
    """On a CPU to hold them beside the sum would cost more than to launch is worth."""
    first = stage(nn.Linear(3, 3), 0, device=device)
    for mb in range(2):
        first.forward(mb, (randn(4, 3),), 0)
        with Kernels() as seen:
            first.backward(mb, (randn(4, 3),), 0)
    assert {name: times for name, times in seen.ran.items() if "add_" in name} == ran


def test_a_sparse_gradient_is_clipped_as_the_dense_one_of_its_sum():
    ended = []
    for sparse in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(OrderedDict(a=nn.Embedding(5, 3, sparse=sparse), b=nn.Linear(3, 3)))
        updated(last(module, 0, clip_grad_norm=0.01), x=torch.tensor([1, 1, 2]))
        ended.append(module.state_dict())
    torch.testing.assert_close(*ended, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(3, 3)])
def test_what_has_no_gradient_has_a_norm_on_the_stage_s_device(module):
    """As a last stage without parameters; a rank adds it to those of its other stages."""
    norm = last(module, device="meta").gradient_norm()
    assert (norm.device.type, norm.shape) == ("meta", ())


def test_a_microbatch_whose_targets_are_all_ignored_trains_nothing_and_stops_nothing():
    """Its mean loss is NaN in torch, as that of no target."""
    final = last(nn.Linear(3, 3))
    before = final.module.state_dict()["0.weight"].clone()
    updated(final, target=IGNORED, weight=0.0)
    assert torch.equal(final.module.state_dict()["0.weight"], before)
    assert (final._skipped, final.counts.take_losses()) == (0, [0.0])
    final.predict((randn(3, 3),), Target(IGNORED, 0.0, 0.0))
    for tally in (final.take_trained(), final.take_evaluated()):
        assert (tally.samples, tally.weight, tally.loss, tally.sums) == (3, 0, 0, {"acc": [0, 0]})


@pytest.mark.slow
def test_a_compiled_stage_finds_each_version_in_forward_and_backward(monkeypatch):
    # All of torch.compile but the last step, the generated C++, which takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    def run(compile: bool) -> list[Tensor]:
        torch.manual_seed(0)
        middle = stage(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), compile=compile)
        seen = [middle.forward(mb, (randn(5, 4) + mb,), 0)[0] for mb in range(2)]
        seen += middle.backward(1, (randn(5, 3),), 0)
        middle.reduce()
        middle.step(keep=True)  # microbatch 0 stays open
        seen += middle.forward(2, (randn(5, 4),), 1)
        for mb, version in ((0, 0), (2, 1)):
            seen += [*middle.backward(mb, (randn(5, 3),), version), *gradients(middle, version)]
        return [*seen, *middle.predict((randn(5, 4),))]

    plain, compiled = run(False), run(True)
    assert len(plain) == 11
    torch.testing.assert_close(plain, compiled, rtol=1e-10, atol=1e-10)
