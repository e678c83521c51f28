"""Pipeline's life, a model that is made by a function, and what is refused in one sentence.

That it trains as one process would is shown in tests/whole/test_any_module.py.
"""

from __future__ import annotations

import re
from multiprocessing import current_process
from multiprocessing.spawn import _check_not_importing_main  # type: ignore[attr-defined]
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from pipetrain import ConfigError, Pipeline, ScheduleError, TrainingStopped
from pipetrain.model.deferred_init import build
from pipetrain.model.tensor_places import named_tensors
from pipetrain.models import gpt
from pipetrain.runtime.stage.stage_factory import make_stages
from pipetrain.schedule.actions import Program, format_program
from pipetrain.schedule.programs import one_f_one_b
from pipetrain.trainer import pipeline
from pipetrain.trainer import training_setup as training
from tests.runtime.stage.test_memory_meter import Live
from tests.support.model_zoo import accuracy, mlp, scaled, ways
from tests.support.parity import MOMENTUM as momentum
from tests.support.refusals import ALIKE, APART, all_told


@pytest.fixture(autouse=True)
def alone():
    """Let no test meet the Pipeline that another one has left open."""
    pipeline._open.clear()


def labelled(n: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, dtype=torch.float64, generator=generator)
    return list(zip(x, torch.randint(5, (n,), generator=generator), strict=True))


def labelled_batches(n: int) -> list[Any]:
    return list(DataLoader(labelled(n), batch_size=8))


def pipe_of(model: Any = None, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(model or mlp(), cross_entropy, momentum, device="cpu", threads=1, **options)


def evaluated(model: nn.Module, n: int) -> dict[str, float]:
    x, y = next(iter(DataLoader(labelled(n), n)))
    with torch.no_grad():
        outputs = model.eval()(x)
    return {"loss": cross_entropy(outputs, y).item(), "acc": float(accuracy(outputs, y))}


@pytest.mark.parametrize(("schedule", "staged"), [("fbp", True), ("1f1b", False)])
def test_on_a_gpu_messages_of_a_schedule_without_a_fixed_order_go_through_host_memory(
    monkeypatch, schedule, staged
):
    class Seen(Exception): ...

    def groups(*given: Any) -> None:
        raise Seen(given[-1])

    monkeypatch.setattr(training, "ProcessGroups", groups)
    with pytest.raises(Seen, match=str(staged)):
        pipe_of(schedule=schedule)


# A function that makes the model


def made_by(factory: Any, **options: Any) -> Pipeline:
    return pipe_of(factory, microbatches=2, **options)


def initial(factory: Any) -> dict[str, Any]:
    with made_by(factory) as pipe:
        return {name: tensor.numpy() for name, tensor in pipe.state_dict().items()}


@pytest.mark.processes
@pytest.mark.parametrize("factory", [scaled, ways])
def test_the_weights_of_a_factory_are_the_same_for_all_cuts(ranks, three, factory):
    model, drawn = build(factory, 0)
    tensors = named_tensors(model)
    made = tensors | drawn.tensors(tensors)
    for state, *others in ([initial(factory)], ranks(initial, factory), three(initial, factory)):
        assert state
        assert all((made[name].numpy() == array).all() for name, array in state.items())
        assert not any(others)


def saved(folder: str) -> list[float]:
    with made_by(scaled) as pipe:
        list(pipe.train(labelled_batches(24)))
        pipe.save(folder)
        return list(pipe.train(labelled_batches(24)))


@pytest.mark.processes
def test_a_factorys_training_goes_on_with_other_cuts(ranks, tmp_path):
    losses, _ = ranks(saved, str(tmp_path))
    for begun in (False, True):
        with made_by(scaled) as pipe:
            if begun:
                pipe.step(*labelled_batches(8)[0])
            pipe.load(tmp_path)
            before = pipe.state_dict()
            assert list(pipe.train(labelled_batches(24))) == pytest.approx(losses, rel=1e-12)
        with made_by(scaled, weights=tmp_path) as pipe:
            assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())


def large() -> nn.Sequential:
    return gpt(depth=6, heads=2, width=32, sequence=8, vocabulary=64)


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def peak() -> tuple[int, int, int]:
    """Build a model and train one batch; return the peaks of both, and the bytes of the rank's weights."""
    batch, held = (torch.zeros(2, 8, dtype=torch.int64),) * 2, []

    def noting(*given: Any) -> Any:
        stages = make_stages(*given)
        held.extend(t.nbytes for stage in stages.values() for t in stage.module.state_dict().values())
        return stages

    options = {"microbatches": 1, "device": "cpu", "threads": 1, "partition": "params"}
    with (
        Live() as live,
        patch("pipetrain.trainer.training_setup.make_stages", noting),
        Pipeline(large, next_token, lambda p: SGD(p, 0.1), sample=batch, **options) as pipe,
    ):
        built = live.peak
        pipe.step(*batch)
    return built, live.peak, sum(held)


