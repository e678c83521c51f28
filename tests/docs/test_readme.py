"""The README is true: its table and its timeline are what `simulate` says, its commands are real.

`python -m tests.docs.test_readme` prints the table and the timeline anew, to be pasted.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from torch import Tensor

from benchmark import cli
from pipetrain.codec import Codec
from pipetrain.commands import plan
from pipetrain.config.build import make_codec
from pipetrain.config.choices import conf_dir
from pipetrain.config.settings import Settings
from pipetrain.data import cifar10, digits, folder
from pipetrain.model.specs import TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import estimate
from pipetrain.plan.partition import choose_cuts
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import one_f_one_b
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.text import as_text
from published import cli as published
from published.experiments.staleness import half, rows_of
from tests.comparison.support import asked
from tests.gpu import cli as gpu
from tests.support.cases import SCHEDULES, config, options_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").rglob("*.md"))
COMPARED = ["1f1b", "zb_h1", "zbv", "v_half", "pipedream", "pipedream_2bw"]
TABLE = f"python -m pipetrain.plan compare=[{','.join(COMPARED)}] stages=4 microbatches=8"
SPEC = TensorSpec((2,), torch.float32)
CODEC = re.compile(r"^\| `(\w+)`.*?\| ([\d,]+)(?: bytes)? \|", re.MULTILINE)


def printed(command: str) -> str:
    """What a command of `python -m pipetrain.plan` prints."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        assert run_plan(command, patch) == 0
    return out.getvalue()


def timeline() -> str:
    """1F1B on three equal stages."""
    return as_text(simulate(lower(one_f_one_b(3, 1, 3)), 3))


def readme() -> str:
    """The README, and the pages that it leads to."""
    return "\n".join(page.read_text() for page in PAGES)


def commands() -> list[str]:
    """The lines of the shell blocks, each once, continued lines joined, comments left out."""
    blocks = re.findall(r"```bash\n(.*?)```", readme(), re.DOTALL)
    text = "".join(blocks).replace("\\\n", " ")
    return sorted({raw.split("  #")[0].strip() for raw in text.splitlines()} - {""})


def overrides(command: str) -> list[str]:
    return [word for word in shlex.split(command) if re.fullmatch(r"\+?[\w.]+=\S*", word)]


def test_the_table_of_schedules_is_what_its_command_prints():
    assert TABLE in commands()
    assert f"```\n{printed(TABLE)}```" in readme()


def test_every_schedule_is_explained_and_the_timeline_is_what_simulate_draws():
    page = (ROOT / "docs" / "schedules.md").read_text()
    assert [name for name in SCHEDULES if not re.search(rf"^- .*`{name}`", page, re.MULTILINE)] == []
    assert timeline().rstrip() in readme()


def test_the_number_of_schedules_that_ship_is_theirs():
    assert re.findall(r"\[(\d+)\]\(docs/schedules\.md\) ship", readme()) == [str(len(SCHEDULES))]


def test_what_is_said_of_late_gradients_is_what_the_study_s_table_has():
    made = json.loads((ROOT / "docs" / "results" / "staleness" / "staleness.json").read_text())
    text = " ".join((ROOT / "README.md").read_text().split())
    every = rows_of({key: step["result"] for key, step in made.items()})
    rows = {(row.task, str(row.way)): row for row in every if row.optimizer == "muon"}
    for task in ("digits, GroupNorm", "CIFAR-10, GroupNorm", "GPT"):
        row = rows[task, "pipedream_2bw + hybrid + spectrain"]
        digits = 1 if row.metric == "accuracy" else 4
        assert f"{row.gap:.{digits}f} ± {half(row.gaps):.{digits}f}" in text


def test_exact_schedules_are_as_much_faster_on_paper_as_the_page_says():
    out = printed("python -m pipetrain.plan compare=[1f1b,zb_h1,zbv] stages=8 microbatches=8")
    times = {name: float(time) for name, time in re.findall(r"^(\w+) +([\d.]+) ", out, re.M)}
    text = " ".join((ROOT / "docs" / "staleness.md").read_text().split())
    for name in ("zb_h1", "zbv"):
        assert f"with the exact `zb_h1` and `zbv` {times['1f1b'] / times[name]:.2f} times" in text


def test_images_are_normalised_as_the_page_says():
    sets = {
        "cifar10": (cifar10.MEAN, cifar10.STD),
        "digits": (digits.load().train.mean, digits.load().train.std),
    }
    defaults = inspect.signature(folder.load).parameters
    sets["images"] = defaults["mean"].default, defaults["std"].default
    page = (ROOT / "docs" / "data.md").read_text()
    for name, numbers in sets.items():
        (said,) = re.findall(rf"^\| `{name}`.*?\| ([\d. ]+) \| ([\d. ]+) \|$", page, re.MULTILINE)
        assert [[float(n) for n in of.split()] for of in said] == [
            [round(n, 4) for n in of] for of in numbers
        ]


OURS = [c for c in commands() if ("pipetrain" in c or "launch" in c) and "--config-dir" not in c]


