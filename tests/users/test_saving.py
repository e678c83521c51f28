"""Checkpoints of a program: what goes on from one is what would have been."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipetrain import ConfigError, Pipeline
from tests.users.programs import batch, ended, mlp, sgd


def dropping(seed: int | None) -> Pipeline:
    """Two stages, each with a dropout."""
    model = mlp(nn.Dropout())
    model.insert(2, nn.Dropout())
    given = {} if seed is None else {"seed": seed}
    torch.manual_seed(1)
    return Pipeline(model, cross_entropy, sgd, partition=[3], **given)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch(8, seed) for seed in range(6)]


def uninterrupted(folder: str, seed: int | None, loading: bool = False) -> list[float]:
    with dropping(seed) as pipe:
        if loading:
            pipe.load(folder)
        losses = list(pipe.train(batches()[:3]))
        pipe.save(folder)
        return losses + list(pipe.train(batches()[3:]))


def gone_on(folder: str, seed: int | None, begun: bool) -> list[float]:
    torch.manual_seed(77)
    with dropping(seed) as pipe:
        torch.manual_seed(78)
        if begun:
            pipe.step(*batches()[0])
        pipe.load(folder)
        losses = list(pipe.train(batches()[3:5]))
        pipe.save(f"{folder}/again")
    with dropping(99) as pipe:
        pipe.load(f"{folder}/again")
        return losses + list(pipe.train(batches()[5:]))


@pytest.mark.parametrize(("seed", "other", "begun"), [(None, 6, False), (5, None, True)])
def test_dropout_goes_on_as_it_would_have_whatever_the_seed_of_the_program(
    ranks, tmp_path, seed, other, begun
):
    whole, _ = ranks(uninterrupted, str(tmp_path), seed)
    assert len(set(whole)) == 6
    assert ranks(gone_on, str(tmp_path), other, begun) == [whole[3:]] * 2


def owing(folder: str, going_on: bool) -> list[float]:
    """Train with codecs that owe; the second pass ends with a batch of fewer samples than the first batch."""
    options = {"codec_forward": "topk", "codec_backward": "topk_int8", "partition": [2]}
    with Pipeline(mlp(), cross_entropy, sgd, microbatches=2, **options) as pipe:
        if going_on:
            pipe.load(folder)
        else:
            list(pipe.train([batch(8, 0), batch(6, 1)]))
            pipe.save(folder)
        losses = list(pipe.train([batch(8, 2), batch(6, 3)]))
        return [*losses, pipe.evaluate([batch(8, 4)])["loss"]]


def test_what_codecs_owe_goes_on_for_sizes_that_come_later_too(ranks, tmp_path):
    whole, _ = ranks(owing, str(tmp_path), False)
    assert ranks(owing, str(tmp_path), True) == [whole] * 2


class Lookahead(torch.optim.SGD):
    """Every second step goes halfway back to the weights of two steps before, as kept in an attribute."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1, momentum=0.9)
        self.slow, self.steps = {}, 0

    def step(self, closure=None):
        weights = [p for group in self.param_groups for p in group["params"]]
        for p in weights:
            self.slow.setdefault(p, p.detach().clone())
        super().step(closure)
        self.steps += 1
        with torch.no_grad():
            for p in weights if self.steps % 2 == 0 else ():
                self.slow[p].lerp_(p, 0.5)
                p.copy_(self.slow[p])


class Anneals(nn.Module):
    """Falls with each call in training."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * 0.9**self.calls


def keeping(folder: str, goes_on: bool, cut: int) -> list[float]:
    with Pipeline(mlp(Anneals()), cross_entropy, Lookahead, microbatches=2, partition=[cut]) as pipe:
        if goes_on:
            pipe.load(folder)
        else:
            list(pipe.train(batches()[:3]))
            pipe.save(folder)
        return list(pipe.train(batches()[3:]))


def test_what_an_optimizer_or_a_layer_keeps_in_python_goes_on_on_other_stages_too(ranks, tmp_path):
    whole, _ = ranks(keeping, str(tmp_path), False, 3)
    assert ranks(keeping, str(tmp_path), True, 3) == [whole] * 2
    assert ranks(keeping, str(tmp_path), True, 4)[0] == pytest.approx(whole, rel=1e-12)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def saved_often(folder: str) -> list[str]:
    with dropping(None) as pipe:
        made = [pipe.save(folder, keep=2) for _ in pipe.train(batches(), window=1)]
        made.append(pipe.save(folder, keep=2))
        with pytest.raises(ConfigError, match="keep=0 must be a whole number of at least 1 or null"):
            pipe.save(folder, keep=0)
        return [path.name for path in made]


def test_the_newest_are_kept_and_an_update_that_is_saved_again_counts_once(ranks, tmp_path):
    first, second = ranks(saved_often, str(tmp_path))
    assert first == second == [f"update-{update:08d}" for update in (1, 2, 3, 4, 5, 6, 6)]
    assert names(tmp_path) == ["update-00000005", "update-00000006"]


def dies_in_saving(pipe: Pipeline, folder: Path, renames: int) -> bool:
    """Save in a process that dies instead of its next rename after so many; return whether it did."""
    child = os.fork()
    if not child:
        steps, rename = iter(range(renames)), os.replace
        os.replace = lambda *paths: os._exit(9) if next(steps, None) is None else rename(*paths)
        try:
            pipe.save(folder)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return bool(status)


def test_after_a_first_save_that_was_cut_short_a_program_begins_anew(ranks, tmp_path):
    whole, _ = ranks(uninterrupted, str(tmp_path / "whole"), 5)
    (tmp_path / "cut" / "checkpoints" / "update-00000001.partial").mkdir(parents=True)
    assert ranks(uninterrupted, str(tmp_path / "cut"), 5, True) == [whole] * 2
    assert names(tmp_path / "cut") == ["update-00000003"]


@pytest.mark.processes
def test_killed_while_an_update_is_saved_again_there_is_one_to_go_on_from(tmp_path):
    """Whichever of its renames is the last."""
    with Pipeline(mlp(), cross_entropy, sgd, threads=1) as pipe:
        pipe.step(*batches()[0])
        pipe.save(tmp_path)
        renames = 0
        while dies_in_saving(pipe, tmp_path, renames):
            pipe.load(tmp_path)
            assert pipe.updates == 1
            renames += 1
        pipe.load(tmp_path)
    assert renames >= 2
    assert "update-00000001" in names(tmp_path)


def by_adam(folder: str) -> str:
    with Pipeline(mlp(), cross_entropy, sgd, partition=[1]) as pipe:
        pipe.step(*batch())
        pipe.save(folder)
    with Pipeline(mlp(), cross_entropy, torch.optim.Adam, partition=[1], sample=batch()) as pipe:
        return ended(lambda: pipe.load(folder))


def test_a_checkpoint_of_another_optimizer_is_refused(ranks, tmp_path):
    for said in ranks(by_adam, str(tmp_path)):
        assert "it has optimizer=SGD, and this run has optimizer=Adam" in said