@pytest.mark.processes
def test_no_rank_holds_more_of_a_factorys_model_than_its_stages(three):
    peaks = three(peak)
    whole = sum(held for _, _, held in peaks)
    for built, stepped, held in peaks:
        assert held < 0.5 * whole
        assert built < 1.1 * held + 20_000
        assert stepped < 2.3 * held + 100_000  # weights, gradients and activations


def test_a_factory_cannot_be_profiled():
    with pytest.raises(ConfigError, match="partition=profile measures the whole model in each process"):
        made_by(scaled, partition="profile", sample=labelled_batches(8)[0])


# What is refused


@pytest.mark.processes
def test_every_rank_is_told_in_one_sentence_and_none_waits_for_another(ranks, tmp_path):
    """In a group that the program has made itself, which a Pipeline uses and leaves alone."""
    names = [*ALIKE, *APART]
    for name, zero, one in zip(names, *ranks(all_told, names, str(tmp_path / "store")), strict=True):
        wanted = APART[name][1:] if name in APART else (ALIKE[name][1],) * 2
        for said, sentence in zip((zero, one), wanted, strict=True):
            assert re.search(sentence, said), (name, zero, one)
            assert name in APART or "\n" not in said


# The life of a pipeline


@pytest.fixture
def pipe() -> Pipeline:
    return pipe_of(metrics={"acc": accuracy})


def test_metrics_are_of_one_pass_whatever_was_left_or_evaluated_meanwhile(pipe):
    for _ in pipe.train(labelled_batches(24)):
        break
    pipe.step(*labelled_batches(8)[0])
    losses, seen = [], []
    for loss in pipe.train(labelled_batches(24)):
        losses.append(loss)
        seen.append(pipe.evaluate(labelled_batches(11))["loss"])
    assert (pipe.updates, len(set(seen))) == (5, 3)
    assert pipe.metrics["loss"] == pytest.approx(sum(losses) / 3)
    assert set(pipe.metrics) == {"loss", "acc", "learning_rate", "samples_per_s"}


def test_an_evaluation_that_failed_is_no_part_of_the_next(pipe):
    known = pipe.evaluate(labelled_batches(24))
    with pytest.raises(ZeroDivisionError):
        pipe.evaluate(batch if n < 20 else 1 / 0 for n, batch in enumerate(labelled_batches(8) * 21))
    assert pipe.evaluate(labelled_batches(24)) == known


def test_before_the_first_batch_which_may_have_any_size_there_are_weights_and_an_evaluation(pipe):
    twin = mlp()
    twin.load_state_dict(pipe.state_dict())
    found = pipe.evaluate(DataLoader(labelled(37), batch_size=19))  # 4 microbatches do not divide it
    assert found == pytest.approx(evaluated(twin, 37))
    assert pipe.updates == 0
    assert list(pipe.train(labelled_batches(7))) == pytest.approx([evaluated(twin, 7)["loss"]])


def test_what_fails_before_a_window_leaves_the_pipeline_as_it_was(pipe):
    with pytest.raises(ConfigError, match="the plan is made with the first batch"):
        pipe.save("nowhere")
    list(pipe.train(labelled_batches(8)))
    before = pipe.state_dict()
    with pytest.raises(ZeroDivisionError):
        list(pipe.train(1 / 0 for _ in range(1)))
    with pytest.raises(TrainingStopped, match="a batch of 2 samples cannot be cut"):
        list(pipe.train(labelled_batches(2)))
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.state_dict().items())
    assert len(list(pipe.train(labelled_batches(8)))) == 1


