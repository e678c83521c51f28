"""Each stage's times, measured against predicted: for the summary, for TensorBoard, and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipetrain.prediction import StageTimes


def measured(
    placement: Sequence[int],
    busy_s: Mapping[int, float],
    wait_s: Mapping[int, float],
    train_s: float,
    updates: int,
) -> list[StageTimes]:
    """Turn what the stages counted in `train_s` seconds of training into shares of it.

    Bubble and wait are of a stage's rank, which may hold other stages too.
    """
    busy, wait = ([0.0] * len(placement) for _ in range(2))
    for stage, rank in enumerate(placement):
        busy[rank] += busy_s[stage]
        wait[rank] += wait_s[stage]
    return [
        StageTimes(1 - busy[rank] / train_s, busy_s[stage] / updates, wait[rank] / train_s)
        for stage, rank in enumerate(placement)
    ]


def table(run: Sequence[StageTimes], plan: Sequence[StageTimes]) -> str:
    """Return a row a stage: measured, and what the plan said."""
    lines = ["stage  bubble  (plan)  seconds a batch  (plan)    wait  (plan)"]
    for stage, (seen, said) in enumerate(zip(run, plan, strict=True)):
        lines.append(
            f"{stage:5d}  {seen.bubble:6.1%}  {said.bubble:6.1%}  {_seconds(seen.stage_time_s):>15}  "
            f"{_seconds(said.stage_time_s):>6}  {seen.wait:6.1%}  {said.wait:6.1%}"
        )
    return "\n".join(lines)


def _seconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.4f}"
