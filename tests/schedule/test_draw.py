from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pipetrain.schedule.actions import Action, Op, ScheduleError, parse_program
from pipetrain.schedule.draw import as_text, ends
from pipetrain.schedule.figure import as_figure, as_png
from pipetrain.schedule.lower import lower
from pipetrain.schedule.memory import Items, over_time
from pipetrain.schedule.programs import forward_only, gpipe, interleaved_1f1b, one_f_one_b, pipedream, zbv
from pipetrain.schedule.simulate import simulate, unit_cost
from pipetrain.schedule.transforms import joined, with_norms
from tests.schedule.cases import CASES, NAMES, Case, accepted


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_1f1b_in_text() -> None:
    assert lines(as_text(simulate(lower(one_f_one_b(4, 1, 4)), 4))) == [
        "4 ranks, makespan 21, bubble 42.9%",
        "rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- .  B1--- .  B2--- .  B3---|",
        "rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---|.  .",
        "rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---|.  .  .  .",
        "rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---|.  .  .  .  .  .",
    ]


def test_several_stages_a_rank_and_halves_of_a_backward_in_text() -> None:
    assert lines(as_text(simulate(lower(forward_only([0, 1, 0, 1], 2)), 2))) == [
        "2 ranks, makespan 5, bubble 20.0%",
        "rank 0  0F0 0F1 2F0 2F1 .",
        "rank 1  .   1F0 1F1 3F0 3F1",
    ]
    split = parse_program(
        "0F0@0 0F1@0 0I0@0 0W0@0 0I1@0 0W1@0 0STEP@1\n1F0@0 1I0@0 1F1@0 1I1@0 1W0@0 1W1@0 1STEP@1"
    )
    assert lines(as_text(simulate(lower(split), 2)))[1:] == [
        "rank 0  F0 F1 .  I0 W0 I1 W1|",
        "rank 1  .  F0 I0 F1 I1 W0 W1|",
    ]


def test_a_v_in_text_shows_both_stages_of_a_rank() -> None:
    assert lines(as_text(simulate(lower(joined(zbv(2, 1, 3))), 3), width=120))[1:] == [
        "rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0---- 3F2 3I2 3W2|0B1---- 0B2----|.",
        "rank 1  .   1F0 2F0 1F1 2F1 2B0---- 1F2 1I0 1W0 2F2 2B1---- 1I1 2I2 1I2 1W1 2W2|1W2|",
    ]


def test_steps_that_wait_for_the_norms_of_all_stages_are_drawn_together() -> None:
    assert lines(as_text(simulate(lower(with_norms(pipedream(2, 2, 2))), 2)))[1:] == [
        "rank 0  F0 F1 .  .  B0--- F2 B1---|F3 .  .  B2--- .  B3---|",
        "rank 1  .  F0 B0--- F1 B1--- .  . |F2 B2--- F3 B3--- .  . |",
    ]


def test_of_a_long_window_two_lines_of_the_beginning_and_one_of_the_end_are_drawn() -> None:
    assert lines(as_text(simulate(lower(pipedream(2, 40, 1)), 1), width=40)) == [
        "2 ranks, makespan 123, bubble 2.4%; the first 9 and 118 to 123 of 123 cells",
        "rank 0  F0- F1- .   .   B0-----|F2-…",
        "rank 1  .   F0- B0-----|F1- B1-----|…",
        "",
        "rank 0  B1-----|…",
        "rank 1  F2- B2--…",
        "",
        "rank 0  B38----|.   B39----|",
        "rank 1  F39 B39----|.   .",
    ]


def test_two_batches_are_drawn_at_most_and_the_end_from_the_last_forward_on() -> None:
    """A batch of 2 takes 6 on each rank; the last backward of a microbatch is 9 after its forward."""
    run = simulate(lower(pipedream(4, 16, 2)), 2)
    assert ends(run, (1000, 1000)) == [(0, 9 + 2 * 6), (105 - 9, 105)]
    assert ends(run, (5, 3)) == [(0, 5), (102, 105)]


def test_a_short_window_is_drawn_whole() -> None:
    run = simulate(lower(one_f_one_b(4, 1, 4)), 4)
    assert ends(run, (21, 5)) == ends(run, (18, 5)) == [(0, 21)]


@pytest.mark.parametrize("width", [20, 41, 100, 173])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_text_never_leaves_its_width(case: Case, width: int) -> None:
    for size, program in accepted(case, [(1, 1, 1), (3, 2, 3), (4, 3, 12)]):
        rows = lines(as_text(simulate(program, size[2]), width))[1:]
        assert len(rows) in [n * size[0] + n - 1 for n in (1, 2, 3, 4)]
        assert max(map(len, rows)) <= width


def test_times_that_are_no_units_are_drawn_to_scale() -> None:
    def seconds(action: Action) -> float:
        return 0.003 * unit_cost(action) * (2 if action.stage else 1)

    assert lines(as_text(simulate(lower(one_f_one_b(2, 1, 2)), 2, cost=seconds))) == [
        "2 ranks, makespan 0.045, bubble 40.0%; a cell is 0.003",
        "rank 0  F0 F1 .  .  .  .  .  B0--- .  .  .  .  B1---|",
        "rank 1  .  F0--- B0--------- F1--- B1---------|.  .",
    ]


def test_an_action_of_next_to_no_time_does_not_blow_up_the_drawing() -> None:
    def uneven(action: Action) -> float:
        return 1e-6 if action == Action(0, Op.F, 0, 0) else unit_cost(action)

    assert len(lines(as_text(simulate(lower(one_f_one_b(2, 1, 2)), 2, cost=uneven)))) == 3


