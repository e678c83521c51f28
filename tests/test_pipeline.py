"""Pipeline trains as one process would, on any number of processes, and refuses the rest in one sentence."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from pipetrain import ConfigError, Pipeline, ScheduleError, Task, TrainingStopped, pipeline
from pipetrain.network.factory import build
from pipetrain.network.places import named_tensors
from pipetrain.schedule.actions import format_program
from pipetrain.schedule.programs import one_f_one_b
from tests.support.factories import FACTORIES, all_trained, peak, pipe_of, saved, trained
from tests.support.programs import (
    GROUPS,
    JOBS,
    Case,
    accuracy,
    evaluated,
    falling,
    labelled,
    mlp,
    momentum,
    train_case,
    train_cases,
)
from tests.support.refused import ALIKE, APART, all_told, told
from tests.support.worlds import run_world


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Let no test meet the Pipeline that another one has left open."""
    monkeypatch.setattr(pipeline, "_open", None)


def cases(ranks: int) -> list[Case]:
    m, few = 4, 2  # few, so that each microbatch has the samples that a BatchNorm needs
    every = [
        *(Case(job, "1f1b", few if job == "normed" else m) for job in JOBS),
        *(Case(job, "pipedream", 2) for job in ("normed", "gpt", "tuples")),
        Case("gpt", "pipedream_2bw", m),
        Case("mlp", "gpipe", m, window=2),
        Case("mlp", "pipedream", 1, window=2),
        Case("mlp", "1f1b", m, by_step=True),
        Case("mlp", "1f1b", m, options={"param_groups": GROUPS}),
        Case("mlp", "1f1b", m, options={"clip_grad_norm": 0.05, "ema": 0.6}),
        Case("gpt", "pipedream", 2, options={"clip_grad_norm": 0.05, "ema": 0.6}),
        Case("normed", "pipedream_2bw", few, window=2, options={"param_groups": GROUPS}),
    ]
    if ranks > 1:
        every += [Case("gpt", "interleaved_1f1b", m), Case("tuples", "interleaved_1f1b", m, window=3)]
        every += [Case("gpt", "zb_h1", m), Case("gpt", "zbv", m, window=3), Case("tuples", "v_half", m)]
    return every


@pytest.mark.parametrize("case", cases(1), ids=lambda case: f"{case.job}-{case.schedule}")
def test_one_process_trains_as_plain_pytorch_does(case):
    train_case(case, 0)


@pytest.mark.processes
def test_two_processes_train_as_plain_pytorch_does_and_both_know_the_results():
    """Each rank's loader shuffles otherwise; the batches are those of rank 0's."""
    first, second = run_world(train_cases, 2, cases(2))
    assert first == second
    assert all(result["updates"] == 3 for result in first)


# A function that makes the model


def hold_to_plain(name, result):
    """Compare a factory's weights with its initial ones, and the training with one of plain PyTorch."""
    model, initial = build(FACTORIES[name], 0)
    buffers = {key: tensor for key, tensor in named_tensors(model).items() if not tensor.is_meta}
    made = buffers | initial.tensors(named_tensors(model))
    for key, array in result["initial"].items():
        assert (made[key].numpy() == array).all(), key
    twin = FACTORIES[name]()
    twin.load_state_dict({key: torch.from_numpy(array) for key, array in result["initial"].items()})
    optimizer, losses = momentum(twin.parameters()), []
    for update, (x, y) in enumerate(DataLoader(labelled(24), batch_size=8)):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 * falling(update)
        parts = [cross_entropy(twin(part), of) for part, of in zip(x.split(4), y.split(4), strict=True)]
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert result["losses"] == pytest.approx(losses, rel=1e-12)
    assert result["late"] == pytest.approx(evaluated(twin, Task(cross_entropy), labelled(24)), rel=1e-12)


def test_one_process_trains_a_factorys_model_as_plain_pytorch_does():
    hold_to_plain("normed", trained("normed"))


@pytest.mark.processes
def test_the_weights_of_a_factory_are_the_same_for_all_cuts():
    """A model that is traced, and one of an nn.Sequential."""
    names = ["normed", "branches"]
    first, *others = run_world(all_trained, 3, names)
    for name, result in zip(names, first, strict=True):
        hold_to_plain(name, result)
    for results in others:
        for result, known in zip(results, first, strict=True):
            assert (result["losses"], result["late"]) == (known["losses"], known["late"])
            assert not any(result[state] for state in ("initial", "final"))


