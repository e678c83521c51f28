"""The command `python -m pipetrain`: trains as configured.

Rank 0 reads the command line and sends the others the options of each job (rank0.py); all run it (job.py).
"""

from __future__ import annotations

import importlib
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from pipetrain.checkpoint.resume import read_source
from pipetrain.commands.job import Job, Parts, train_job
from pipetrain.commands.start import Start, from_json, refuse_unnamed
from pipetrain.errors import ChannelError, ConfigError, Refused
from pipetrain.exit import FAILED, REFUSED, guarded, leave
from pipetrain.records import run_folder as folder
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.rendezvous import START_S
from pipetrain.runtime.device import keep_freed_memory
from pipetrain.schedule.actions import ScheduleError
from pipetrain.signals import Signals
from pipetrain.typed_json import read_as


def main() -> None:
    """Run the command line as one of the ranks; exit with the run's status."""
    keep_freed_memory()
    world = World.current()
    signals = Signals(world.rank)
    with signals.handled():
        try:
            status = guarded(lambda: run_command(world, signals))
        except Exception:
            traceback.print_exc()
            status = FAILED
        leave(status)


def run_command(world: World, signals: Signals) -> int:
    """Run each job of the command line; return the exit status."""
    start = Start(world, sys.argv[1:], signals)
    with signals.losing():
        if world.rank:
            return 0 if start.prints else follow(start)
        from pipetrain.commands.rank0_jobs import run_jobs  # imports Hydra

        return run_jobs(start)


def follow(start: Start) -> int:
    """Run the jobs that rank 0 sends; return the exit status."""
    if start.attempt.receive_delay(START_S) is not None:
        importlib.import_module("torch._dynamo")  # needed for planning; takes a second while rank 0 works
    refused = swept = False
    while True:
        try:
            limit_s = START_S + (start.attempt.receive_delay(START_S) or 0.0)
            if (received := start.exchange(None, limit_s)) is None:
                return REFUSED * refused
            job = read_as(Job, received, "what rank 0 sends")
            job, swept = replace(job, options=from_json(job.options)), job.swept
            refuse_unnamed(job.options, start.words)
            start.signals.drained.clear()
            parts = Parts.of(job.options, job.schedule, start.world)
            source = None if job.resume is None else read_source(Path(job.resume))
            if job.saves:
                folder.require_shared(Path(job.run_dir))
            if train_job(job, parts, source, start) or not swept:
                return REFUSED * refused
        except (ConfigError, ScheduleError) as error:
            refusal = start.as_refused(error, START_S)
            if not isinstance(refusal, Refused):
                raise
            refused = True  # rank 0 says it, and whether another job comes: until then this rank stays
            start.signals.drained.set()
        except ChannelError:
            if not refused or swept:
                raise
            return REFUSED
