"""What late gradients cost by schedule, correction, optimizer and depth, emulated; which cure is enough."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from comparison.table import Table
from pipetrain.data import cifar10
from published.record import NOT, Chart, Check, File, Finding, How, Line, Results, Step, those
from published.trials import FEEDBACK, HYBRID, PIECES, SHARES, TASKS, Way, compared, priced, rounded_otherwise

FAR = 5  # times the goal
SEEDS, DEPTH = tuple(range(10, 20)), 8
GOAL = {"accuracy": 0.3, "loss": 0.01}  # points, nats
ALL = "hybrid+gap_aware+msnag"
FIRST: list[tuple[str, int, int, str]] = [  # schedule, stages, microbatches of an update, correction
    ("synchronous", 1, 1, "none"),
    *(("pipedream_2bw", 8, 1, name) for name in ("hybrid+spectrain", "hybrid", "spectrain", "none")),
    ("pipedream", 8, 1, "none"),
]
FEW = [*FIRST[:3], FIRST[5], ("pipedream_2bw", 8, 1, ALL)]
MORE = [
    *(("pipedream_2bw", 8, 1, name) for name in (ALL, "msnag", "gap_aware+msnag", FEEDBACK)),
    *(("pipedream", 8, 1, name) for name in (ALL, "hybrid+spectrain", "gap_aware+msnag", "spectrain")),
    ("pipedream", 8, 8, "none"),
    *(("pipedream", n, 1, "none") for n in (4, 2)),
]
STUDIED = {
    "digits, GroupNorm": (("sgd", "muon"), [*FIRST, *MORE]),
    "GPT": (("muon", "adamw"), FIRST),
    "CIFAR-10, GroupNorm": (("muon", "sgd"), [*FIRST, MORE[0]]),
    "CIFAR-10, 4 times as long": (("muon",), FIRST[:2]),
    "digits, residual": (("muon", "sgd"), FEW),
    "digits, BatchNorm": (("sgd", "muon"), FEW),
}
AGAIN = "again, rounded otherwise: "  # the steps that train the same seeds with other kernels
AGAIN_AT = {"rate": 0.005, "share": 0.4}
DRAWN = "digits, GroupNorm", "GPT"
CIFAR10 = Path("data", cifar10.FOLDER)  # left out where it is not there


def steps(quick: bool) -> dict[str, Step]:
    """Train each setting, the most telling ones first."""
    chosen = {}
    for task, (optimizers, settings) in [*STUDIED.items()][: 1 if quick else None]:
        for setting in settings[:2] if quick else settings:
            for optimizer in optimizers[:1] if quick else optimizers:
                way = Way(*setting)
                own: dict[str, Any] = {"task": task, "optimizer": optimizer, "setting": way._asdict()}
                rates, shares = TASKS[task].rates[optimizer], SHARES if HYBRID in setting[-1] else (0.0,)
                own |= {"rates": rates[:1] if quick else rates, "shares": shares[:1] if quick else shares}
                own |= {"seeds": SEEDS[:2], "batches": 2} if quick else {"seeds": SEEDS}
                chosen["; ".join(map(str, (task, optimizer, *way)))] = Step(compared, own, timed=False)
    if not CIFAR10.exists():
        print(f"CIFAR-10 is left out: put it into {CIFAR10}")
        chosen = {name: step for name, step in chosen.items() if not name.startswith("CIFAR-10")}
    for setting in [] if quick else FIRST[:2]:
        way = Way(*setting)
        own = {"task": "digits, GroupNorm", "optimizer": "muon", "setting": way._asdict(), "seeds": SEEDS}
        chosen[f"{AGAIN}{way}"] = Step(rounded_otherwise, own | AGAIN_AT, timed=False)
    return chosen


SYNCHRONOUS, PLAIN = Way("synchronous", 1, 1, "none"), Way("pipedream", DEPTH, 1, "none")
LATE_BY_ONE = Way("pipedream_2bw", DEPTH, 1, "none")


@dataclass(frozen=True)
class Row:
    """The runs of one way on a task, beside the synchronous ones with the same seeds."""

    task: str
    optimizer: str
    way: Way
    result: Mapping[str, Any]
    synchronous: Mapping[str, Any]

    @property
    def metric(self) -> str:
        return TASKS[self.task].metric

    @property
    def gaps(self) -> list[float]:
        """By seed, how much worse it ends than synchronous: points of accuracy, or nats."""
        both = zip(self.synchronous["scores"], self.result["scores"], strict=True)
        sign = 1 if self.metric == "accuracy" else -1
        return [sign * (best - own) for best, own in both]

    @property
    def gap(self) -> float:
        return fmean(self.gaps)

    @property
    def share(self) -> float:
        """The end of the gap's interval in what is allowed: up to 1 the goal is reached, for sure.

        What diverged has infinity.
        """
        return (self.gap + half(self.gaps)) / GOAL[self.metric] if isfinite(self.gap) else inf

    @property
    def curve(self) -> dict[float, float]:
        """The mean training loss of the seeds, by updates."""
        means = [fmean(at) for at in zip(*self.result["losses"], strict=True)]
        return {n * self.result["every"]: mean for n, mean in enumerate(means, 1)}

    @property
    def reached(self) -> float | None:
        """The updates until the training loss is what synchronous ends at; None: never."""
        last = fmean(of[-1] for of in self.synchronous["losses"])
        return next((updates for updates, loss in self.curve.items() if loss <= last), None)

    @property
    def on_the_edge(self) -> bool:
        """Whether the least or the greatest of the rates that were tried was the best."""
        rates = [rate for rate, _, _ in self.result["trials"]]
        return bool(rates) and self.result["rate"] in (min(rates), max(rates))

    @property
    def cells(self) -> list[str]:
        digits, costs, scores = 1 if self.metric == "accuracy" else 3, self.costs, self.result["scores"]
        reached = f"{self.reached:.0f}" if self.reached else "-"
        return [
            str(self.way),
            str(self.way.ranks) if self.way != SYNCHRONOUS else "any",
            f"{self.result['rate']:g}" + " (an end of the grid)" * self.on_the_edge,
            f"{self.result['share']:.0%}" if self.result["share"] else "-",
            f"{fmean(scores):.{digits}f} ± {half(scores):.{digits}f}",
            "-" if self.way == SYNCHRONOUS else f"{self.gap:+.{digits}f} ± {half(self.gaps):.{digits}f}",
            reached,
            f"{costs['versions']:.0f} + {costs['activations']:.2g}",
            f"{1 / costs['time']:.2f}",
        ]

    @property
    def costs(self) -> dict[str, float]:
        """What it costs on paper, on as many devices as there are stages; a synchronous run on 8."""
        way, ranks = self.way, DEPTH if self.way == SYNCHRONOUS else self.way.ranks
        costs = priced(way.schedule, ranks, way.microbatches)
        share = self.result["share"]
        if not share:
            return costs
        drained = 1 if way.schedule not in PIECES else priced("synchronous", ranks, 1)["time"]
        return costs | {"time": share * drained + (1 - share) * costs["time"]}


HEAD = [
    "pipeline",
    "stages",
    "rate",
    "share",
    "last",
    "gap",
    "updates to its loss",
    "weights + activations",
    "speed",
]


def half(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean."""
    from scipy.special import stdtrit  # takes a while to import

    return float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / sqrt(len(values))