@pytest.mark.processes
def test_weights_in_a_file_are_the_same_for_all_cuts(tmp_path):
    torch.manual_seed(9)
    twin = FACTORIES["normed"]()
    torch.save(twin.state_dict(), tmp_path / "weights.pt")
    given = {"weights": tmp_path / "weights.pt", "schedule": "pipedream", "ema": 0.6}
    ((result,), (none,)) = run_world(all_trained, 2, ["normed"], given)
    for name, tensor in twin.state_dict().items():
        assert (result["initial"][name] == tensor.numpy()).all()
    assert result["ema"].keys() == result["initial"].keys()
    assert not any(none[state] for state in ("initial", "final", "ema"))
    wanted = evaluated(twin, Task(cross_entropy), labelled(24))
    assert result["early"] == pytest.approx(wanted, rel=1e-12)
    pipe = pipe_of("normed", model=FACTORIES["normed"](), **given)
    assert all(torch.equal(tensor, twin.state_dict()[name]) for name, tensor in pipe.state_dict().items())
    assert pipe.evaluate(DataLoader(labelled(24), 8)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.processes
def test_a_factorys_training_goes_on_with_other_cuts(tmp_path):
    losses, _ = run_world(saved, 2, tmp_path)
    batches = list(DataLoader(labelled(24), batch_size=8))
    for begun in (False, True):
        pipeline._open = None
        with pipe_of("normed") as pipe:
            if begun:
                pipe.step(*batches[0])
            pipe.load(tmp_path)
            before = pipe.state_dict()
            assert list(pipe.train(batches)) == pytest.approx(losses, rel=1e-12)
        with pipe_of("normed", weights=tmp_path) as pipe:
            assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())


@pytest.mark.processes
def test_no_rank_holds_more_of_a_factorys_model_than_its_stages():
    peaks = run_world(peak, 3)
    whole = sum(held for _, _, held in peaks)
    for built, stepped, held in peaks:
        assert held < 0.5 * whole
        assert built < 1.1 * held + 20_000
        assert stepped < 2.3 * held + 100_000  # weights, gradients and activations


def test_a_factory_cannot_be_profiled():
    x = next(iter(DataLoader(labelled(8), 8)))
    with pytest.raises(ConfigError, match="partition=profile measures the whole model in each process"):
        pipe_of("normed", partition="profile", sample=x)


# What is refused


@pytest.mark.parametrize("name", ALIKE)
def test_what_cannot_be_trained_is_refused_in_one_sentence(name):
    program, sentence = ALIKE[name]
    said = told(program, 0)
    assert re.search(sentence, said), said
    assert "\n" not in said


@pytest.mark.processes
def test_every_rank_is_told_and_none_waits_for_another():
    names = [*ALIKE, *APART]
    for name, zero, one in zip(names, *run_world(all_told, 2, names), strict=True):
        wanted = APART[name][1:] if name in APART else (ALIKE[name][1],) * 2
        for said, sentence in zip((zero, one), wanted, strict=True):
            assert re.search(sentence, said), (name, zero, one)


# The life of a pipeline


def labelled_batches(n: int) -> list:
    return list(DataLoader(labelled(n), batch_size=8))


@pytest.fixture
def pipe() -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(mlp(), cross_entropy, momentum, metrics={"acc": accuracy}, device="cpu", threads=1)


def test_a_pass_that_was_left_is_no_part_of_the_metrics_of_the_next(pipe):
    for _ in pipe.train(labelled_batches(24)):
        break
    pipe.step(*labelled_batches(8)[0])
    losses = list(pipe.train(labelled_batches(16)))
    assert pipe.updates == 4
    assert pipe.metrics["loss"] == pytest.approx(sum(losses) / 2)
    assert set(pipe.metrics) == {"loss", "acc", "learning_rate", "samples_per_s"}


def test_an_evaluation_within_a_pass_changes_neither_it_nor_its_metrics(pipe):
    losses, seen = [], []
    for loss in pipe.train(labelled_batches(24)):
        losses.append(loss)
        seen.append(pipe.evaluate(labelled_batches(11))["loss"])
    assert len(set(seen)) == 3
    assert pipe.metrics["loss"] == pytest.approx(sum(losses) / 3)


def test_an_evaluation_that_failed_is_no_part_of_the_next(pipe):
    known = pipe.evaluate(labelled_batches(24))
    with pytest.raises(ZeroDivisionError):
        pipe.evaluate(batch if n < 20 else 1 / 0 for n, batch in enumerate(labelled_batches(8) * 21))
    assert pipe.evaluate(labelled_batches(24)) == known


def test_before_the_first_batch_there_are_weights_and_an_evaluation(pipe):
    initial = pipe.state_dict()
    twin = mlp()
    twin.load_state_dict(initial)
    found = pipe.evaluate(DataLoader(labelled(37), batch_size=19))  # 4 microbatches do not divide it
    assert found == pytest.approx(evaluated(twin, Task(cross_entropy, {"acc": accuracy}), labelled(37)))
    assert pipe.updates == 0
    assert len(list(pipe.train(labelled_batches(24)))) == 3


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


