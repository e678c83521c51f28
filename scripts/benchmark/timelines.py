"""Suite `timelines`: what four ranks really did, one schedule above the other on one axis of time.

The machine is that of `zero-bubble`, on which F, I and W of a whole stage take the same time (see `paced`),
so that the order is what can be seen. The page is one HTML file with nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmark.contestants import Ours, race
from benchmark.paced import Paced
from benchmark.report import Row, timed_row
from benchmark.tasks import Scale
from benchmark.worlds import Say, gather_objects, run_world, titled
from benchmark.zero_bubble import Way, bound, prepared
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule import page as drawn
from pipetrain.schedule.timeline import Row as Spans
from pipetrain.schedule.timeline import Timeline

RANKS, MICROBATCHES, BATCHES = 4, 8, 2
PRODUCT_S = 0.06
SHOWN = {
    "1f1b": "One forward, one backward, a flush after each batch.",
    "zb_h1": "The same memory, the backward split: W waits until a rank has nothing else to do.",
    "zbv": "Two half stages a rank, placed as a V: the first rank has the loss, too.",
    "v_async": "The same placement without a flush, old weights stashed: no rank waits once it is full.",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """A schedule as it ran in its fastest round. `paper_s`: seconds of the window by `simulate`."""

    name: str
    timeline: Timeline
    paper_s: float


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, write the page if one is asked for, and give the rows."""
    names, product_s = (("1f1b", "v_async"), 0.004) if scale.quick else (tuple(SHOWN), PRODUCT_S)
    shown = run_world(measure, RANKS, titled(say, "timelines"), names, product_s, scale.rounds)[0]
    if scale.page is not None:
        scale.page.parent.mkdir(parents=True, exist_ok=True)
        scale.page.write_text(page(shown, product_s))
    seconds = {one.name: [one.timeline.makespan] for one in shown}
    for one in shown:
        against = {"of bound": "bound", "x 1f1b": "1f1b"}
        title = f"{one.name}: {one.timeline.bubble:.1%} bubble"
        series = {**seconds, title: seconds[one.name], "bound": [one.paper_s]}
        yield timed_row(f"timelines, a window of {BATCHES} batches", title, series, against)


def measure(mesh: Mesh, say: Say, names: Sequence[str], product_s: float, rounds: int) -> list[Shown]:
    """Run every schedule, on one rank; returns what all ranks did."""
    contestants, taken, paper = [], {}, {}
    for name in names:
        way = Way(name, BATCHES, v=name not in ("1f1b", "zb_h1"))
        job, one_s = prepared(way, mesh.world.size, MICROBATCHES, product_s)
        ours = Ours(name, job, mesh)
        rows: list[Spans] = []
        ours.observe = rows.append
        taken[name], paper[name] = rows, BATCHES * bound(job.plan, one_s)
        contestants.append(Paced(ours, one_s))
    race(mesh, contestants, rounds, say)
    by_rank: list[dict[str, list[Spans]]] = gather_objects(taken)
    shown = []
    for name in names:
        turns = zip(*(rank[name] for rank in by_rank), strict=True)  # each with the rows of all ranks
        ran = [Timeline(list(rows), MICROBATCHES) for rows in turns]
        shown.append(Shown(name, min(ran, key=lambda turn: turn.makespan), paper[name]))
    return shown


def page(shown: Sequence[Shown], product_s: float) -> str:
    """Return the page."""
    return drawn.page(
        "Zero bubble, measured",
        f"{RANKS} ranks train {BATCHES} batches of {MICROBATCHES} microbatches, drawn from the spans that "
        f"the engine recorded, all on the same axis of time. F, I and W of a whole stage take "
        f"{1000 * product_s:g} ms each, and those of the half stages of a V placement half of it; B is I and "
        f"W in one.",
        [
            drawn.Shown(one.name, SHOWN[one.name], one.timeline, f" (on paper {one.paper_s:.3f} s)")
            for one in shown
        ],
    )
