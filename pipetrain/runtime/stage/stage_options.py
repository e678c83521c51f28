"""The options of a stage."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipetrain.correction import Correction
from pipetrain.model.numerics import Numerics


@dataclass(frozen=True, slots=True)
class StageOptions:
    """What the settings of a run say of a stage.

    `selective`: a forward to be recomputed keeps expensive results, see recompute.py. `ema`: the decay of a
    moving average of the weights. `lengths`: batches have several. `clip_grad_norm`: the largest norm of a
    batch's gradient.
    """

    device: str = "cpu"
    numerics: Numerics = field(default_factory=Numerics)
    compile: bool = False
    lengths: bool = False
    selective: bool = False
    ema: float | None = None
    correction: Correction | None = None
    clip_grad_norm: float | None = None
