"""Random numbers of a forward: of four numbers alone, whatever else draws."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product

import torch
from torch import Tensor, nn

from pipetrain.model import random_numbers as draws
from pipetrain.model.chain import Chain, Pop, Stash
from pipetrain.model.network import run_parts
from pipetrain.model.random_numbers import EVALUATION, Seeds, begin, drawing
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import estimate
from pipetrain.plan.cut import cut_layers
from tests.support.models import Join


def test_seeds_stay_what_they_are_and_differ_in_all_four_numbers():
    assert Seeds(0, 0, 0).for_layer(0) == 0x15694DD717173834
    assert Seeds(0, 0, 0).for_layer(1) == 0x1273A79B503D68EB
    assert Seeds(7, EVALUATION, 3).for_layer(12) == 0x7F694071131D9BB8
    near = list(product(range(-1, 6), repeat=4))
    assert len({Seeds(*three).for_layer(layer) for *three, layer in near}) == len(near)


def drawn(layer: int) -> list[float]:
    begin(layer)
    return torch.rand(3).tolist()


def test_what_is_drawn_depends_on_nothing_that_drew_before():
    with drawing(Seeds(1, 2, 3)):
        first, second = drawn(4), drawn(5)
        torch.rand(7)
        assert drawn(4) == first
        with drawing(Seeds(1, 2, 4)):
            assert drawn(4) != first
        assert drawn(5) == second
    assert first != second


def test_other_code_draws_as_if_no_layer_had():
    """An augmentation on rank 0 would otherwise depend on the last layer of its stage, and so on the cut."""
    torch.manual_seed(0)
    wanted = torch.rand(3).tolist()
    torch.manual_seed(0)
    with drawing(Seeds(1, 2, 3)):
        for layer in (4, 5):
            drawn(layer)
        with suppress(ValueError), drawing(Seeds(1, 2, 4)):
            raise ValueError(drawn(4))
        assert drawn(5) != wanted
    assert torch.rand(3).tolist() == wanted
    torch.manual_seed(0)
    assert drawn(4) == wanted  # outside a pipeline's forward the generators go on


def test_threads_have_seeds_of_their_own():
    """Of two that overlap, the one that ended last left the other's behind."""
    first, second = drawing(Seeds(1, 2, 3)), drawing(Seeds(4, 5, 6))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        one.submit(first.__exit__, None, None, None).result()
        other.submit(second.__exit__, None, None, None).result()
        assert one.submit(draws._running.get).result() is None
        assert other.submit(draws._running.get).result() is None


# A chain in parts


class Noisy(nn.Linear):
    """Draws from torch's generator, and from one more dropout inside."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x) + torch.randn_like(x), 0.5, self.training)


def noisy() -> nn.Sequential:
    stash = Stash()
    layers = [nn.Linear(6, 6), nn.Dropout(0.3), stash, Noisy(6, 6), nn.RReLU(), Pop(stash), Join()]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(6, 6), nn.Dropout(0.0))


EXAMPLE = ValueSpec((TensorSpec((6,), torch.float32),))
ENTRY = EXAMPLE.of(Size(5))


def run(model: nn.Sequential, cuts: list[int], x: Tensor) -> Tensor:
    slices = cut_layers({Size(5): estimate(model, ENTRY)}, cuts, EXAMPLE).slices
    with drawing(Seeds(3, 1, 4)):
        return run_parts([Chain(model).part(slice) for slice in slices], [x])[0]


def test_layers_that_draw_are_found_and_the_cut_does_not_change_what_they_draw():
    model, x = noisy(), torch.randn(5, 6)
    assert [layer.draws for layer in estimate(model, ENTRY)] == [n in (1, 3, 4, 7) for n in range(10)]
    evaluated = estimate(model, ENTRY, training=False)
    assert [n for n, layer in enumerate(evaluated) if layer.draws] == [3, 4]  # RReLU as far as can be seen
    wanted = run(model, [], x)
    assert torch.equal(run(model, [1, 2, 3, 4, 5, 6, 7, 8, 9], x), wanted)
    assert not torch.equal(model(x), wanted)  # from the generators as they are
    made = run(model[:2], [], x)
    torch.manual_seed(Seeds(3, 1, 4).for_layer(1))
    assert torch.equal(model[:2](x), made)


def test_torch_compile_does_not_look_at_seeds(monkeypatch):
    """It made a new graph for each, up to its limit, and then none."""
    monkeypatch.setattr(draws, "_seed", draws._seed)
    draws.leave_to_python()

    def forward(x: Tensor) -> Tensor:
        draws.begin(3)
        return nn.functional.dropout(x, 0.5)

    compiled, x = torch.compile(forward, backend="eager", dynamic=False), torch.ones(64)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=2):
        for update in range(6):
            with drawing(Seeds(0, update, 1)):
                wanted, made = forward(x), compiled(x)
            assert torch.equal(made, wanted), update
