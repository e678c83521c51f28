"""A program from a file, as a schedule."""

from __future__ import annotations

from dataclasses import replace

from pipetrain.schedule.actions import UPDATE, Op, Program, ScheduleError


class FixedProgram:
    """A program from a file as a schedule: of one batch, repeated as needed, or of one whole window."""

    def __init__(self, path: str, program: Program) -> None:
        self._path = path
        self._program = program
        stages = {action.stage for actions in program for action in actions}
        steps = {a for actions in program for a in actions if a.op is Op.STEP}
        self.batches = len(steps) // max(1, len(stages))

    def __call__(self, ranks: int, batches: int, microbatches: int, replicas: object = None) -> Program:
        """Return the program of a window, for any `replicas`. Raises ScheduleError for another size."""
        mbs = {action.mb for actions in self._program for action in actions if action.op is Op.F}
        times, rest = divmod(batches, self.batches or 1)
        fits = len(self._program) == ranks and mbs == set(range(self.batches * microbatches))
        if not fits or rest or (times > 1 and self.batches > 1):
            raise ScheduleError(
                f"the program in {self._path} is of {len(self._program)} ranks, {self.batches} batches "
                f"and {len(mbs)} microbatches in all; there are {ranks} ranks, a window of {batches} "
                f"batches and microbatches={microbatches} a batch: start {len(self._program)} processes, and "
                f"set microbatches={len(mbs) // (self.batches or 1)}"
            )
        return [
            [
                replace(a, mb=a.mb + batch * microbatches * (a.op not in UPDATE), version=a.version + batch)
                for batch in range(times)
                for a in actions
            ]
            for actions in self._program
        ]
