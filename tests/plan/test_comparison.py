"""Stages are compared with the model, and a batch with its microbatches, before the first update."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count, cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss, rrelu

from pipetrain import ConfigError, Pipeline, Pop, Stash
from pipetrain.config.settings import Settings
from pipetrain.model.chain import network_of
from pipetrain.model.network import Network
from pipetrain.model.specs import Value, ValueSpec
from pipetrain.models import gpt
from pipetrain.plan.comparison import compare_loss, compare_microbatches, compare_stages
from pipetrain.plan.make_plan import estimate_model, make_plan
from pipetrain.plan.plan import Plan, Samples
from pipetrain.plan.verification import Draft
from pipetrain.schedule.programs import one_f_one_b
from pipetrain.tasks import Task
from tests.support.cases import options_of
from tests.support.models import Join, skipping

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
TOKENS, LABELS = torch.arange(48).reshape(8, 6) % 5, torch.arange(8) % 3
SGD = partial(torch.optim.SGD, lr=0.1)


class WithTerm(nn.Module):
    """Returns a term over its batch beside its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inner(x).relu()
        return self.head(h), h.std(0).mean()


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Counting:
    """A loss that counts its calls."""

    calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, targets)


def sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def trained(model: nn.Module, loss: Any, inputs: Tensor, microbatches: int = 4) -> float:
    with Pipeline(model, loss, SGD, microbatches=microbatches, device="cpu", threads=1) as pipe:
        return pipe.step(inputs, LABELS)


SAMPLES_TOGETHER = [
    (WithTerm, lambda outputs, y: cross_entropy(outputs[0], y) + 0.1 * outputs[1], INPUTS),
    (WithTerm, lambda outputs, y: outputs[1], INPUTS),
    (sequence(nn.Linear(4, 8), Centred(), nn.Linear(8, 3)), cross_entropy, INPUTS),
    (
        sequence(nn.Embedding(5, 4, scale_grad_by_freq=True), Pooled(), nn.Linear(4, 3)),
        cross_entropy,
        TOKENS,
    ),
]


@pytest.mark.parametrize(("make", "loss", "inputs"), SAMPLES_TOGETHER)
def test_what_looks_at_several_samples_at_once_is_refused_unless_there_is_one_microbatch(make, loss, inputs):
    with pytest.raises(ConfigError, match=r"8 samples .* differs by .* give weight=.* set microbatches=1"):
        trained(make(), loss, inputs)
    trained(make(), loss, inputs, microbatches=1)


def test_to_evaluate_it_is_right():
    """A batch of an evaluation is one microbatch."""
    model = nn.Sequential(nn.Linear(4, 8), Centred(), nn.Linear(8, 3))
    wanted = cross_entropy(model(INPUTS), LABELS).item()
    with Pipeline(model, cross_entropy, SGD, microbatches=4, device="cpu", threads=1) as pipe:
        assert pipe.evaluate([(INPUTS, LABELS)])["loss"] == pytest.approx(wanted)
        with pytest.raises(ConfigError, match="differs by"):
            pipe.step(INPUTS, LABELS)


def test_what_takes_each_sample_for_itself_is_let_through_with_batchnorm_and_dropout_held():
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    for layers in (
        [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)],
        [nn.Embedding(5, 4), attention, Pooled(), nn.Linear(4, 3)],
    ):
        trained(nn.Sequential(*layers), cross_entropy, INPUTS if len(layers[0].weight) == 8 else TOKENS)


def test_a_difference_that_is_rounding_is_not_refused():
    """Large terms that cancel leave in float32 what the order of the sums makes of the small ones."""
    factors = torch.tensor([1e8, -1e8, 1.0])
    labels = torch.tensor([0, 2, 2, 2, 1, 2, 2, 2])

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.mul(factors[y, None]).mean()

    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with Pipeline(model, loss, SGD, microbatches=4, device="cpu", threads=1) as pipe:
        pipe.step(torch.ones(8, 4), labels)


