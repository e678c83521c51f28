"""The race on a GPU, rehearsed on the CPU: everybody trains the same, and each is held against its target."""

from __future__ import annotations

import pytest
import torch

from benchmark import cli, gpu
from benchmark.contestants import BatchFeed
from benchmark.report import Row
from benchmark.tasks import Task, prepare
from benchmark.worlds import Place, run_world
from tests.support.deadlines import DEADLINE_S

CHANNELS_LAST = ("memory_format=channels_last", "microbatches=4", "batch_size=8")
TASK = Task(("model._target_=benchmark.memory.small_cnn", "dtype=float64", *CHANNELS_LAST))
SIZES = gpu.Sizes({}, {}, batches=2, window=4)


def turns(mesh, say):
    """Return the losses of a turn of each, where this rank knows them."""
    losses = {}
    for one in gpu.contestants(mesh, TASK, SIZES, gpu._group(mesh)):
        one.run()
        losses[one.name] = one.losses
    return losses


def alone(mesh, say):
    plain = gpu.Plain(gpu.PLAIN, prepare(TASK, "1f1b", 1), mesh, 2, pieces=4, arranged=True)
    plain.run()
    return plain.losses


@pytest.mark.processes
def test_everybody_trains_the_same_and_images_travel_with_their_channels_innermost():
    (plain,) = run_world(alone, 1, print, deadline=DEADLINE_S)
    _, last = run_world(turns, 2, print, deadline=DEADLINE_S)
    assert last.keys() == {"1f1b", "gpipe", "pipedream", "torch GPipe", "torch 1F1B"}
    assert len(plain) == 2
    assert plain[1] != plain[0]
    for name in ("1f1b", "gpipe", "torch GPipe", "torch 1F1B"):
        assert last[name] == pytest.approx(plain, abs=1e-12), name


def test_the_targets():
    series = {
        "1f1b": [0.010],
        "gpipe": [0.012],
        "pipedream": [0.008],
        "torch 1F1B": [0.01],
        "torch GPipe": [0.011],
    }
    series |= {"1f1b, CUDA graphs": [0.0051], "pipedream, CUDA graphs": [0.004]}
    case = gpu.WHOLE.pairs["VGG16, batch 64 in 4"]
    rows = {row.contestant: row for row in gpu.make_rows("gpu", series, case)}
    met = {name: [verdict.met for verdict in row.verdicts] for name, row in rows.items()}
    assert met == {
        "1f1b": [True],
        "gpipe": [False],
        "pipedream": [True],
        "torch 1F1B": [],
        "torch GPipe": [],
        "1f1b, CUDA graphs": [False],
        "pipedream, CUDA graphs": [True],
    }
    assert not any(row.verdicts for row in gpu.make_rows("gpu", series, None))
    (plain, ours) = gpu.make_alone_rows("gpu", {"plain loop": [0.97], "1f1b": [1.0]}, True)
    assert [verdict.met for verdict in ours.verdicts] == [True]
    assert plain.verdicts == []


def test_a_race_that_fails_is_named_and_the_others_go_on(monkeypatch, capsys):
    def run(work, ranks, say, task, *given, place: Place, deadline):
        if "batch_size=8" in task.overrides:
            raise gpu.WorldFailed("rank 1 died without a word (-9)")
        return [{"1f1b": [1.0], gpu.PLAIN: [1.0], "torch GPipe": [1.0], "torch 1F1B": [1.0]}]

    monkeypatch.setattr(gpu, "run_world", run)
    monkeypatch.setattr(cli, "SUITES", {"gpu": gpu.suite})
    assert cli.main(["gpu", "--quick"]) == cli.FAILED
    said = capsys.readouterr().out
    assert "one process, mlp" in said
    assert "GPT, batch 8 in 4: rank 1 died without a word (-9)" in said


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["gpu"], cli.FAILED, "Suite gpu FAILED: it needs a GPU that torch can use; --quick rehearses it"),
        ([], 0, "Suite gpu was left out: it needs a GPU that torch can use."),
    ],
)
def test_without_a_gpu_it_says_so(arguments, status, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    suites = {"a": lambda scale, say: [Row("a", "1f1b", [1.0], "ms")], "gpu": gpu.suite}
    monkeypatch.setattr(cli, "SUITES", suites)
    assert cli.main(arguments) == status
    assert said in capsys.readouterr().out


def test_a_feed_shows_its_first_microbatch():
    """To the rehearsal, which makes others of it."""
    feed = BatchFeed(prepare(TASK, "1f1b", 2), torch.device("cpu"))
    inputs, target = feed.first()
    assert inputs is not None
    assert target is not None
    assert inputs[0].shape == (2, 3, 32, 32)
    assert target.value.shape == (2,)
    assert torch.equal(inputs[0], feed.input(0)[0])
    assert (target.weight, target.share) == (2.0, 0.25)
