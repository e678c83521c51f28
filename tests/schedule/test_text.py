"""Drawings: text to the letter, and what can be read in a figure."""

from __future__ import annotations

import re
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest

from pipetrain.schedule.actions import Action, Op, Program, ScheduleError, parse_program
from pipetrain.schedule.lower import lower
from pipetrain.schedule.memory import Items, over_time
from pipetrain.schedule.plot import as_figure, as_png, as_stack
from pipetrain.schedule.programs import gpipe, one_f_one_b, pipedream, zbv
from pipetrain.schedule.simulate import Cost, simulate, unit_cost
from pipetrain.schedule.text import as_text
from pipetrain.schedule.timeline import Timeline
from pipetrain.schedule.transforms import joined, with_norms
from tests.schedule.cases import CASES, NAMES, Case, accepted


def slowed(by: float, stages: tuple[int, ...] = (0, 1), factor: float = 1.0) -> Cost:
    return lambda action: by * unit_cost(action) * (factor if action.stage in stages else 1.0)


def first_slow(action: Action) -> float:
    return 1e-6 if action == Action(0, Op.F, 0, 0) else unit_cost(action)


def run(program: Program, microbatches: int, cost: Cost = unit_cost) -> Timeline:
    return simulate(lower(program), microbatches, cost=cost)


SHARED = parse_program("0F0@0 0B0@0 0STEP@1\n0F1@0 0B1@0 0STEP@1\n1F0@0 1F1@0 1B0@0 1B1@0 1STEP@1")

PICTURES: dict[str, tuple[Timeline, dict[str, Any]]] = {
    """1F1B as the documents show it:
4 ranks, makespan 21, bubble 42.9%
rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- .  B1--- .  B2--- .  B3---|
rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---|.  .
rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---|.  .  .  .
rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---|.  .  .  .  .  .
""": (run(one_f_one_b(4, 1, 4), 4), {}),
    """a V, with halves of backwards:
2 ranks, makespan 19, bubble 5.3%
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0---- 3F2 3I2 3W2|0B1---- 0B2----|.
rank 1  .   1F0 2F0 1F1 2F1 2B0---- 1F2 1I0 1W0 2F2 2B1---- 1I1 2I2 1I2 1W1 2W2|1W2|
""": (run(joined(zbv(2, 1, 3)), 3), {"width": 120}),
    """steps that wait for the norms of all stages:
2 ranks, makespan 17, bubble 29.4%
rank 0  F0 F1 .  .  B0--- F2 B1---|F3 .  .  B2--- .  B3---|
rank 1  .  F0 B0--- F1 B1--- .  . |F2 B2--- F3 B3--- .  . |
""": (run(with_norms(pipedream(2, 2, 2)), 2), {}),
    """of a long window what fills two lines:
2 ranks, makespan 123, bubble 2.4%; cells 0 to 14 of 123
rank 0  F0- F1- .   .   B0-----|F2-…
rank 1  .   F0- B0-----|F1- B1-----|…

rank 0  B1-----|F3- B2-----|F4- B3--…
rank 1  F2- B2-----|F3- B3-----|F4-…
""": (run(pipedream(2, 40, 1), 1), {"width": 40}),
    """or what is asked for:
2 ranks, makespan 123, bubble 2.4%; cells 118 to 123 of 123
rank 0  B38----|.   B39----|
rank 1  F39 B39----|.   .
""": (run(pipedream(2, 40, 1), 1), {"width": 40, "span": (118, 999)}),
    """the stage of each rank, where it may have replicas:
3 ranks, makespan 9, bubble 55.6%
rank 0 (stage 0)  F0 .  .  .  .  B0--- .  . |
rank 1 (stage 0)  F1 .  .  .  .  .  .  B1---|
rank 2 (stage 1)  .  F0 F1 B0--- B1---|.  .
""": (run(SHARED, 2), {}),
    """times that are no units are drawn to scale, in their unit, below a title:
mlp, 1f1b, 2 ranks, makespan 0.045 s, bubble 40.0%; a cell is 0.003 s
F forward, B backward, | step, . idle, F3: of microbatch 3
rank 0  F0 F1 .  .  .  .  .  B0--- .  .  .  .  B1---|
rank 1  .  F0--- B0--------- F1--- B1---------|.  .
""": (run(one_f_one_b(2, 1, 2), 2, slowed(0.003, (1,), 2.0)), {"title": "mlp, 1f1b", "unit_of_time": "s"}),
}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.partition(":")[0])
def test_as_text(picture: str) -> None:
    timeline, options = PICTURES[picture]
    assert as_text(timeline, **options) == picture.partition(":\n")[2]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_text_never_leaves_its_width(case: Case) -> None:
    for size, program in accepted(case, [(1, 1, 1), (3, 2, 3)]):
        run = simulate(program, size[2])
        for width in (20, 41, 173):
            rows = as_text(run, width).splitlines()[1:]
            assert len(rows) in [n * size[0] + n - 1 for n in (1, 2)]
            assert max(map(len, rows)) <= width