class Drawing(nn.Module):
    """Draws in evaluation too, as the noise of a VAE does."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draw(x)


DRAWS: list[Callable[[Tensor], Tensor]] = [
    torch.randn_like,
    lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    lambda x: rrelu(x - 1, training=True),
    lambda x: dropout(x, 0.5, training=True),
    lambda x: x * torch.randint(9, (x.shape[0], 1)),
    lambda x: torch.randn(x.shape[1], x.shape[0], 2)[..., 0].T * x,
    lambda x: x * random.choice([1, 2]),
    lambda x: x + torch.from_numpy(np.random.randn(*x.shape)).to(x),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_layer_that_draws_is_compared_by_the_same_draws(draw):
    """As far as torch draws them."""
    layers = nn.Linear(4, 8), Drawing(draw), nn.Linear(8, 3)
    trained(nn.Sequential(*layers), cross_entropy, INPUTS)
    if draw in DRAWS[:-2]:
        with pytest.raises(ConfigError, match="looks at several samples at once"):
            trained(nn.Sequential(layers[0], Centred(), *layers[1:]), cross_entropy, INPUTS)


def test_a_permutation_of_the_samples_looks_at_several_at_once():
    mixed = Drawing(lambda x: x[torch.randperm(x.shape[0])])
    with pytest.raises(ConfigError, match="looks at several samples at once"):
        trained(nn.Sequential(nn.Linear(4, 8), mixed, nn.Linear(8, 3)), cross_entropy, INPUTS)


def test_trials_call_a_copy_of_a_loss_that_counts_its_calls():
    """Of a function with its variables too."""
    loss, calls = Counting(), 0

    def counting(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(outputs, targets)

    trained(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), loss, INPUTS)
    trained(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), counting, INPUTS)
    assert (loss.calls, calls) == (4, 4)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_loss_may_write_its_targets_which_trials_leave_as_they_are(microbatches):
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs, y.sub_(1).clamp_(min=0))

    model, labels = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), LABELS.clone()
    wanted = loss(model(INPUTS), labels.clone()).item()
    with Pipeline(model, loss, SGD, microbatches=microbatches, device="cpu", threads=1) as pipe:
        assert pipe.step(INPUTS, labels.clone()) == pytest.approx(wanted)


class Keeping(nn.Module):
    """Keeps what an auxiliary loss is made of, of which there is nothing before a forward."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return x


def test_a_loss_may_read_what_a_layer_keeps_though_there_is_none_before_a_forward():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) + term(layer.kept)

    layer = Keeping()
    model, term = nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(6, 3)), lambda kept: kept.mean(0).norm()
    with pytest.raises(ConfigError, match="looks at several samples at once"):
        trained(model, loss, INPUTS)
    assert layer.kept is None
    term = lambda kept: kept.abs().mean()  # noqa: E731
    wanted, layer.kept = loss(model(INPUTS), LABELS).item(), None
    assert trained(model, loss, INPUTS) == pytest.approx(wanted)


# The stages and the model

NUMBERS = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))


def planned(model: nn.Module, cuts: list[int], inputs: Value, *options: str) -> tuple[Plan, Network]:
    overrides = [f"partition={cuts}", "batch_size=4", "microbatches=2", *options]
    settings = Settings.composed(options_of(["data=digits", *overrides]), "1f1b", len(cuts) + 1)
    example = ValueSpec.in_batch(inputs)
    network = network_of(model, example, settings.precision == "bf16")
    estimated = estimate_model(settings, network.spare(), example, Samples.of([4], [2]))
    return make_plan(Draft.from_settings(settings, one_f_one_b), estimated), network


def verify(model: nn.Module, cuts: list[int], inputs: Value = NUMBERS, *options: str) -> None:
    compare_stages(*planned(model, cuts, inputs, *options), inputs)


class Says(nn.Module):
    """Returns what it is given, and leaves something in a box."""

    def __init__(self, box: dict[str, object], what: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.box, self.what = box, what

    def forward(self, x: Tensor) -> Tensor:
        self.box["left"] = self.what(x)
        return x


class Hears(nn.Module):
    def __init__(self, box: dict[str, object], when: bool | None = None) -> None:
        super().__init__()
        self.box, self.when = box, when

    def forward(self, x: Tensor) -> Tensor:
        return x * self.box.get("left", 1) if self.when in (None, self.training) else x


def exchanging(what: Callable[[Tensor], object], when: bool | None = None) -> nn.Sequential:
    box: dict[str, object] = {}
    return nn.Sequential(nn.Linear(6, 6), Says(box, what), nn.Linear(6, 6), Hears(box, when))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(exchanging, lambda x: float(x.detach().sum())), "training .*: output 0 differs"),
        (partial(exchanging, lambda x: 2, False), "evaluation .*: output 0 differs"),
        (partial(exchanging, lambda x: x), "training .*: (output 0|the gradient of 0.weight) differs"),
    ],
)
def test_what_layers_exchange_across_a_cut_is_refused_and_within_a_stage_it_is_not(make, says):
    with pytest.raises(ConfigError, match=f"over stages the model would not compute in {says}"):
        verify(make(), [2])
    verify(make(), [1])


def tied() -> nn.Sequential:
    shared = nn.Linear(6, 6)
    stash = Stash()
    layers = [shared, stash, nn.Dropout(0.5), nn.BatchNorm1d(6), nn.ReLU(inplace=True), Pop(stash), Join()]
    return nn.Sequential(*layers, shared)


def with_a_function() -> nn.Sequential:
    """What cannot be told apart by copies is not compared."""
    model = exchanging(lambda x: float(x.detach().sum()))
    model[0].function = lambda: model
    return model


