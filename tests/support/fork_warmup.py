"""What each forked program would do for the first time is done before: to compose, and to draw its plan.

What is imported by then is not looked through for garbage, nor copied for that where it is forked. All draw
one picture; a `cold` program draws its own.
"""

import gc

from pipetrain.commands.cli import composed
from pipetrain.records import recorder
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import one_f_one_b
from pipetrain.schedule.simulate import simulate
from tests.support.cases import config

composed("config", ["data=digits", "model=mlp"])
config(["data=digits"])  # of most cases
config(["data=digits", "optim=adamw"])
PICTURE = recorder.as_png(simulate(lower(one_f_one_b(2, 1, 2)), 2))
recorder.as_png = lambda *drawn: PICTURE  # type: ignore[assignment]
gc.freeze()