def test_actions_of_next_to_no_time_do_not_blow_up_the_drawing() -> None:
    """A cell of the shortest action's time would leave room for one action of the rank that works."""
    assert len(as_text(run(one_f_one_b(2, 1, 2), 2, first_slow)).splitlines()) == 3
    text = as_text(run(pipedream(4, 16, 2), 2, slowed(1.0, (1, 2, 3), 0.01)), span=(0, 999))
    assert "; a cell is 0.5" in text
    assert {"F0-----", "B0-------------", "F4-----", "B28------------"} <= set(text.replace("|", " ").split())


def texts(svg: Path) -> list[str]:
    """Matplotlib draws letters as paths, and leaves each text in a comment."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


def test_a_figure_shows_every_microbatch_its_legend_the_bubble_and_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now raises
    timeline = run(joined(zbv(2, 1, 3)), 3, slowed(0.003, ()))
    held = over_time(timeline, [Items(saved=mib * 2**20) for mib in (4, 3, 2, 1)], (2, 2))
    as_figure(timeline, tmp_path / "v.svg", "zbv", "s", memory=held)
    seen = texts(tmp_path / "v.svg")
    assert "zbv  ·  2 ranks  ·  makespan 0.057 s  ·  bubble 5.3%" in seen
    names = {"forward", "backward", "input gradient", "weight gradient", "step", "idle"}
    names |= {"rank 0", "stages 0, 3", "stages 1, 2"}
    names |= {"time, s; numbers: microbatches; paler: a later stage of the rank"}
    names |= {"peak 13 MiB", "peak 11 MiB", "activations", "memory held, each rank at its own scale"}
    assert names - set(seen) == set()
    assert seen.count("2") == 4 + 7  # forwards, and a B, 3 I and 3 W
    as_figure(run(SHARED, 2), tmp_path / "replicas.svg")
    assert [texts(tmp_path / "replicas.svg").count(f"stage {stage}") for stage in (0, 1)] == [2, 1]


def width(svg: Path) -> float:
    """In inches."""
    found = re.search(r'width="([\d.]+)pt"', svg.read_text())
    assert found
    return float(found[1]) / 72


@pytest.mark.slow
def test_of_a_long_figure_the_first_cells_are_drawn_and_a_stack_has_one_width(tmp_path: Path) -> None:
    timeline = run(pipedream(2, 50, 4), 4)
    as_figure(timeline, tmp_path / "long.svg")
    seen = texts(tmp_path / "long.svg")
    assert "0 to 64 of 603 cells" in " ".join(seen)
    assert "20" in seen
    assert not {"23", "199"} & set(seen)
    assert width(tmp_path / "long.svg") < 18
    as_stack([("whole", timeline, inf)], tmp_path / "stack.svg")
    assert width(tmp_path / "stack.svg") == 16
    assert "199" not in texts(tmp_path / "stack.svg")  # there is no room for it


def test_a_png_can_be_had_without_a_file_and_another_suffix_is_refused() -> None:
    timeline = run(gpipe(2, 1, 1), 1)
    assert as_png(timeline).startswith(b"\x89PNG")
    with pytest.raises(ScheduleError, match=r"written as \.svg or \.png; got line\.pdf"):
        as_figure(timeline, "line.pdf")
