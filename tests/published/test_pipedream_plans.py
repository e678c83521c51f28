"""The published plans of PipeDream beside those chosen here, by the profiles of its authors."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from published.experiments.pipedream_plans import AS_IT_IS, MARK, authors, plans, show
from published.measures import profile_of
from published.pipedream_optimizer import Level, Optimizer, States
from published.record import Findings

PAGE = Path(__file__).parents[2] / "docs" / "results" / "replicas.md"
A, B = ([Level(4, 16e9), Level(4, 1.25e9)], [Level(8, 150e9), Level(2, 3.125e9)])


@pytest.fixture(name="chosen", scope="module")
def fixture_chosen():
    return plans()


def test_the_page_has_all_published_plans_and_those_that_are_chosen_here(chosen):
    rows = []
    for what, of in chosen.items():
        predicted = (
            f"{of['predicted']:.2f}, {of['bound']}",
            of["chosen"],
            f"{of['best']:.2f}, {of['best_bound']}",
        )
        rows.append([*what.split(" on "), of["published"], f"{of['speedup']:.2f}", *predicted])
    assert "".join(f"| {' | '.join(cells)} |\n" for cells in rows) in PAGE.read_text()
    assert [of["chosen"] for of in chosen.values()][:5] == ["15-1", "15-1", "15-1", "14-2", "16"]
    # What adds to the work is what data parallelism has most of.
    assert chosen["vgg16 on 2 x 8"]["added"]["predicted"] > chosen["vgg16 on 2 x 8"]["predicted"]


def test_a_profile_is_read_at_other_samples():
    whole, half = (profile_of("vgg16", scale) for scale in (1, 0.5))
    first = [rows.profile.layers[0] for rows in (whole, half)]
    assert [one.forward_s for one in first] == pytest.approx([0.022307, 0.0111535])
    assert [one.output_bytes for one in first] == [1644167168, 822083584]
    assert [rows.layers[0].params for rows in (whole, half)] == [1792, 1792]


# The authors' optimizer


@pytest.mark.parametrize(
    ("model", "scale", "levels", "messages", "gain"),
    [
        ("alexnet", 1, [Level(16, 1.25e9)], True, 3.3880732),
        ("alexnet", 1, [Level(16, 1.25e9)], False, 7.2466184),
        ("alexnet", 1, A, True, 2.9707729),
        ("alexnet", 1, A, False, 7.6850698),
        ("alexnet", 1, B, True, 1.6164537),
        ("vgg16", 0.5, [Level(16, 3.125e9)], True, 2.6114249),
        ("vgg16", 0.5, B, False, 1.8959971),
        ("resnet50", 1, [Level(16, 1.25e9)], True, 1.0691864),
        ("resnet50", 1, A, True, 1.0240098),
        ("gnmt8", 1, [Level(12, 1.25e9)], True, 10.2105976),
        ("gnmt8", 1, B, True, 5.5131757),
    ],
)
def test_it_gains_what_the_authors_program_prints(model, scale, levels, messages, gain):
    """Of optimizer_graph_hierarchical.py at commit 7db6a1c, on the graphs of its repository."""
    optimizer = Optimizer(States.read(model, scale), levels, messages)
    assert optimizer.parallel_s / optimizer.seconds == pytest.approx(gain, rel=1e-7)
    assert optimizer.gives(optimizer.plan())


def test_it_knows_all_plans_that_are_equally_fast():
    optimizer = Optimizer(States.read("alexnet"), [Level(16, 1.25e9)], True)
    assert [optimizer.gives(of) for of in ((15, 1), (14, 1, 1), (6, 7, 1, 1, 1), (16,), (13, 3))] == [
        *[True] * 3,
        *[False] * 2,
    ]


def chain(work: list[int], weights: list[int], leaves: list[int]) -> States:
    before = np.triu(np.ones((len(work), len(work)), dtype=bool), 1)
    sums = [np.cumsum(values).astype(float) for values in (work, weights)]
    return States(*sums, np.array(leaves, dtype=float), before, float(max(work)))


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=5), st.booleans())
def test_no_plan_of_a_chain_is_faster(layers, messages):
    work, weights, leaves = map(list, zip(*layers, strict=True))
    machines = 3

    def seconds(cuts: list[int], replicas: tuple[int, ...]) -> float:
        times = []
        for (start, end), count in zip(pairwise([0, *cuts, len(work)]), replicas, strict=True):
            times.append((sum(work[start:end]) + 4 * (count - 1) / count * sum(weights[start:end])) / count)
            if messages and start:
                times.append(2 * leaves[start - 1] / count)
            if messages and start and end < len(work):
                times.append(2 * leaves[end - 1] / count)
        return max(times)

    every = [((3,), [])]
    every += [(of, [cut]) for of in ((1, 2), (2, 1)) for cut in range(1, len(work))]
    every += [((1, 1, 1), [a, b]) for b in range(2, len(work)) for a in range(1, b)]
    optimizer = Optimizer(chain(work, weights, leaves), [Level(machines, 1.0)], messages)
    assert optimizer.seconds == pytest.approx(min(seconds(cuts, of) for of, cuts in every))
    assert optimizer.parallel_s == pytest.approx(seconds([], (3,)))


def test_rows_that_it_does_not_give_are_marked(chosen):
    theirs = authors(["alexnet", "vgg16"])
    given_by = {row: [key for key, of in every.items() if of["gives"]] for row, every in theirs.items()}
    assert {row: keys for row, keys in given_by.items() if keys} == {
        "alexnet on 4 x 4": ["flat"],
        "vgg16 on 2 x 8" + AS_IT_IS: ["flat"],
    }
    results: dict[str, Any] = {"plans": chosen, "authors": theirs}
    what = {check.what.rpartition(":")[0] for check in Findings.of(show(results)).checks}
    assert {row for row in what if row.endswith(MARK)} == {"vgg16 on 4 x 4" + MARK, "alexnet on 2 x 8" + MARK}
