"""Training where the GPU forgives nothing, against the reference on the CPU.

A wait of the host in a window is an error; nothing is cached, so that each tensor that goes waits for all
that was posted; messages are larger than NCCL's buffers. And what a model may lack, or a program have set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.rehearsal import LoopbackChannel
from tests.gpu.rows import Row, Setting
from tests.gpu.training import (
    CLIPPED,
    COMMON,
    TIED,
    Trained,
    against_reference,
    of_schedules,
    train,
)
from tests.support.cases import Case

ROW_S = 20.0  # that a row may take
FOUR = "microbatches=4"
# fbp looks at what has arrived, so its host waits.
UNWAITED = (
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "zb_h1",
    "zbv",
    "v_async",
    "pipedream",
    "pipedream_2bw",
)
TIGHT = ("1f1b", "interleaved_1f1b", "zbv", "zb_h2", "v_async", "fbp")
WITHOUT_ROOM = {"NCCL_BUFFSIZE": "65536", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
EAGER = "cuda_graphs=false"  # no memory can be had while a graph is captured
LARGE = ("+model.width=64", "batch_size=128", EAGER)  # 256 KiB a message
V_OF_TIES = Case("zbv", 2, (TIED, "partition=[2,3,4]", FOUR, *CLIPPED))


def no_waits(setting: Setting) -> Iterator[Row]:
    """In a window nothing lets the host wait for the device. Some stages have no weights, nor a norm."""
    plain = (*COMMON, FOUR)
    cases = {
        "ties of a V, clipped over the model": V_OF_TIES,
        "stages without weights, clipped": Case("zbv", 2, ("partition=[1,5,7]", FOUR, *CLIPPED)),
        "a stage without weights": Case("pipedream", 2, ("partition=[1]", "window=3", FOUR)),
        **of_schedules(2, UNWAITED),
        "zbv, cuda_graphs=false": Case("zbv", 2, (*plain, EAGER)),
        "recompute=always": Case("zbv", 2, (*plain, "recompute=always")),
        "EMA, AdamW": Case("1f1b", 2, (*plain, "ema=0.6", "optim=adamw", "optim.lr=0.003")),
        "ragged batches": Case("1f1b", 2, (*COMMON, "microbatches=3"), 43),
    }
    chosen = dict([*cases.items()][: 1 if setting.quick else None])
    named = {f"no wait in a window, {name}": case for name, case in chosen.items()}
    yield from against_reference(setting, named, 2, work=without_waits, within=ROW_S)


def without_waits(groups: ProcessGroups, case: Case) -> Trained:
    """Train a case; where a window's host waits for the GPU that is an error of the action."""
    run, windows = Engine._run, 0

    def strictly(engine: Engine, window: Any, *rest: Any) -> Any:
        nonlocal windows
        if not window.trains or isinstance(window.mail.channel, LoopbackChannel):
            return run(engine, window, *rest)
        windows += 1
        with raising_waits(groups.device):
            return run(engine, window, *rest)

    with patch.object(Engine, "_run", strictly):
        trained = train(groups, case)
    assert windows, "no window was seen"
    return trained


@contextmanager
def raising_waits(device: torch.device) -> Iterator[None]:
    """Raise where the host waits for a GPU: numbers that are read, copies that are not pinned."""
    set_mode: Callable[[str], object] = lambda mode: None  # noqa: E731 - a CPU has none
    if device.type == "cuda":
        set_mode = torch.cuda.set_sync_debug_mode
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


def tight(setting: Setting) -> Iterator[Row]:
    """Messages that no buffer of NCCL's holds, and memory of which none is cached."""
    schedules = TIGHT[:1] if setting.quick else TIGHT
    large = {name: Case(name, 2, (*COMMON, FOUR, *LARGE), 256) for name in schedules}
    ties = (
        {}
        if setting.quick
        else {"ties of a V, clipped": replace(V_OF_TIES, overrides=(*V_OF_TIES.overrides, EAGER))}
    )
    for name, value in [*WITHOUT_ROOM.items()][: 1 if setting.quick else None]:
        cases = {f"{name}={value}, {what}": case for what, case in (large | ties).items()}
        with patch.dict(os.environ, {name: value}):
            yield from against_reference(setting, cases, 2, within=ROW_S)


def float64(setting: Setting) -> Iterator[Row]:
    """A program that has set torch's default dtype."""
    named = {
        "default dtype float64, clipped over the model": Case("zbv", 2, (*COMMON, FOUR, "ema=0.5", *CLIPPED)),
        "default dtype float64, on_nan=skip": Case("1f1b", 2, (*COMMON, FOUR, "on_nan=skip", "ema=0.5")),
    }
    named = dict([*named.items()][: 1 if setting.quick else None])
    with by_default(torch.float64):  # the reference draws its weights so too
        yield from against_reference(setting, named, 2, work=in_float64, within=ROW_S)


def in_float64(groups: ProcessGroups, case: Case) -> Trained:
    """Train a case where the default dtype is float64."""
    with by_default(torch.float64):
        return train(groups, case)


@contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