def test_a_last_batch_whose_microbatches_a_layer_does_not_take_is_refused_at_the_start():
    """Of 5 samples in microbatches of 2, 1, 1 and 1, in BatchNorm; an evaluation takes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)).double()
    with pipe_of(model, microbatches=4) as made:
        with pytest.raises(ConfigError, match=r"of the last batch's microbatches, layer 1 .* leave that"):
            next(made.train(DataLoader(labelled(29), 8)))
        assert made.updates == 0
        assert len([*made.train(DataLoader(labelled(29), 8, drop_last=True))]) == 3
        assert made.evaluate(DataLoader(labelled(29), 28))["loss"] > 0


def test_a_plan_made_before_a_pass_gives_way_to_that_of_the_first_one():
    with pipe_of(schedule="pipedream", sample=labelled_batches(8)[0]) as made:
        assert set(made.plan.windows) == {1}  # one stage is never late, else as many as show it
        for batches, windows in ((3, {3}), (2, {3, 2}), (1, {3, 2, 1})):
            assert len(list(made.train(labelled_batches(8 * batches)))) == batches
            assert set(made.plan.windows) == windows


def test_what_fails_within_a_window_ends_the_pipeline(pipe):
    x, y = labelled_batches(8)[0]
    pipe.step(x, y)
    with pytest.raises(TrainingStopped, match=r"action 0F0@0: IndexError: Target 10\d is out of bounds"):
        pipe.step(x, y + 99)
    assert pipe.updates == 1
    for call in (lambda: pipe.step(x, y), pipe.state_dict, lambda: pipe.save("nowhere"), lambda: pipe.plan):
        with pytest.raises(TrainingStopped, match="this Pipeline has ended with an error: rank 0, stage 0"):
            call()
    pipe.close()
    pipe_of().close()


def test_an_error_of_a_with_block_or_of_the_sample_leaves_room_for_another_pipeline():
    x, y = labelled_batches(8)[0]
    with pytest.raises(ZeroDivisionError), pipe_of() as first:
        first.step(x, 1 / 0)
    with pytest.raises(TrainingStopped, match="sample= as batch 0 has 8 inputs and 5 targets"):
        pipe_of(sample=(x, y[:5]))
    pipe_of().close()


def test_a_data_worker_by_spawn_that_imports_an_unguarded_program_makes_no_pipeline(monkeypatch):
    """The worker would wait to meet the ranks, as rank 0 again, and rank 0 for the worker."""
    monkeypatch.setattr(current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match="has finished its bootstrapping"):
        _check_not_importing_main()  # so it is what multiprocessing goes by
    with pytest.raises(ConfigError, match='put what trains under `if __name__ == "__main__":`'):
        pipe_of()


def test_the_plan_is_there_with_a_sample_and_a_profile_may_choose_its_cuts():
    with pipe_of(partition="profile", sample=labelled_batches(8)[0]) as made:
        assert "Sequential, schedule 1f1b: 1 stage on 1 rank, batch 8 in 4 microbatches" in str(made.plan)
        assert "profiled on" in str(made.plan)
        assert "as for the first batch: others may have any size" in str(made.plan)
        assert made.plan.choices


def test_a_schedule_may_be_a_function_or_the_file_of_a_program(tmp_path):
    """One of several batches is a window of its own."""
    losses, files = [], [tmp_path / "one.txt", tmp_path / "three.txt"]
    for file, batches in zip(files, (1, 3), strict=True):
        file.write_text(format_program(one_f_one_b(1, batches, 4)))
    for schedule, window in (("1f1b", 1), (one_f_one_b, 1), (files[0], 1), (files[1], 3)):
        with pipe_of(schedule=schedule, microbatches=4) as made:
            losses.append(list(made.train(labelled_batches(48), window)))
    assert len(losses[0]) == 6
    assert all(each == losses[0] for each in losses)
    with pytest.raises(ScheduleError, match=r"one.txt is of 1 ranks, 1 batches and 4 microbatches in all"):
        pipe_of(schedule=files[0], microbatches=2)


def test_a_schedule_that_works_on_no_cut_is_refused_at_once_and_leaves_no_pipeline():
    def without_step(ranks: int, batches: int, microbatches: int) -> Program:
        return [row[:-1] for row in one_f_one_b(ranks, batches, microbatches)]

    for _ in range(2):
        with pytest.raises(ScheduleError, match="has done of stage 0 0 updates of 1"):
            pipe_of(schedule=without_step)


def test_an_average_that_is_not_there_is_not_taken_for_the_weights(pipe, tmp_path):
    with pytest.raises(ConfigError, match="give Pipeline ema="):
        pipe.state_dict(ema=True)
    pipe.close()
    with pipe_of(ema=0.9) as pipe:
        list(pipe.train(labelled_batches(24)))
        pipe.save(tmp_path)
    pipe = pipe_of(ema=0.9)
    pipe.load(tmp_path)
    with pytest.raises(ConfigError, match="there is no moving average of the weights"):
        pipe.state_dict(ema=True)  # it is read with the first batch


def test_every_schedule_that_ships_is_listed_with_what_it_is():
    listed = pipeline.schedules()
    assert {"1f1b", "gpipe", "pipedream"} <= listed.keys()
    assert listed["gpipe"].startswith("All forwards of a batch, then all its backwards")