@pytest.mark.parametrize(
    ("make", "cuts", "inputs"),
    [
        (tied, [3, 5], NUMBERS),
        (skipping, [2, 4], torch.rand(2, 3, 32, 32)),
        (lambda: gpt(1, 2, 8, 5, 11, dropout=0.5, tied=True), [1, 3], torch.arange(10).reshape(2, 5)),
        (with_a_function, [2], NUMBERS),
    ],
)
def test_a_model_whose_layers_return_all_is_the_same_over_stages_and_stays_as_it_is(make, cuts, inputs):
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    verify(model, cuts, inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


class Balanced(nn.Module):
    """Keeps an auxiliary loss, as mixtures of experts do."""

    aux: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.aux = y.abs().mean()
        return y


class Noting(Balanced):
    """Adds its auxiliary loss to a list of all layers."""

    def __init__(self, terms: list[Tensor]) -> None:
        super().__init__()
        self.note = lambda term: terms.append(term)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.note(self.aux)
        return y


def test_terms_that_layers_of_several_stages_add_to_one_list_are_refused():
    """A rank has those of its own layers alone, though here all run in one process."""
    terms: list[Tensor] = []

    def taken() -> Any:
        total = sum(terms)
        terms.clear()
        return total

    model, task = nn.Sequential(Noting(terms), Noting(terms)), Task(lambda x, y: mse_loss(x, y) + taken())
    for cuts in ([], [1]):
        plan, network = planned(model, cuts, NUMBERS)
        terms.clear()
        says = r"keeps of its forward.*weight 0\.inner\.weight\), which another stage has"
        with pytest.raises(ConfigError, match=says) if cuts else nullcontext():
            compare_loss(plan, network, task, NUMBERS, NUMBERS)


class Advancing(nn.Module):
    """Draws from a generator, or takes the next number of an iterator."""

    def __init__(self, numbers: Any) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.numbers, torch.Generator):
            return x + torch.rand(x.shape, generator=self.numbers)
        return x * next(self.numbers)


class CountsInArrays(nn.Module):
    """Counts its forwards where no attribute changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = np.zeros(1), bytearray(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        self.log[0] += 1
        return x * float(self.calls[0])


@pytest.mark.parametrize("loss", [mse_loss, lambda outputs, y: mse_loss(outputs, y)])
def test_a_comparison_leaves_counts_in_arrays_as_they_are(loss):
    model = nn.Sequential(nn.Linear(6, 6), CountsInArrays(), nn.Linear(6, 6))
    plan, network = planned(model, [2], NUMBERS)
    calls = int(model[1].calls[0])
    compare_loss(plan, network, Task(loss), NUMBERS, NUMBERS)
    compare_stages(plan, network, NUMBERS)
    compare_microbatches(plan, network, Task(loss), NUMBERS, NUMBERS)
    assert (int(model[1].calls[0]), model[1].log[0]) == (calls, calls)


class CountsInABuffer(nn.Module):
    """Traced, as it is no nn.Sequential; counts its forwards, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_a_batch_and_its_microbatches_leave_the_buffers_of_a_trace_as_they_are():
    model = CountsInABuffer()
    plan, network = planned(model, [], NUMBERS)
    compare_microbatches(plan, network, Task(mse_loss), NUMBERS, NUMBERS)
    assert model.calls.item() == 0


class Decaying(nn.Module):
    """Writes its weight in its forward, and holds a buffer with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("twice", self.layer.weight * 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        return self.layer(x) + self.twice.detach().mean()


def test_a_loss_is_tried_where_a_layer_writes_its_weight_and_a_buffer_has_a_graph():
    model = nn.Sequential(Decaying(), nn.Linear(6, 6))
    before, held = model[0].layer.weight.detach().clone(), model[1].weight
    prove_loss_of(model, [], lambda: 0.0)
    assert torch.equal(model[0].layer.weight, before)
    with pytest.raises(ConfigError, match=r"the loss holds the parameter 1\.weight itself"):
        prove_loss_of(model, [], lambda: held.sum())


def test_a_layer_that_cannot_be_copied_does_not_hide_what_a_loss_reads():
    layers = [Balanced(), Balanced()]
    layers[1].rows = (row for row in range(9))  # type: ignore[assignment]
    says = r"keeps of its forward.*0\.inner\.weight\), which another"
    with open(os.devnull) as layers[1].log, pytest.raises(ConfigError, match=says):  # type: ignore[assignment]
        prove_loss_of(nn.Sequential(*layers), [1], lambda: layers[0].aux)


def test_layers_with_generators_and_iterators_of_their_own_are_the_same_over_stages():
    def over(*numbers: Any) -> None:
        layers = [layer for number in numbers for layer in (nn.Linear(6, 6), Advancing(number))]
        verify(nn.Sequential(*layers), [2])

    over(cycle([1.0, 2.0, 3.0]), cycle([3.0, 5.0]))
    over(count(1), count(2))
    over(torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    for shared in (cycle([1.0, 2.0, 3.0]), count(1), torch.Generator().manual_seed(1)):
        with pytest.raises(ConfigError, match=r"training .*: output 0 differs"):
            over(shared, shared)


class Around(nn.Module):
    """A module that is traced."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def prove_loss_of(model: nn.Module, cuts: list[int], term: Callable[[], Any]) -> None:
    plan, network = planned(model, cuts, NUMBERS)
    compare_loss(plan, network, Task(lambda outputs, y: mse_loss(outputs, y) + term()), NUMBERS, NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1e10, 0.0], ids=["cheap", "dear"])
