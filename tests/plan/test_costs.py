"""What slices of layers take and hold, by hand and from the estimates of real layers; a profile's file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipetrain.codec import Codecs, Half
from pipetrain.config.placement import places_of
from pipetrain.config.settings import Mode
from pipetrain.model.network import INPUT
from pipetrain.model.numerics import Numerics
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.model.trial_tensors import storage_of
from pipetrain.plan import costs
from pipetrain.plan.cost_estimate import Layer, estimate
from pipetrain.plan.costs import NO_TIME, Profile, Table, by_work, read_profile, refuse_other_layers
from pipetrain.plan.cut import cut_layers
from pipetrain.plan.memory_fit import known_state, optimizer_state
from pipetrain.schedule.actions import NO_PEER, Action, Op
from pipetrain.schedule.memory import Items
from pipetrain.schedule.timeline import Costs
from tests.support.plans import Skip, bytes_of, layer, prices_of, profile, table_of
from tests.support.refusals import refusal

FLOAT = 4
NEVER, SELECTIVE, ALWAYS = Mode.NEVER, Mode.SELECTIVE, Mode.ALWAYS

# Times. Messages take 1 s and 0.01 s a byte.

LAYERS = [
    layer("a", 1, 2, recorded_s=1.1, input_s=0, weight_s=2, step_s=10, output_bytes=100),
    layer("b", 2, 3, recorded_s=2.5, input_s=3, weight_s=0.25, step_s=20, output_bytes=200),
    layer("c", 4, 5, recorded_s=4.25, kept_s=4.1, input_s=1, weight_s=4.5),
]
TIMED = {"latency_s": 1, "s_per_byte": 0.01}
TABLE = table_of(LAYERS, **TIMED)


def costs_of(
    table: Table,
    cuts: list[int],
    split: bool = False,
    mode: Mode = NEVER,
    replicas: Sequence[int] = (1, 1, 1),
) -> Costs:
    cut = cut_layers({Size(1): list(table.layers)}, cuts, ValueSpec(table.inputs.specs))
    return table.costs(cut, [mode] * (len(cuts) + 1), split, Size(1), places_of(replicas, sum(replicas)))


def test_replicas_sum_up_their_gradient_in_a_ring():
    """Of r, each sends and receives w / r bytes 2 (r - 1) times."""
    table = table_of(LAYERS, trained=[300, 60, 600], **TIMED)
    costs = costs_of(table, [1, 2], replicas=[2, 1, 3])
    assert [costs(Action(stage, Op.REDUCE)) for stage in range(3)] == pytest.approx([2 + 6, 0, 4 + 16])
    alone = prices_of(table, [0], [1], microbatches=1)
    shared = alone.stages[0][NEVER]._replace(actions={Op.REDUCE: 1}, replicas=2)
    assert replace(alone, stages=[{NEVER: shared}]).price(0, 0, 1, NEVER).batch_s == 2 + 6


def test_each_action_costs_what_was_measured_of_it():
    for split, mode, seconds in (
        # F R B I W of b as a stage: a forward is recorded where its backward is split.
        (False, NEVER, [2, 2, 3, 3, 0.25]),
        (True, NEVER, [2.5, 2.5, 3, 3, 0.25]),
        (True, ALWAYS, [2, 2.5, 3, 3, 0.25]),
        (True, SELECTIVE, [2, 0.5 + 2.5 - 2, 3, 3, 0.25]),
    ):
        costs = costs_of(TABLE, [1, 2], split, mode)
        assert [costs(Action(1, op)) for op in (Op.F, Op.R, Op.B, Op.I, Op.W)] == pytest.approx(seconds)
        # The first stage has no I, so that its W is a whole backward, and nothing is recorded for it.
        assert [costs(Action(0, op)) for op in (Op.F, Op.B, Op.I, Op.W, Op.STEP)] == [1, 2, 0, 2, 10]
    frozen = costs_of(table_of(LAYERS, without_gradient=[0]), [1, 2], split=True)
    assert [frozen(Action(1, op)) for op in (Op.F, Op.B, Op.I, Op.W)] == [2, 3, 0, 3]


def test_a_stage_takes_time_beside_its_layers_once():
    a = layer("", 0.5, 0.25, recorded_s=0.75, input_s=2, weight_s=3, step_s=4)
    table = replace(TABLE, times=replace(TABLE.times, stage=a))
    costs = costs_of(table, [1], split=True)  # b and c
    assert [costs(Action(1, op)) for op in (Op.F, Op.I, Op.W, Op.STEP)] == [7.5, 6, 7.75, 24]
    assert [costs(Action(0, op)) for op in (Op.F, Op.I, Op.W, Op.STEP)] == [1.5, 0, 2.25, 14]


def test_messages_cost_the_bytes_on_the_wire_that_their_routes_carry():
    def sent(costs: Costs, op: Op, source: int, target: int) -> float:
        return costs(Action(source, op, peer=target))

    costs = costs_of(TABLE, [1, 2])
    assert [sent(costs, Op.SEND_F, stage, stage + 1) for stage in (0, 1)] == [2, 3]
    assert [sent(costs, Op.SEND_B, stage, stage - 1) for stage in (1, 2)] == [2, 3]
    assert [costs(Action(1, op, peer=NO_PEER)) for op in (Op.RECV_F, Op.RECV_B, Op.REDUCE)] == [0, 0, 0]
    skips = [Skip(0, (2,), 60), Skip(INPUT, (2,), 80, needs_grad=False)]
    costs = costs_of(table_of(LAYERS, skips=skips, **TIMED), [1, 2])
    assert sent(costs, Op.SEND_F, 0, 2) == pytest.approx(1 + 1.40)
    assert sent(costs, Op.SEND_B, 2, 0) == pytest.approx(1 + 0.60)
    assert sent(costs, Op.SEND_F, 0, 1) == pytest.approx(2)
    layers = estimate(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), entry(5, 4))
    times = profile([layer("a"), layer("b")], **TIMED)
    made = Table(layers, entry(5, 4), times, codecs=Codecs(forward=Half()))
    costs = made.costs(
        cut_layers({Size(5): layers}, [1], entry(4)), [NEVER] * 2, False, Size(5), [(0,), (1,)]
    )
    assert sent(costs, Op.SEND_F, 0, 1) == pytest.approx(1 + 0.01 * 5 * 8 * 2)
    assert sent(costs, Op.SEND_B, 1, 0) == pytest.approx(1 + 0.01 * 5 * 8 * FLOAT)
    items = made.sizes(1, 2, NEVER)
    assert (items.inputs, items.returned) == (5 * 8 * 2, 5 * 8 * FLOAT)


# Bytes


def entry(*shape: int) -> ValueSpec:
    return ValueSpec((TensorSpec(shape, torch.float32),))


def held(
    model: nn.Module, shape: tuple[int, ...], start: int, end: int, mode: Mode = NEVER, **others: object
) -> Items:
    layers = estimate(model.train(), entry(*shape))
    return Table(layers, entry(*shape), by_work(layers, 1), **others).sizes(start, end, mode)  # type: ignore[arg-type]


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 12), nn.Tanh(), nn.Linear(12, 10), nn.ReLU())


def test_the_last_stage_holds_the_targets_and_what_the_loss_saves(monkeypatch):
    whole = held(chain(), (2, 48), 2, 4)
    with_loss = held(chain(), (2, 48), 2, 4, loss=1000, targets=10)
    assert [b - a for a, b in zip(whole, with_loss, strict=True)] == [1010, 10, 10] + [0] * 13
    small = FLOAT * (12 * 10 + 10)  # of whose gradients a GPU holds two for a moment
    assert held(chain(), (2, 48), 0, 4, on_gpu=True).adding == small + FLOAT * (48 * 12 + 12)
    monkeypatch.setattr(costs, "SMALL_GRADIENT", FLOAT * 12 * 10)
    assert held(chain(), (2, 48), 0, 4, on_gpu=True).adding == small + FLOAT * 12
    assert held(chain(), (2, 48), 0, 2, loss=1000, targets=10) == held(chain(), (2, 48), 0, 2)


VIEWS = nn.Sequential(nn.Linear(48, 12), nn.Unflatten(1, (3, 4)), nn.Identity(), nn.Linear(4, 4))
NORM = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
INTO = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
OVERWRITTEN = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("model", "start", "end", "mode", "item", "elements"),
    [
        # A linear layer saves its input, tanh and ReLU their output, which is also what leaves.
        (chain(), 0, 4, NEVER, "saved", 2 * (48 + 12 + 10)),
        # What the first layer makes leaves and is not saved; it is held all the same.
        (chain(), 0, 1, NEVER, "saved", 2 * (48 + 12)),
        # A view is the storage that it is of.
        (VIEWS, 0, 4, NEVER, "saved", 2 * (48 + 12)),
        # Before its recomputation a microbatch holds its inputs, and a norm's statistics with their count.
        (chain(), 2, 4, ALWAYS, "before_r", 2 * 12),
        (NORM, 0, 2, ALWAYS, "before_r", 2 * 8 + 2 * 8 + 2),
        # A selective one keeps the results of products that nothing overwrites, too.
        (chain(), 2, 4, SELECTIVE, "before_r", 2 * (12 + 10)),
        (OVERWRITTEN, 1, 4, SELECTIVE, "before_r", 2 * (8 + 8)),
        # After I: inputs and output gradients of products. The first stage has no I: all, and what came.
        (chain(), 1, 4, NEVER, "after_i", 2 * (12 + 10)),
        (chain(), 0, 2, NEVER, "after_i", 2 * (48 + 12) + 2 * 12),
        # A layer that writes into what enters gets a copy.
        (INTO, 1, 3, NEVER, "saved", 2 * (8 + 8)),
    ],
)
def test_what_a_microbatch_holds_by_hand(model, start, end, mode, item, elements):
    found = held(model, (2, model[0].in_features), start, end, mode)  # each storage counts once
    assert getattr(found, item) == elements * FLOAT


def test_attention_hides_nothing_of_what_a_layer_saves():
    """torch calls it as one function, within which products are seen all the same."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    found: list[Tensor] = []
    with saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        model(torch.randn(2, 3, 8, requires_grad=True))
    weights = {storage_of(p) for p in model.parameters()}
    saved = {storage_of(t): t.untyped_storage().nbytes() for t in found}
    own = sum(nbytes for key, nbytes in saved.items() if key not in weights)
    assert held(model, (2, 3, 8), 0, 1).saved == own + 2 * 3 * 8 * FLOAT  # and what enters, not contiguous