def test_ranks_of_next_to_no_time_do_not_blow_up_the_drawing_either() -> None:
    """A cell of the shortest action's time would leave room for one action of the rank that works."""

    def uneven(action: Action) -> float:
        return unit_cost(action) * (1 if action.stage == 0 else 0.01)

    run = simulate(lower(pipedream(4, 16, 2)), 2, cost=uneven)
    text = as_text(run)
    assert "a cell is 0.5; " in text
    assert {"F0-----", "B0-------------", "F4-----", "B28------------"} <= set(text.replace("|", " ").split())


def texts(svg: Path) -> list[str]:
    """Matplotlib draws letters as paths, and leaves each text in a comment."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


def test_a_figure_shows_every_microbatch_its_legend_and_the_bubble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now raises
    as_figure(simulate(lower(one_f_one_b(4, 1, 4)), 4), tmp_path / "1f1b.svg", "1f1b")
    seen = texts(tmp_path / "1f1b.svg")
    assert "1f1b  ·  4 ranks  ·  makespan 21  ·  bubble 42.9%" in seen
    assert {"forward", "backward", "step", "idle", "rank 0", "rank 3", "time; numbers: microbatches"} <= set(
        seen
    )
    assert seen.count("3") == 4 * 2


def test_of_a_long_figure_two_batches_and_the_end_are_drawn(tmp_path: Path) -> None:
    as_figure(simulate(lower(pipedream(2, 500, 4)), 4), tmp_path / "long.svg")
    seen = texts(tmp_path / "long.svg")
    assert "the window's end" in seen
    assert {"0", "7", "1998", "1999"} <= set(seen)
    assert not {"9", "11", "1990"} & set(seen)
    width = re.search(r'width="([\d.]+)pt"', (tmp_path / "long.svg").read_text())
    assert width
    assert float(width[1]) < 1000


def test_a_title_comes_with_the_unit_and_the_letters_of_a_text() -> None:
    assert lines(as_text(simulate(lower(gpipe(2, 1, 2)), 2), title="mlp, gpipe", unit_of_time="ms"))[:2] == [
        "mlp, gpipe, 2 ranks, makespan 9 ms, bubble 33.3%",
        "F forward, B backward, | step, . idle, F3: of microbatch 3",
    ]


def test_a_figure_names_the_stages_of_a_rank_and_the_halves_of_a_backward(tmp_path: Path) -> None:
    as_figure(simulate(lower(interleaved_1f1b(2, 1, 2)), 2), tmp_path / "a.svg")
    assert {"stages 0, 2", "stages 1, 3"} <= set(texts(tmp_path / "a.svg"))
    split = lower(parse_program("0F0@0 0I0@0 0W0@0 0STEP@1"))
    as_figure(simulate(split, 1), tmp_path / "b.svg")
    seen = set(texts(tmp_path / "b.svg"))
    assert {"input gradient", "weight gradient"} <= seen
    assert "backward" not in seen


def test_a_png_is_a_png(tmp_path: Path) -> None:
    as_figure(simulate(lower(gpipe(2, 1, 2)), 2), str(tmp_path / "gpipe.PNG"))
    assert (tmp_path / "gpipe.PNG").read_bytes().startswith(b"\x89PNG")


def test_the_same_png_can_be_had_without_a_file(tmp_path: Path) -> None:
    simulation = simulate(lower(gpipe(2, 1, 2)), 2)
    as_figure(simulation, tmp_path / "gpipe.png")
    assert as_png(simulation) == (tmp_path / "gpipe.png").read_bytes()


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"written as \.svg or \.png; got line\.pdf"):
        as_figure(simulate(lower(gpipe(2, 1, 2)), 2), tmp_path / "line.pdf")


def test_seconds_are_called_seconds(tmp_path) -> None:
    def cost(action: Action) -> float:
        return 0.003 * unit_cost(action)

    simulation = simulate(lower(gpipe(2, 1, 2)), 2, cost=cost)
    assert as_text(simulation, unit_of_time="s").splitlines()[0] == (
        "2 ranks, makespan 0.027 s, bubble 33.3%; a cell is 0.003 s"
    )
    as_figure(simulation, tmp_path / "x.svg", unit_of_time="s")
    seen = "".join((tmp_path / "x.svg").read_text().split("<!--")[1:])
    assert "makespan 0.027 s" in seen
    assert "time, s; " in seen


def test_memory_is_drawn_below_the_timeline_cell_by_cell() -> None:
    run = simulate(lower(one_f_one_b(2, 1, 2)), 2)
    held = over_time(run, [Items(saved=4 * 2**20), Items(saved=2**20, weights=2**20)], 2)
    assert lines(as_text(run, memory=held)) == [
        "2 ranks, makespan 9, bubble 33.3%; below, memory: █ is a rank's peak",
        "rank 0  F0 F1 .  .  B0--- .  B1---|",
        "rank 1  .  F0 B0--- F1 B1---|.  .",
        "rank 0  ▄▄▄▄▄▄████████████▄▄▄▄▄▄▄▄▄",
        "rank 1  ▄▄▄▄▄▄██████▄▄▄██████▄▄▄▄▄▄",
    ]


def test_a_figure_with_memory_labels_the_peak_of_each_rank(tmp_path: Path) -> None:
    run = simulate(lower(one_f_one_b(2, 1, 2)), 2)
    held = over_time(run, [Items(saved=4 * 2**20), Items(saved=2**20)], 2)
    as_figure(run, tmp_path / "held.svg", memory=held)
    seen = set(texts(tmp_path / "held.svg"))
    assert {"peak 8 MiB", "peak 1 MiB", "activations", "memory held, each rank at its own scale"} <= seen
