"""The suites: their bounds are the formulas', and each runs through the command line, small and in time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmark import cli, contestants, memory, models, sleep
from benchmark.contestants import Ours
from benchmark.report import Row
from benchmark.tasks import prepare
from pipetrain.plan.estimate import Layer
from pipetrain.runtime.ranks import World
from tests.support.deadlines import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
NAP = sleep.Nap(0.03, 0.06, (4,), (4,), 32)


class NoMesh:
    """Enough of a mesh to build a contestant that never runs."""

    world = World(0, 4, 0, 4)
    device = torch.device("cpu")

    def channel(self, buffer_size, channels_last=False):
        return None


def test_the_bound_of_a_flush_is_the_formula(monkeypatch):
    monkeypatch.setattr(contestants, "fitted", lambda mesh, plan: mesh)
    short = sleep.Nap(0, 0, (4,), (4,), 32)  # nothing sleeps while the plan is made
    ours = Ours("x", prepare(sleep.task(short, 4, 4), "1f1b", 4), NoMesh(), clock=object())
    assert sleep.bound(ours, NAP) == pytest.approx((4 + 4 - 1) * 0.09)


def test_the_bound_of_naps_that_vary_is_the_stage_that_sleeps_longest():
    nap = sleep.Nap(0.01, 0.02, (2,), (1,), 3, spread=0.5)
    slept = [
        [sum(next(times)) for _ in range(9)] for times in (sleep.naps(s, 0.01, 0.02, 0.5) for s in (0, 1))
    ]
    turns = [[sum(stage[at : at + 3]) / 3 for stage in slept] for at in (3, 6)]
    assert sleep.jitter_bounds(2, nap, 2) == pytest.approx([max(turn) for turn in turns])


def layers(*flops):
    return [Layer(str(i), 1, f, None, False, False) for i, f in enumerate(flops)]


def test_the_cuts_to_try():
    assert models.candidate_cuts(layers(3, 3, 2, 2, 1, 1), 2) == {
        (1,): [],
        (2,): ["flops"],
        (3,): ["even", "params"],
        (4,): [],
    }


SERIES = {
    "m = 1": [0.3],
    "m = 4": [0.4],
    "gpipe": [0.5],
    "pipedream, once full": [0.32],
    "torch GPipe": [0.5],
    "torch 1F1B": [0.45],
    "one process, 1 thread": [0.6],
}


def test_each_is_held_against_the_ideal_of_its_own_microbatches():
    ideals = dict.fromkeys(SERIES, "m = 4") | {"pipedream, once full": "m = 1"}
    rows = models.make_rows("vgg16", models.Found({"before 6": [0.3]}, "before 6", SERIES, ideals))
    by_name = {row.contestant: row for row in rows}
    assert by_name["gpipe"].ratios["of bound"] == pytest.approx(0.8)
    assert [verdict.met for verdict in by_name["gpipe"].verdicts] == [True]
    assert by_name["pipedream, once full"].ratios["of bound"] == pytest.approx(0.9375)
    assert [verdict.met for verdict in by_name["pipedream, once full"].verdicts] == [False, True]
    assert by_name["torch GPipe"].verdicts == []


@pytest.mark.parametrize(("leak_mib", "still"), [(0.05, True), (0.3, False)])
def test_memory_grows_or_only_jitters(leak_mib, still):
    resident = [350 + 4 * (window % 3) + leak_mib * window for window in range(50)]
    rows = memory.make_rows("memory", memory.Held(resident, [(2, 2)], [(1, 2)]))
    assert [verdict.met for row in rows for verdict in row.verdicts] == [still, True, False]


WHAT_IT_SHOWS = {
    "sleep": [
        "sleep, 2 stages",
        "each stage alone",
        "pipedream, m = 1, once full",
        "torch 1F1B, m = 4",
        "x torch GPipe",
    ],
    "jitter": ["jitter, 2 stages", "fbp, in_flight 8, buffer_size 4: ", "x pipedream"],
    "vgg16": ["vgg16, slower stage alone", "ideal without messages", "torch DDP", "interleaved_1f1b"],
    "resnet18": ["resnet18, cut before", "pipedream, contiguous, once full"],
    "gpt": ["gpt", "ideal without messages", "pipedream, once full", "x torch 1F1B >= 1.15", "torch DDP"],
    "one-process": ["plain loop", "1f1b", "of bound >= 0.98"],
    "overhead": ["overhead, 1f1b, rank 1", "of it the channel", "< 150 us an action"],
    "api": ["api, 1f1b", "step: added to it", "train, a DataLoader: added to it", "< 1 ms a batch"],
    "memory": ["memory, pipedream, rank 0", "weight versions at the peak", "as simulated: 2"],
    "wire": ["wire, 100 MB/s", "pipedream, no codec", "layer_dist, int8, topk_int8 1 % back", "s an epoch"],
    "factory": ["factory, gpt, rank 3", "after a step", "x its weights"],
    "zero-bubble": ["zero bubble, 2 ranks", "torch ZBVZeroBubble, m = 4", "zero bubble, mlp", "x torch's"],
    "timelines": ["timelines, a window of 2 batches", "v_async: ", "% bubble"],
    "held": ["held, mlp", "measured / predicted"],
    "split": ["split, GPT block, d = 128", "torch's walk: F + I + W", "I+W / B", "median of all"],
    "gpu": [
        "gpu, a rehearsal on the CPU, GPT",
        "torch GPipe",
        "x torch 1F1B",
        "one process, mlp",
        "plain loop",
    ],
    "routes": ["routes, 4 stages", "by hand through every stage", "MiB as on paper, fewer MiB than by hand"],
}


def test_every_suite_is_tried():
    assert WHAT_IT_SHOWS.keys() == cli.SUITES.keys()


@pytest.mark.processes
def test_the_suites_through_the_command_line(tmp_path):
    """All in one go, because most of their time is the start.

    But for resnet18, which, small, is what vgg16 is, and gpu and zero-bubble, which have tests of their own.
    """
    out = tmp_path / "new" / "report.md"
    suites = sorted(WHAT_IT_SHOWS.keys() - {"gpu", "resnet18", "zero-bubble"})
    command = [sys.executable, str(ROOT / "scripts/bench.py"), *suites, "--quick", "--out", str(out)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert out.read_text() == done.stdout
    assert f"command: python scripts/bench.py {' '.join(suites)} --quick" in done.stdout
    for suite in suites:
        assert all(words in done.stdout for words in WHAT_IT_SHOWS[suite]), suite
    assert done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["sleeep"], "there is no sleeep; choose from sleep, jitter"),
        (["--rounds", "0"], "must be 1 or more; got 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, why, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert why in capsys.readouterr().err


def test_a_suite_that_fails_is_said_and_the_others_go_on(monkeypatch, capsys):
    def failing(scale, say):
        raise cli.WorldFailed("rank 1 failed:\nTraceback\nValueError: no more")

    monkeypatch.setattr(cli, "SUITES", {"a": failing, "b": lambda scale, say: []})
    assert cli.main([]) == 1
    assert "Suite a FAILED: ValueError: no more" in capsys.readouterr().out


def test_an_interruption_keeps_what_was_measured(monkeypatch, capsys):
    def interrupted(scale, say):
        yield Row("done before", "1f1b", [1.0], "ms")
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "SUITES", {"b": interrupted})
    assert cli.main([]) == 130
    said = capsys.readouterr().out
    assert "done before" in said
    assert "INTERRUPTED in suite b: what follows it is missing." in said