def test_under_autocast_the_casts_of_weights_are_saved_and_bf16_crosses():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    found = estimate(model.train(), entry(2, 8), Numerics(autocast=True))
    there = Table(found, entry(2, 8), by_work(found, 1)).sizes(1, 3, NEVER)
    # bf16: what enters, or its cast, the input of the second layer, and both casts of weights.
    assert there.saved == pytest.approx(2 * 8 * 2 * 2 + 2 * 64 * 2, abs=2 * 8 * 6)
    assert there.inputs == 2 * 8 * 2


def test_weights_are_counted_by_name():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    trained, fixed = (16 + 4 + 4) * FLOAT, 4 * FLOAT + 2 * 4 * FLOAT + 8
    sizes = held(model, (2, 4), 0, 3, state_of=lambda name, spec: 2 * spec.nbytes)
    assert (sizes.weights, sizes.versions, sizes.gradients) == (trained + fixed, trained, trained)
    assert (sizes.optimizer, sizes.tied) == (2 * trained, 0)
    assert held(model, (2, 4), 0, 3, averaged=True).weights == 2 * trained + fixed
    assert held(model, (2, 4), 0, 1).tied == held(model, (2, 4), 1, 3).tied == 16 * FLOAT


# The optimizer


def test_the_state_of_an_optimizer_is_known_or_found_by_a_step_on_small_parameters():
    spec = TensorSpec((30, 20), torch.float32)
    for name, options, kept in (("SGD", {}, 0), ("SGD", {"momentum": 1}, 1), ("Adam", {"amsgrad": True}, 3)):
        factory = partial(getattr(torch.optim, name), lr=0.1, **options)
        assert known_state(f"torch.optim.{name}", options) == kept
        assert optimizer_state(factory)("a", spec) == 600 * FLOAT * kept
    assert known_state("somebody.SGD", {}) is None

    def of_large_ones(named):
        return torch.optim.Adam([p for _, p in named if max(p.shape) > 2])

    assert optimizer_state(of_large_ones)("a", spec) == 600 * FLOAT * 2


