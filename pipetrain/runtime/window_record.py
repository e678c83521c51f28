"""What came of a window of batches on one rank, and the hooks that look at it while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipetrain.model.network import Tensors
from pipetrain.model.specs import Size
from pipetrain.runtime.stage.memory_meter import PeakBytes
from pipetrain.schedule.timeline import Row


@dataclass(frozen=True, slots=True)
class WindowHooks:
    """What looks at a window while it runs.

    `progress`: called at each update of the first stage, or evaluated microbatch. `stop_check`: may end it
    early. `times`: whether its spans are read, for which the host waits. `memory`: whether what the stages
    hold in a window of training is measured.
    """

    progress: tuple[Callable[[], None], ...] = ()
    stop_check: Callable[[int, int], bool] | None = None
    times: bool = False
    memory: bool = False

    @classmethod
    def together(cls, several: Iterable[WindowHooks]) -> WindowHooks:
        """Return the hooks of all of these."""
        listed = list(several)
        return cls(
            tuple(progress for hooks in listed for progress in hooks.progress),
            next((hooks.stop_check for hooks in listed if hooks.stop_check), None),
            any(hooks.times for hooks in listed),
            any(hooks.memory for hooks in listed),
        )


NO_HOOKS = WindowHooks()


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """The result of a window of batches of these sizes, of which the first `done` ran.

    `row`, `peak_bytes`: what was measured, where a WindowHooks asks for it. `outputs`: of a prediction, those
    for each batch in host memory, on rank 0.
    """

    planned_sizes: Sequence[Size]
    done: int
    row: Row | None = None
    peak_bytes: PeakBytes | None = None
    outputs: Sequence[Tensors] = ()

    @property
    def sizes(self) -> Sequence[Size]:
        """The sizes of the batches that ran."""
        return self.planned_sizes[: self.done]

    @property
    def early(self) -> bool:
        return self.done < len(self.planned_sizes)
