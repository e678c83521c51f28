"""Whether the ranks have room for what the plan predicts, and what is said where they have not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pipetrain
from pipetrain.errors import ActionFailed
from pipetrain.plan import memory_fit as module
from pipetrain.plan.memory_fit import WAYS, explained, gpu_bytes, is_out_of_memory, peaks_by_rank
from pipetrain.plan.memory_fit import fit_sentence as says
from pipetrain.plan.plan import Plan
from pipetrain.schedule.memory import GIB, PARTS, PartBytes
from tests.support.cases import options_of, prepared
from tests.support.refusals import refusal

DIGITS = ["data=digits", "model=mlp", "batch_size=8", "epochs=1"]


def moments(*totals: tuple[int, ...]) -> dict[int, list[PartBytes]]:
    """What each stage of a rank holds after each action."""
    nothing = dict.fromkeys(PARTS, 0)
    stages = enumerate(zip(*totals, strict=True))
    return {stage: [{**nothing, "activations": n} for n in held] for stage, held in stages}


def plan_of(schedule: str = "1f1b", *words: str) -> Plan:
    return prepared(options_of([*DIGITS, f"schedule={schedule}", *words]), schedule, 2, 16).plan


def most_of(plan: Plan) -> list[float]:
    return [peak / GIB for peak in peaks_by_rank(plan.memory())]


def test_the_fullest_rank_holds_what_its_stages_do_at_one_moment_and_that_is_said():
    assert peaks_by_rank([moments((3, 1), (2, 2), (1, 4)), moments((4, 0))]) == [5, 4]
    held = [moments((GIB, 0)), moments((2 * GIB, GIB))]
    both = "rank 1, the fullest, is predicted to hold 3 of the {} GiB of its GPU"
    assert says(held, 3 * GIB) == both.format(3)
    assert says(held, int(2.5 * GIB)) == f"{both.format(2.5)} and is likely to run out: to hold less, {WAYS}"


def test_a_limit_is_kept_to_by_each_rank_whatever_the_partition():
    for words in (("zbv",), ("1f1b", "recompute=always")):
        most = max(most_of(plan_of(*words)))
        assert plan_of(*words, f"memory_limit={most!r}").cuts == plan_of(*words).cuts
        said = refusal(lambda: plan_of(*words, f"memory_limit={most * 0.999!r}"))  # noqa: B023
        assert f" too small: rank 0 is predicted to hold {most:.4g} GiB; to hold less, {WAYS}" in said
    plan = plan_of("zbv")  # stages 1 and 2 are on one rank: what they exchange is not copied
    near = plan.table.stage_sizes(plan.cut, plan.modes)
    assert [one.outputs > 0 for one in near] == [True, False, True, False]
    assert [one.returned > 0 for one in near] == [False, True, False, True]
    assert "recompute=selective or always" in refusal(lambda: plan_of("1f1b", f"memory_limit={most!r}"))


def test_a_gpu_is_shared_by_the_processes_on_it_and_not_asked_for_on_a_cpu(monkeypatch):
    sizes = [SimpleNamespace(total_memory=size) for size in (80, 60)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", sizes.__getitem__)
    assert [gpu_bytes("auto", processes) for processes in (1, 2, 3)] == [60, 30, 20]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was asked"))
    assert gpu_bytes("cpu", 4) is None


def test_an_error_out_of_memory_says_what_was_there_and_what_was_predicted(monkeypatch):
    plan, cuda = plan_of(), torch.device("cuda")
    monkeypatch.setattr(module, "gpu_bytes", lambda device: 80 * GIB)
    failed = ActionFailed("rank 1, stage 1, action 1F0@0: OutOfMemoryError: CUDA out of memory", 1)
    said = str(explained(failed, plan.memory(), 1, cuda))
    predicted = f"rank 1 was predicted to hold {most_of(plan)[1]:.4g}"
    assert said == f"{failed}; there are 80 GiB, and {predicted}: to hold less, {WAYS}"


def test_nothing_frees_the_allocator_s_memory_while_a_model_is_trained():
    """On a GPU that waits for all receives that are posted. Profiling does, before the first is."""
    package = Path(pipetrain.__file__).parent
    users = [path.name for path in package.rglob("*.py") if "empty_cache" in path.read_text()]
    assert users == ["layer_profile.py"]


def test_what_an_allocator_raises_is_known():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