def rows_of(results: Results) -> list[Row]:
    """Return the rows of what was made."""
    read = {}
    for key, result in results.items():
        if key.startswith(AGAIN):
            continue
        task, optimizer, schedule, stages, microbatches, correction = key.split("; ")
        read[task, optimizer, Way(schedule, int(stages), int(microbatches), correction)] = result
    return [Row(*key, result, read[*key[:2], SYNCHRONOUS]) for key, result in read.items()]


def show(results: Results) -> Iterator[Finding]:
    """Say which pipeline ends where synchronous training does."""
    rows = rows_of(results)
    parts = dict.fromkeys((row.task, row.optimizer) for row in rows)
    best = {optimizer: recommended(rows, optimizer) for _, optimizer in parts}
    yield from said(rows, best)
    exact = {name: 1 / priced(name, DEPTH, 1)["time"] for name in ("synchronous", "zb_h1")}
    yield (
        f"Exact, on {DEPTH} devices with {DEPTH} microbatches: 1f1b is simulated {exact['synchronous']:.1f} "
        f"times as fast as one device, zb_h1 {exact['zb_h1']:.1f} times."
    )
    yield from said_of_rounding(those(results, AGAIN))
    for optimizer, way in best.items():
        yield from checked(rows, optimizer, way)
    for part in parts:
        lines = sorted((r for r in rows if (r.task, r.optimizer) == part), key=lambda r: r.share)
        yield Table(", ".join(part), HEAD, [row.cells for row in lines], (), HEAD[:1])
    yield from charts(rows, best)
    yield File("runs.csv", runs_csv(rows))
    yield File("staleness.csv", advice_csv(rows))