def test_what_fails_within_a_window_ends_the_pipeline(pipe):
    x, y = labelled_batches(8)[0]
    pipe.step(x, y)
    with pytest.raises(TrainingStopped, match=r"action 0F0@0: IndexError: Target 10\d is out of bounds"):
        pipe.step(x, y + 99)
    for call in (lambda: pipe.step(x, y), pipe.state_dict, lambda: pipe.save("nowhere"), lambda: pipe.plan):
        with pytest.raises(TrainingStopped, match="this Pipeline has ended with an error: rank 0, stage 0"):
            call()
    pipe.close()
    Pipeline(mlp(), cross_entropy, momentum, device="cpu", threads=1).close()


def test_an_error_of_a_with_block_or_of_the_sample_leaves_room_for_another_pipeline():
    x, y = labelled_batches(8)[0]
    with pytest.raises(ZeroDivisionError), Pipeline(mlp(), cross_entropy, momentum, device="cpu") as first:
        first.step(x, 1 / 0)
    with pytest.raises(TrainingStopped, match="sample= as batch 0 has 8 inputs and 5 targets"):
        Pipeline(mlp(), cross_entropy, momentum, sample=(x, y[:5]), device="cpu")
    Pipeline(mlp(), cross_entropy, momentum, device="cpu", threads=1).close()


def test_the_first_batch_need_not_be_a_multiple_of_the_microbatches(pipe):
    torch.manual_seed(0)
    twin = mlp()
    wanted = [cross_entropy(twin(x), y).item() for x, y in labelled_batches(7)]
    assert list(pipe.train(labelled_batches(7))) == pytest.approx(wanted)


def test_the_plan_is_there_with_a_sample_and_prints_as_the_command_does():
    sample = labelled_batches(8)[0]
    plan = Pipeline(mlp(), cross_entropy, momentum, sample=sample, device="cpu", threads=1).plan
    assert "Sequential, schedule 1f1b: 1 stages on 1 ranks, batch 8 in 4 microbatches" in str(plan)


def test_a_schedule_may_be_a_function_or_the_file_of_a_program(tmp_path):
    losses = []
    program = one_f_one_b(1, 1, 4)
    (tmp_path / "mine.txt").write_text(format_program(program))
    for schedule in ("1f1b", one_f_one_b, tmp_path / "mine.txt"):
        pipeline._open = None
        torch.manual_seed(0)
        pipe = Pipeline(
            mlp(), cross_entropy, momentum, schedule, microbatches=4, window=1, device="cpu", threads=1
        )
        losses.append(list(pipe.train(labelled_batches(24))))
    assert losses[0] == losses[1] == losses[2]
    pipeline._open = None
    with pytest.raises(ScheduleError, match=r"mine.txt is of 1 ranks, 1 batches and 4 microbatches in all"):
        Pipeline(mlp(), cross_entropy, momentum, tmp_path / "mine.txt", microbatches=2, device="cpu")


def test_a_program_of_several_batches_is_a_window_of_its_own(tmp_path):
    (tmp_path / "three.txt").write_text(format_program(one_f_one_b(1, 3, 4)))
    losses = []
    for schedule in ("1f1b", tmp_path / "three.txt"):
        pipeline._open = None
        torch.manual_seed(0)
        pipe = Pipeline(mlp(), cross_entropy, momentum, schedule, microbatches=4, device="cpu", threads=1)
        losses.append(list(pipe.train(labelled_batches(48), window=3)))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_a_profile_may_choose_the_cuts():
    with Pipeline(
        mlp(),
        cross_entropy,
        momentum,
        partition="profile",
        threads=1,
        sample=next(iter(DataLoader(labelled(8), 8))),
    ) as made:
        assert made.plan.prediction is not None
        assert "profiled on" in str(made.plan)


def test_without_an_average_there_is_none_to_give(pipe):
    with pytest.raises(ConfigError, match="give Pipeline ema="):
        pipe.state_dict(ema=True)


def test_a_loaded_average_is_not_taken_for_the_weights(tmp_path):
    given = {"ema": 0.9, "device": "cpu", "threads": 1}
    with Pipeline(mlp(), cross_entropy, momentum, **given) as pipe:
        list(pipe.train(labelled_batches(24)))
        pipe.save(tmp_path)
    pipe = Pipeline(mlp(), cross_entropy, momentum, **given)
    pipe.load(tmp_path)
    with pytest.raises(ConfigError, match="there is no moving average of the weights"):
        pipe.state_dict(ema=True)  # it is read with the first batch


def test_every_schedule_that_ships_is_listed_with_what_it_is():
    listed = pipeline.schedules()
    assert {"1f1b", "gpipe", "pipedream"} <= listed.keys()
    assert listed["gpipe"].startswith("All forwards of a batch, then all its backwards")