@pytest.mark.parametrize("command", OURS)
def test_every_training_command_composes(command):
    sweep_apart = [o.partition(",")[0] if "--multirun" in command else o for o in overrides(command)]
    own = ("out=", "NPROC=", "compare=", "advise=", "costs=", "bandwidth=", "scale=", "ranks=", "machines=")
    config([o for o in sweep_apart if not o.startswith(own)])


def run_plan(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command of `python -m pipetrain.plan` in this process; return its status."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr("sys.argv", shlex.split(command)[2:])
    with pytest.raises(SystemExit) as end:
        plan.main()
    GlobalHydra.instance().clear()
    return int(end.value.code or 0)


@pytest.mark.parametrize("command", [c for c in OURS if "pipetrain.plan" in c])
def test_every_plan_command_runs(command, tmp_path, monkeypatch):
    for name in ("docs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    assert run_plan(command, monkeypatch) == 0


def compared_by(words: Sequence[str]) -> object:
    return published.parser().parse_args(words) if published.asked_for(words) else asked(*words)


READERS = {
    "scripts/bench.py": lambda words: cli.parser().parse_args(words),
    "scripts/compare.py": compared_by,
    "scripts/gpu_check.py": lambda words: gpu.parser().parse_args(words),
}


@pytest.mark.parametrize("script", READERS)
def test_every_command_of_a_script_can_be_read(script):
    words = [shlex.split(command)[2:] for command in commands() if script in command]
    assert [READERS[script](one) for one in words]


def block(language: str, name: str) -> str:
    """Return the block of code in which a name stands."""
    blocks = re.findall(rf"```{language}\n(.*?)```", readme(), re.DOTALL)
    return next(block for block in blocks if name in block)


def test_its_own_schedule_runs_as_it_is_printed(tmp_path, monkeypatch, capsys):
    """The function, the YAML file and the command, each as it stands."""
    (tmp_path / "take_turns.py").write_text(block("python", "take_turns"))
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule" / "take_turns.yaml").write_text(block("yaml", "take_turns"))
    (planned,) = [c for c in commands() if "pipetrain.plan --config-dir" in c]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert run_plan(planned, monkeypatch) == 0
    assert "schedule take_turns: 4 stages on 4 ranks, batch 64 in 4 microbatches, window of 1 batch," in (
        capsys.readouterr().out
    )


def test_its_own_model_can_be_cut():
    names = {"nn": torch.nn}
    exec(block("python", "def my_factory"), names)
    layers = estimate(names["my_factory"](), ValueSpec((TensorSpec((2, 3, 32, 32), torch.float32),)))
    assert choose_cuts([2], layers, [0, 1]) == [2]


def test_its_own_codec_can_be_used():
    names = {"Codec": Codec, "TensorSpec": TensorSpec, "Tensor": Tensor, "torch": torch, "Sequence": Sequence}
    exec(block("python", "class Sign"), names)
    codec = make_codec("codec.forward", names["Sign"](0.5))
    assert codec.decode(codec.encode(torch.tensor([3.0, -1.0])), SPEC).tolist() == [0.5, -0.5]


def test_the_table_of_codecs_has_the_bytes_of_each():
    (boundary,) = [TensorSpec((64, 128, 16, 16), torch.float32)]
    said = {name: int(nbytes.replace(",", "")) for name, nbytes in CODEC.findall(readme())}
    names = sorted(path.stem for path in (conf_dir() / "codec").glob("*.yaml"))
    codecs = {
        name: Settings.composed(options_of([f"codec.forward={name}"]), "1f1b", 2).codecs for name in names
    }
    assert said == {name: chosen.wire_bytes([boundary], forward=True) for name, chosen in codecs.items()}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_a_page_leads_to_is_there():
    for page in (*PAGES, *RESULTS):
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}#{anchor}"


def test_the_tests_of_promises_are_there():
    """Each promise names its tests by their paths, and each test file that a page names is there."""
    text, _, _ = (ROOT / "docs" / "reliability.md").read_text().partition("\n## ")
    promises = re.findall(r"^- .+\n(?:  .+\n)*", text, re.MULTILINE)
    assert len(promises) > 20
    assert [one for one in promises if not re.search(r"`tests/\S+\.py`\)\.$", one)] == []
    pages = readme() + "".join(page.read_text() for page in RESULTS)
    named = set(re.findall(r"`([\w/]*\btest_\w+\.py)`", pages))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_annotated_tree_names_what_there_is():
    names = sorted({path.name for path in (ROOT / "scripts").glob("*.*")} - {"environment.sh"})
    assert f"scripts/          {', '.join(names)}\n" in readme()
    for name in re.findall(r"^  (\w+\.py|\w+/)\s", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE):
        assert (ROOT / "pipetrain" / name).exists() or (ROOT / "scripts" / name).exists(), name


def test_every_configuration_group_is_named():
    for group in (path.name for path in conf_dir().iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert f"{group}/" in readme() or f"{group}=" in readme(), group


if __name__ == "__main__":
    print(printed(TABLE), timeline(), sep="\n\n")
