"""The examples of the pages, run as they stand."""

from __future__ import annotations

import re

import pytest
import torch

import pipetrain
from pipetrain.commands import export
from pipetrain.trainer.arguments import read_options
from tests.docs import run_examples
from tests.support.processes import CHECKOUT, TWO, finished

DOCS = CHECKOUT / "docs"
EXAMPLES = DOCS / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
ALONE = "mlp"  # is started as a person starts it
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+(?:e-?\d+)?")


def numbers(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


@pytest.mark.processes
def test_every_example_runs_on_two_ranks(ranks, tmp_path):
    examples = [str(EXAMPLES / f"{name}.py") for name in NAMES if name != ALONE]
    again = [str(EXAMPLES / "saving.py"), str(EXAMPLES / "fitting.py")]
    again += [f"{EXAMPLES / 'own_schedule.py'} {EXAMPLES / 'by_twos.txt'}"]
    said, by_the_last = ranks(run_examples.run, tmp_path, [*examples, *again])

    perplexities = [float(number) for number in re.findall(r"perplexity (\S+)", said["gpt"])]
    assert perplexities[-1] < 3 < perplexities[0]
    planned, *updates = said["asynchronous"].splitlines()
    assert planned == "staleness of stage 0: 1 update"
    assert [line.split(":")[0] for line in updates] == ["update 20", "update 24", "update 28", "update 32"]
    first, second = said["saving"].splitlines()
    assert first.startswith("after 4 updates")
    assert second.startswith("after 8 updates")
    trained = [numbers(line) for line in (first, second)]
    assert all(ours == pytest.approx(plain, abs=2e-4) for ours, plain in trained)
    assert trained[1][0] < trained[0][0]
    by_function, by_file = said["own_schedule"].split("Sequential, schedule by_twos: 2 stages")[1:]
    assert by_function == by_file
    assert float(re.search(r"close (\S+)%", said["own_task"]).group(1)) > 50
    *losses, again = numbers(said["large"])
    assert again < losses[-1] < losses[0]
    trained, resumed = said["fitting"].splitlines()
    assert trained == resumed
    assert trained.startswith("epoch 3: all test samples 0.")
    first, trained, whole, plain = numbers(said["lora"])
    assert trained < first / 10
    assert whole == plain
    best, last = map(int, re.findall(r"\d+", said["early_stopping"]))
    assert last == best + 3
    assert export.main([str(tmp_path / "runs" / "early"), "--best", "--out", str(tmp_path / "best")]) == 0
    four, none = numbers(said["predicting"])
    assert (four, none) == pytest.approx((4.0, 0.0), abs=0.2)
    plain, slower = (numbers(line) for line in said["own_correction"].splitlines())
    assert (plain[0] == slower[0], plain[1] < slower[1] < slower[0]) == (True, True)
    assert len(numbers(said["from_torchgpipe"])) == 4
    first, second = numbers(said["lengths"])
    assert second < first - 0.3
    assert len(numbers(said["from_deepspeed"])) == 10

    theirs = numbers(by_the_last["torch_pipelining"])
    assert numbers(said["from_pipelining"]) == pytest.approx(theirs, rel=1e-12)
    assert len(theirs) == 4


@pytest.mark.processes
@pytest.mark.parametrize("words", [[], TWO], ids=["one process", "two ranks"])
def test_the_readme_s_example_runs_as_it_says(words, tmp_path):
    done = finished(tmp_path, [*words, EXAMPLES / "mlp.py"])
    losses = numbers(done.out)
    assert done.status == 0, done.out
    assert len(losses) == 6
    assert losses[-1] < losses[1]


def test_what_the_pages_show_is_what_is_run():
    """Each block is a part of an example, and each example is named."""
    page = "".join((DOCS / f"{name}.md").read_text() for name in ("python", "moving", "tasks", "recipes"))
    texts = {name: (EXAMPLES / f"{name}.py").read_text() for name in NAMES}
    for block in BLOCK.findall(page):
        assert any(block in text for text in texts.values()), block
    all_pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert [name for name in NAMES if f"{name}.py" not in all_pages] == []


def test_the_readme_shows_the_first_example_which_has_fifteen_lines():
    text = (EXAMPLES / "mlp.py").read_text()
    assert text in BLOCK.findall((CHECKOUT / "README.md").read_text())
    assert sum(map(bool, text.splitlines())) <= 15


def test_the_names_on_the_page_are_there():
    page = (DOCS / "python.md").read_text()
    for name in set(re.findall(r"\bpipe\.(\w+)", page)) - {"metrics"}:
        assert hasattr(pipetrain.Pipeline, name), name
    for name in set(re.findall(r"`pipetrain\.(\w+)`", page)):
        assert name in pipetrain.__all__, name


def test_the_options_on_the_page_are_options_and_one_of_the_command_line_alone_is_none():
    (call,) = re.findall(r"`(Pipeline\(\.\.\., partition.*?\))`", (DOCS / "python.md").read_text(), re.DOTALL)
    options = eval(call.replace("Pipeline(..., ", "dict("))
    read_options(options, torch.nn.Linear(1, 1), "1f1b", {"microbatches": 8}, 1)
    with pytest.raises(pipetrain.ConfigError, match="takes no logger"):
        read_options({"logger": "wandb"}, torch.nn.Linear(1, 1), "1f1b", {}, 1)