# A profile and its file

TWO = profile([layer("a", output_bytes=40), layer("b", output_bytes=8, forward_s=0.1)], 1e-5, 1e-9)
CONDITIONS = {"model": "fake"}
SECONDS = st.floats(0, 1e6)


def written(tmp_path, data: object) -> str:
    file = tmp_path / "profile.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(file)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 2**50)), max_size=5), SECONDS)
def test_what_is_written_is_read_to_the_last_bit(layers, latency_s):
    made = profile([layer("x", f, b, output_bytes=n) for f, b, n in layers], latency_s)
    assert Profile.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_a_file_of_another_machine_is_read_and_one_that_was_taken_otherwise_refused(tmp_path):
    other = TWO.to_json() | {"machine": {"device": "another", "threads": 7}}
    assert read_profile(written(tmp_path, other), CONDITIONS) == replace(TWO, machine=other["machine"])
    del other["stage"]  # as 0.1.0 wrote it
    older = read_profile(written(tmp_path, other | {"pipetrain_profile": 4}), CONDITIONS)
    assert older == replace(TWO, machine=other["machine"], stage=NO_TIME)
    compiled = TWO.to_json() | {"conditions": {**CONDITIONS, "compile": 1}}
    for data, conditions, says in (
        ("{", CONDITIONS, "cannot be read: Expecting property name"),
        ({"pipetrain_profile": 1}, CONDITIONS, "cannot be read: it is no profile of version 5"),
        (TWO.to_json() | {"colour": "red"}, CONDITIONS, "cannot be read: its content must be an object of"),
        # One that either knows nothing of is another condition too.
        (
            TWO.to_json(),
            CONDITIONS | {"precision": "bf16"},
            "was taken with precision=None, and this run has precision=bf16",
        ),
        (compiled, CONDITIONS, "was taken with compile=1, and this run has compile=None"),
    ):
        path = written(tmp_path, data)
        said = refusal(partial(read_profile, path, conditions))
        assert said.startswith(f"partition.profile={path} {says}")
        assert said.endswith("make one with partition=profile")


def test_layers_must_have_the_names_and_outputs_of_the_model_s():
    def check(*outputs: tuple[str, int]) -> None:
        layers = [Layer(name, 1, 1, ValueSpec((bytes_of(nbytes),))) for name, nbytes in outputs]
        refuse_other_layers(TWO, layers)

    check(("a", 40), ("b", 8))
    for outputs, says in (
        ([("a", 40), ("c", 8)], "its layer 1 (name, bytes of the output) is ('b', 8), and the model's is"),
        ([("a", 80)], "its layer 0 (name, bytes of the output) is ('a', 40), and the model's is ('a', 80)"),
        ([("a", 40)], "its layer 1 (name, bytes of the output) is ('b', 8), and the model's is None"),
    ):
        assert says in refusal(partial(check, *outputs))
