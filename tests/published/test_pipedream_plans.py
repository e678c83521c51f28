"""The published plans of PipeDream beside those chosen here, by the profiles of its authors."""

from __future__ import annotations

from pathlib import Path

import pytest

from published.experiments.pipedream_plans import plans
from published.measures import profile_of

PAGE = Path(__file__).parents[2] / "docs" / "results" / "replicas.md"


def test_the_page_has_all_published_plans_and_those_that_are_chosen_here():
    rows = []
    for of in (chosen := plans()):
        predicted = (
            f"{of['predicted']:.2f}, {of['bound']}",
            of["chosen"],
            f"{of['best']:.2f}, {of['best_bound']}",
        )
        rows.append([of["model"], of["machines"], of["published"], f"{of['speedup']:.2f}", *predicted])
    assert "".join(f"| {' | '.join(cells)} |\n" for cells in rows) in PAGE.read_text()
    assert [of["chosen"] for of in chosen[:5]] == ["15-1", "15-1", "15-1", "14-2", "16"]


def test_a_profile_is_read_at_other_samples():
    whole, half = (profile_of("vgg16", scale) for scale in (1, 0.5))
    first = [rows.profile.layers[0] for rows in (whole, half)]
    assert [one.forward_s for one in first] == pytest.approx([0.022307, 0.0111535])
    assert [one.output_bytes for one in first] == [1644167168, 822083584]
    assert [rows.layers[0].params for rows in (whole, half)] == [1792, 1792]
