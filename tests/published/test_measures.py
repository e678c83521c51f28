"""What the plan says of a model that is made nowhere: times by work and by a profile, bytes by hand."""

from __future__ import annotations

import json

import pytest
from torch import nn

from published.measures import predicted, profiled

WIDTH, SAMPLES, M = 16, 2, 4
WORDS = (f"model._target_={__name__}.even",)


def even() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def test_by_work_a_plan_counts_forwards_of_the_whole_model_and_bytes_of_routes() -> None:
    whole = predicted(WORDS, [4], M, SAMPLES, [WIDTH])
    halves = predicted([*WORDS, "recompute=always"], [2, 2], M, SAMPLES, [WIDTH])
    assert whole["seconds"] == pytest.approx(3 * M)
    filled, emptied = 1 / 2, 2 / 2  # while it empties, forwards are run again before their gradient comes
    assert halves["seconds"] == pytest.approx(filled + M * 4 / 2 + emptied)
    assert halves["routes"] == [(0, 1, 4 * SAMPLES * WIDTH)]
    assert (whole["layers"], whole["parameters"]) == (4, 4 * WIDTH**2)
    assert len(halves["peaks"]) == 2


@pytest.mark.processes
def test_a_profile_is_json_by_which_times_are_predicted() -> None:
    profile = json.loads(json.dumps(profiled(WORDS, SAMPLES, [WIDTH], WIDTH)))
    assert len(profile["layers"]) == 4
    assert profile["latency_s"] > 0
    for layer in profile["layers"]:
        layer |= {"forward_s": 1.0, "backward_s": 2.0, "step_s": 0.0}
    profile |= {"latency_s": 0.0, "s_per_byte": 0.0}
    profile["stage"] |= {"forward_s": 0.0, "backward_s": 0.0, "step_s": 0.0}
    assert predicted(WORDS, [1, 3], M, SAMPLES, [WIDTH], profile)["seconds"] == pytest.approx(9 * M + 3)
