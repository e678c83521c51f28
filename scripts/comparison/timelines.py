"""The timeline of each method, as an SVG that takes its colours from the page that it stands in.

A method's own configuration says its schedule, microbatches and ranks, so this needs no run: it shows what
was meant also where nothing finished. Where the schedule decides while it runs, it is played at the same
unit costs, as an example. What cannot be drawn is left out here, and named in the report, which has to come
out all the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from comparison.request import conf_dir
from comparison.runs import Spec
from pipetrain.cli import as_hydra
from pipetrain.schedule.draw import as_figure
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import compute_program
from pipetrain.schedule.simulate import simulate

MICROBATCHES = 8  # about so many are drawn, at least a batch
COLOURS = {"#333333": "var(--ink)", "#222222": "var(--ink)", "#ececec": "var(--idle)"}
COLOURS |= {"#999999": "var(--faint)", "#ffffff": "var(--paper)"}


@dataclass(frozen=True, slots=True)
class Timeline:
    """A drawing, the methods that it is of, and what it says in words."""

    methods: tuple[str, ...]
    svg: str
    words: str


def timelines(specs: Sequence[Spec]) -> list[Timeline]:
    """Draw a short window of each schedule; methods that differ in something else share a drawing."""
    drawn: dict[tuple[Any, ...], tuple[list[str], Any]] = {}
    seen: set[str] = set()
    for spec in specs:
        if spec.method.name in seen:
            continue
        seen.add(spec.method.name)
        try:
            key, simulation = _played(spec)
        except Exception:  # whatever overrides that nobody has checked can do to a schedule
            continue
        drawn.setdefault(key, ([], simulation))[0].append(spec.method.name)
    found = []
    for number, ((_, ranks, batches, m, _), (methods, simulation)) in enumerate(drawn.items()):
        words = f"{batches} batches of {m} microbatch{'es' * (m > 1)}"
        title = f"{', '.join(methods)}: {words} on {ranks} ranks, bubble {simulation.bubble:.1%}"
        found.append(Timeline(tuple(methods), _svg(simulation, f"t{number}", title), words))
    return found


def _played(spec: Spec) -> tuple[tuple[Any, ...], Any]:
    """Return what makes the drawing what it is, and the simulation to draw."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", overrides=as_hydra(spec.arguments))
    m, bound = int(cfg.microbatches), int(cfg.buffer_size)
    batches = max(2, -(-MICROBATCHES // m))
    program = lower(compute_program(instantiate(cfg.schedule), spec.nproc, batches, m, bound))
    return (str(cfg.schedule), spec.nproc, batches, m, bound), simulate(program, m, buffer_size=bound)


def _svg(simulation: Any, prefix: str, title: str) -> str:
    with TemporaryDirectory() as folder, matplotlib.rc_context({"svg.fonttype": "none"}):
        path = Path(folder) / "timeline.svg"
        as_figure(simulation, path)
        return inline(path.read_text(), prefix, title)


def inline(svg: str, prefix: str, title: str) -> str:
    """Make matplotlib's SVG a part of a page: no addresses, ids of its own, the page's colours and type."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, body = re.match(r"<svg[^>]*>", svg).group(), svg[svg.index(">") + 1 :]  # type: ignore[union-attr]
    box = re.search(r'viewBox="[^"]*"', head).group()  # type: ignore[union-attr]
    width = float(box.split()[2])
    body = re.sub(r'\bid="', f'id="{prefix}-', body).replace("url(#", f"url(#{prefix}-")
    body = re.sub(r'\bxlink:href="#', f'href="#{prefix}-', body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 var(--sans)", body)
    for colour, variable in COLOURS.items():
        body = body.replace(colour, variable)
    start = f'<svg class="timeline" role="img" {box} style="width:{width * 1.15:.0f}px">'
    return f"{start}<title>{escape(title)}</title>{body}"
