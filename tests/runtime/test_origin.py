"""A number that is not finite is named where it began: stage, microbatch and layer, over a whole pipeline."""

from __future__ import annotations

import pytest

from pipetrain.errors import TrainingStopped
from tests.support.cases import Case, run_in_threads

MODEL = ("model._target_=tests.support.models.spoilt", "partition=[2,4]", "microbatches=4", "epochs=2")


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("layer", "stage"), [(1, 0), (3, 1), (4, 2)])
def test_the_origin_is_named_wherever_it_is(layer, stage, gradient, schedule):
    words = (*MODEL, f"+model.layer={layer}", "+model.at=7", f"+model.gradient={gradient}", "window=2")
    with pytest.raises(TrainingStopped) as stop:
        run_in_threads(Case(schedule, 3, words))
    what = "gradient" if gradient else "loss" if stage == 2 else "activation"
    is_what = "nan" if what == "loss" else "not finite"
    assert str(stop.value).startswith(
        f"the {what} of microbatch 6 is {is_what} (first in layer layer{layer}) at stage {stage}, update "
    )