def test_a_loss_may_read_its_own_stage_alone(most, monkeypatch):
    monkeypatch.setattr("pipetrain.plan.comparison.MOST_OF_A_TRACE", most)
    layers = [Balanced(), Balanced()]
    chain, traced, held = nn.Sequential(*layers), Around(*layers), layers[1].inner.weight
    allowed: list[tuple[nn.Module, list[int], Callable[[], Any]]] = [
        (chain, [], lambda: layers[0].aux + layers[1].aux),
        (
            chain,
            [1],
            lambda: layers[1].aux + layers[1].inner.weight.sum(),
        ),
        (traced, [], lambda: sum(p.abs().sum() for p in traced.parameters())),
        (traced, [1], lambda: traced.layers[1].inner.weight.sum()),
        (chain, [1], lambda: nn.Linear(1, 1)(torch.ones(1)).sum()),  # of another module
    ]
    for model, cuts, term in allowed:
        prove_loss_of(model, cuts, term)
    for model, cuts, term, says in [
        (
            chain,
            [1],
            lambda: layers[0].aux,
            r"keeps of its forward.*weight 0\.inner\.weight\), which another stage",
        ),
        (
            traced,
            [],
            lambda: layers[1].aux,
            r"keeps of its forward.*weight layers\.0.*, which a trace does not",
        ),
        (chain, [1], lambda: layers[0].inner.weight.sum(), r"a term of the weight 0\.inner\.weight"),
        (traced, [1], lambda: layers[0].inner.weight.sum(), r"a term of the weight layers\.0\.inner"),
        (chain, [], lambda: held.sum(), r"the loss holds the parameter 1\.inner\.weight itself"),
    ]:
        with pytest.raises(ConfigError, match=says):
            prove_loss_of(model, cuts, term)
    with pytest.raises(ConfigError, match=r"keeps of its forward.*weight 0\.inner\.weight\), which another"):
        prove_loss_of(chain, [1], lambda: layers[0].aux + layers[1].aux)
    assert [layer.aux for layer in layers] == [0.0, 0.0]


class Model(nn.Module):
    """A module, which is traced, whose forward is a function."""

    before: Tensor | None = None

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def keeps_the_one_before(self: Model, x: Tensor) -> Tensor:
    y = self.layer(x) + (0 if self.before is None else self.before.mean())
    self.before = y.detach()
    return y


def hooks_a_tensor(self: Model, x: Tensor) -> Tensor:
    y = self.layer(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y


def overwrites_what_its_backward_needs(self: Model, x: Tensor) -> Tensor:
    h = self.layer(x)
    y = self.layer(h)
    h.mul_(2)
    return h + y


def asks_for_a_dtype(self: Model, x: Tensor) -> Tensor:
    y = self.layer(x)
    return self.layer(y * 2 if y.dtype == torch.bfloat16 else y)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (keeps_the_one_before, "evaluation .*: output 0 differs"),
        (hooks_a_tensor, r"training .*: the gradient of layer\.weight differs"),
    ],
)
def test_what_no_trace_holds_is_refused_and_the_model_is_as_it_was(function, says):
    model = Model(function)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        ConfigError, match=f"in {says}.*its trace holds only operations of torch's, .*: make the"
    ):
        verify(model, [])
    assert model.training
    assert model.before is None
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)


def test_stages_are_compared_in_the_precision_of_the_run():
    verify(Model(asks_for_a_dtype), [])
    with pytest.raises(ConfigError, match=r"in training .*: output 0 differs"):
        verify(Model(asks_for_a_dtype), [], NUMBERS, "precision=bf16")


def refused() -> str:
    x = torch.ones(4, 6)
    with pytest.raises(ConfigError) as error:
        Pipeline(
            exchanging(lambda x: float(x.detach().sum())), mse_loss, partial(torch.optim.SGD, lr=0.1),
            sample=(x, x), partition=[2], device="cpu",
        )  # fmt: skip
    return str(error.value)


def test_a_pipeline_refuses_it_on_every_rank(ranks):
    for said in ranks(refused):
        assert (
            "over stages the model would not compute in training what it does in one process: output 0"
            in said
        )
