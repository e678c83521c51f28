"""The schedules: pure functions (ranks, batches, microbatches a batch) -> compute-only Program.

A schedule decides two things: the order of a rank's forwards and backwards, and the weights that a forward
reads. `lower` adds the communication. One file per family:

- `flush`: a batch ends before the next begins, so every forward reads the newest weights;
- `zero_bubble`: the same, with backwards split into I and W;
- `stashing`: no flush; a forward reads older weights, which are stashed for its backward.

In all of them the forwards and backwards of a stage ascend, each backward reads its own forward's version,
and a stage steps directly after the last backward of a batch.
"""

from __future__ import annotations

from pipetrain.schedule.programs.flush import forward_only, gpipe, interleaved_1f1b, layer_dist, one_f_one_b
from pipetrain.schedule.programs.stashing import pipedream, pipedream_2bw, ssp
from pipetrain.schedule.programs.zero_bubble import v_half, v_min, zb_h1, zb_h2, zbv

__all__ = [
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "layer_dist",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "ssp",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
]