def said_of_rounding(again: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[str]:
    """Say how far the rounding of another processor moves single runs, and their mean."""
    for way, of in again.items():
        moved = [abs(one - other) for one, other in zip(of["scores"], of["others"], strict=True)]
        mean = abs(fmean(of["scores"]) - fmean(of["others"]))
        yield (
            f"The same {len(moved)} seeds of {way} on digits with GroupNorm by Muon, trained again with "
            f"convolutions that round otherwise, as another processor would: single runs end up to "
            f"{max(moved):.2f} points away, their mean {mean:.2f}. Runs of one seed share weights and the "
            "order of samples, not their rounding."
        )


def recommended(rows: Sequence[Row], optimizer: str) -> Way:
    """Return the way at the greatest depth whose worst gap, of all tasks of the optimizer, is least."""
    shares: dict[Way, list[float]] = {}
    for row in rows:
        if row.optimizer == optimizer and row.way.ranks == DEPTH:
            shares.setdefault(row.way, []).append(row.share)
    tasks = max(map(len, shares.values()), default=0)
    whole = {way: max(of) for way, of in shares.items() if len(of) == tasks}
    return min(whole, key=whole.__getitem__, default=SYNCHRONOUS)


def said(rows: Sequence[Row], best: Mapping[str, Way]) -> Iterator[str]:
    """Yield what came out: of each optimizer the best way, what is near, and what failed."""
    for optimizer, way in best.items():
        of = [row for row in rows if row.optimizer == optimizer and row.way.ranks == DEPTH]
        lines = [
            f"{r.task} {r.gap:+.2g} ± {half(r.gaps):.2g} ({1 / r.costs['time']:.1f} times one device)"
            for r in of
            if r.way == way
        ]
        worst: dict[Way, float] = {}
        for row in of:
            worst[row.way] = max(row.share, worst.get(row.way, -inf))
        near = [str(w) for w, share in worst.items() if share <= 1 and w != way]
        far = [str(w) for w, share in worst.items() if share > FAR]
        yield (
            f"{optimizer}: {way} loses least at {DEPTH} stages: {'; '.join(lines)}. "
            f"Within the goal to the intervals' ends wherever tried too: {', '.join(near) or 'nothing'}. "
            f"Failed, by more than {FAR} times the goal somewhere: {', '.join(far) or 'nothing'}."
        )


def checked(rows: Sequence[Row], optimizer: str, way: Way) -> Iterator[Check]:
    """Hold the recommended way, and plain pipedream, against the goal on each task."""
    own = {(row.task, row.way): row for row in rows if row.optimizer == optimizer}
    for row in (row for row in own.values() if row.way == way):
        unit = "points" if row.metric == "accuracy" else "nats"
        plain = own.get((row.task, PLAIN))
        beside = f" (plain pipedream {plain.gap:+.3g})" if plain else ""
        what = f"{row.task}, {optimizer}, {DEPTH} stages: {way}, worse than synchronous{beside}"
        yield Check.of_interval(what, NOT, (-inf, GOAL[row.metric]), row.gap, half(row.gaps), unit)


def charts(rows: Sequence[Row], best: Mapping[str, Way]) -> Iterator[Chart]:
    """Draw accuracy against depth, and the loss against updates and against predicted time."""
    for task, optimizer in dict.fromkeys((row.task, row.optimizer) for row in rows if row.task in DRAWN):
        of = {row.way: row for row in rows if (row.task, row.optimizer) == (task, optimizer)}
        ways = [way for way in dict.fromkeys((SYNCHRONOUS, PLAIN, LATE_BY_ONE, best[optimizer])) if way in of]
        title, own = f"{task}, {optimizer}", TASKS[task]
        depths = sorted({way.ranks for way in of if way.schedule == "pipedream"})
        if len(depths) > 1:
            yield Chart(title, "stages", "last accuracy, %", [*across(of, depths)])
        log = "y" if own.metric == "accuracy" else ""
        time = f"predicted time, in updates of one device (batches of {own.batch_size})"
        for axis, scales in (
            ("updates", dict.fromkeys(ways, 1.0)),
            (time, {w: of[w].costs["time"] for w in ways}),
        ):
            lines = [Line(str(w), kind(w), {x * scales[w]: y for x, y in of[w].curve.items()}) for w in ways]
            if axis == time:
                shorter = priced("zb_h1", DEPTH, 1)["time"]
                curve = {x * shorter: y for x, y in of[SYNCHRONOUS].curve.items()}
                lines.append(Line("synchronous, zb_h1", How.RUN, curve))
            yield Chart(f"{title}, {DEPTH} stages", axis, "training loss", lines, log)


def across(of: Mapping[Way, Row], depths: Sequence[int]) -> Iterator[Line]:
    """Yield lines of scores against depth; of 2BW and synchronous runs one stands for all."""
    for schedule, correction in dict.fromkeys((way.schedule, way.correction) for way in of):
        points = {
            w.ranks: fmean(r.result["scores"])
            for w, r in of.items()
            if w[::3] == (schedule, correction) and w.microbatches == 1
        }
        if schedule in ("synchronous", "pipedream_2bw") and points:
            points = dict.fromkeys(depths, next(iter(points.values())))
        if len(points) == len(depths):
            way = Way(schedule, DEPTH, 1, correction)
            yield Line(str(way), kind(way), dict(sorted(points.items())))


def kind(way: Way) -> How:
    return How.BOUND if way.schedule == "synchronous" else How.RUN


def runs_csv(rows: Sequence[Row]) -> str:
    """Return a line for each run."""
    lines = [
        [row.task, row.optimizer, *row.way, row.result["rate"], seed, row.metric, score, losses[-1]]
        for row in rows
        for seed, score, losses in zip(SEEDS, row.result["scores"], row.result["losses"], strict=False)
    ]
    head = "task optimizer schedule stages microbatches correction rate seed metric last training_loss"
    return written(head.split(), lines)


def advice_csv(rows: Sequence[Row]) -> str:
    """Return pipetrain/plan/staleness.csv: gaps of what a user can choose; 2BW at each depth."""
    lines = [
        (
            row.optimizer,
            way.schedule,
            stages,
            way.correction,
            row.task,
            row.metric,
            f"{row.gap:.4f}",
            f"{half(row.gaps):.4f}",
        )
        for row in rows
        if (way := row.way) != SYNCHRONOUS and way.microbatches == 1 and isfinite(row.gap)
        if way.correction != FEEDBACK
        for stages in ((2, 4, 8) if way.schedule == "pipedream_2bw" else (way.ranks,))
    ]
    head = "optimizer schedule stages correction task metric gap half"
    return written(head.split(), lines)


def written(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return a table as CSV."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *lines])
    return out.getvalue()
