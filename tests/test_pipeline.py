"""Pipeline trains as one process would, on any number of processes, and refuses the rest in one sentence."""

from __future__ import annotations

import re

import pytest

from pipetrain import pipeline
from tests.support.programs import GROUPS, JOBS, Case, train_case, train_cases
from tests.support.refused import ALIKE, APART, all_told, told
from tests.support.worlds import run_world


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Let no test meet the Pipeline that another one has left open."""
    monkeypatch.setattr(pipeline, "_open", None)


def cases(ranks: int) -> list[Case]:
    m = {1: 4, 2: 4, 3: 3}[ranks]  # of which the interleaved schedule needs a multiple of the ranks
    few = max(2, ranks)  # so that each microbatch has 2 samples, as a BatchNorm needs
    every = [
        *(Case(job, "1f1b", few if job == "normed" else m) for job in JOBS),
        *(Case(job, "pipedream", 2) for job in JOBS),
        Case("gpt", "pipedream_2bw", m),
        Case("mlp", "gpipe", m, window=2),
        Case("mlp", "pipedream", 1, window=2),
        Case("mlp", "1f1b", m, by_step=True),
        Case("mlp", "1f1b", m, options={"param_groups": GROUPS}),
        Case("normed", "pipedream_2bw", few, window=2, options={"param_groups": GROUPS}),
    ]
    if ranks > 1:
        every += [Case("gpt", "interleaved_1f1b", m), Case("tuples", "interleaved_1f1b", m, window=3)]
    return every


@pytest.mark.parametrize("case", cases(1), ids=lambda case: f"{case.job}-{case.schedule}")
def test_one_process_trains_as_plain_pytorch_does(case):
    train_case(case, 0)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes_train_as_plain_pytorch_does_and_all_know_the_results(ranks):
    """Each rank's loader shuffles otherwise; the batches are those of rank 0's."""
    told = run_world(train_cases, ranks, cases(ranks))
    assert all(rank == told[0] for rank in told[1:])
    assert all(result["updates"] == 3 for result in told[0])


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
