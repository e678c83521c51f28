"""The feed from a user's loader: rank 0 reads it and sends each rank its microbatches.

The ranks of a program each have a loader, and a shuffling one gives each rank other batches. So rank 0 alone
reads it. It sends each rank of the first stage the inputs of its microbatches, and each of the last one their
targets, as bare tensors: all ranks know their sizes before the window begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipetrain.data.batch import Form
from pipetrain.data.reader import Reader
from pipetrain.model.specs import Size, TensorSpec, Value, as_tuple, join, split
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.microbatch_feed import WindowFeed, WindowPart
from pipetrain.tasks import counted_for

EVALUATED_AT_ONCE = 16  # batches of a loader in a window of an evaluation
MAX_UNWAITED_SENDS = 256  # tensors on their way; before rank 0 sends more it waits until the first is taken
INPUTS, TARGETS = 0, 1  # streams of tensors from rank 0


class LoaderBatches:
    """The batches of a loader; `reader`: on rank 0, which `begin` prepares when it is first asked."""

    evaluated_at_once: int | None = EVALUATED_AT_ONCE

    def __init__(
        self, groups: ProcessGroups, reader: Reader | None, form: Form, begin: Callable[[Reader], object]
    ) -> None:
        self._groups, self._reader, self._form = groups, reader, form
        self._begin: Callable[[Reader], object] | None = begin

    def next(self, window: int | None) -> list[Size] | None:
        assert self._reader is not None, "rank 0 reads the loader"
        begin, self._begin = self._begin, None
        if begin is not None:
            begin(self._reader)
        return self._reader.window(window)

    def open(self, part: WindowPart) -> WindowFeed:
        feed: WindowFeed
        if self._reader is None:
            feed = ReceivingFeed(part, self._groups, self._form)
        else:
            feed = ReadingFeed(part, self._groups, self._reader)
        feed.forms = self._form.inputs, self._form.targets
        return feed


class ReadingFeed(WindowFeed):
    """Reads the batches of a window on rank 0, holds its own microbatches, and sends the others.

    Whoever needs a microbatch waits until rank 0 reads its batch, and rank 0 may wait for who needs it. So
    its order says where it is to be read, see make_posts. What is sent holds connections open, so nothing
    keeps a feed after an error.
    """

    def __init__(self, part: WindowPart, groups: ProcessGroups, reader: Reader) -> None:
        super().__init__(part)
        self._groups, self._reader = groups, reader
        self._batches_read = 0
        self._local_inputs: dict[int, Value] = {}  # by microbatch
        self._local_targets: dict[int, tuple[Value, list[float] | None]] = {}  # by batch, with all weights
        self._sent: deque[Callable[[], Tensor]] = deque()  # each waits until a tensor is taken

    def send_up_to(self, mb: int) -> None:
        while self._batches_read <= mb // self._part.microbatches:
            self._read_batch()

    def finish(self, batches: int) -> None:
        while self._batches_read < batches:
            self._read_batch()
        for wait in self._sent:
            wait()

    def _read_inputs(self, mb: int) -> Value:
        self.send_up_to(mb)
        return self._local_inputs.pop(mb)

    def _read_targets(self, batch: int) -> tuple[Value, list[float] | None]:
        self.send_up_to(self._part.microbatches_of(batch).start)
        return self._local_targets.pop(batch)

    def _read_batch(self) -> None:
        part, batch = self._part, self._batches_read
        rank_here = part.settings.rank
        mbs = part.microbatches_of(batch)
        sizes = [self.size(mb) for mb in mbs]
        self._batches_read += 1
        inputs, targets = self._reader.take(part.sizes[batch])
        for mb, value in zip(mbs, split(inputs, sizes), strict=True):
            if part.input_ranks[mb] == rank_here:
                self._local_inputs[mb] = value
            else:
                self._send("inputs", value, part.input_ranks[mb], INPUTS)
        if part.target_ranks is None:
            return
        numbers_by_rank: dict[int, list[int]] = {}  # by rank, the numbers in the batch of the microbatches
        for number, mb in enumerate(mbs):
            numbers_by_rank.setdefault(part.target_ranks[mb], []).append(number)
        values, weights = [targets], None
        if len(numbers_by_rank) > 1:
            values = split(targets, sizes)
            weights = [counted_for(part.settings.weight, value) for value in values]
        for rank, numbers in numbers_by_rank.items():
            value = targets if weights is None else join([values[number] for number in numbers])
            if rank == rank_here:
                self._local_targets[batch] = value, weights
                continue
            self._send("targets", value, rank, TARGETS)
            if weights is not None:
                self._send("targets", torch.tensor(weights, dtype=torch.float64), rank, TARGETS)

    def _send(self, content: str, value: Value, rank: int, stream: int) -> None:
        for tensor in as_tuple(value):
            # It may be on a GPU.
            self._sent.append(self._groups.post_tensor(content, tensor.cpu(), rank, stream))
        while len(self._sent) > MAX_UNWAITED_SENDS:  # of a whole pass they would be all
            self._sent.popleft()()


class ReceivingFeed(WindowFeed):
    """Receives what rank 0 reads for this rank.

    The receives of the first tensors are posted at once, so that they come early; of others when needed.
    """

    ahead = False

    def __init__(self, part: WindowPart, groups: ProcessGroups, form: Form) -> None:
        super().__init__(part)
        self._groups, self._form = groups, form
        mb, batch = next(part.local_inputs(), None), next(part.target_batches(), None)
        self._first_inputs = [] if mb is None else self._post_inputs(mb)
        self._first_targets = [] if batch is None else self._post_targets(batch)

    def _read_inputs(self, mb: int) -> Value:
        posted, self._first_inputs = self._first_inputs or self._post_inputs(mb), []
        value: Value = self._form.inputs.pack(tuple(wait() for wait in posted))
        return value

    def _read_targets(self, batch: int) -> tuple[Value, list[float] | None]:
        posted, self._first_targets = self._first_targets or self._post_targets(batch), []
        tensors, n = tuple(wait() for wait in posted), len(self._form.targets.specs)
        weights = tensors[n].tolist() if len(tensors) > n else None
        return self._form.targets.pack(tensors[:n]), weights

    def _post_inputs(self, mb: int) -> list[Callable[[], Tensor]]:
        return self._post("inputs", self._form.inputs.of(self.size(mb)).specs, INPUTS)

    def _post_targets(self, batch: int) -> list[Callable[[], Tensor]]:
        """Post the receives of a batch's targets and, if they are a part, what its microbatches count for."""
        local_mbs, microbatches = self._part.local_targets(batch), self._part.microbatches
        size = Size.joined(self.size(mb) for mb in local_mbs)
        posted = self._post("targets", self._form.targets.of(size).specs, TARGETS)
        if len(local_mbs) < microbatches:
            posted += self._post("weights", [TensorSpec((microbatches,), torch.float64)], TARGETS)
        return posted

    def _post(self, content: str, specs: Sequence[TensorSpec], stream: int) -> list[Callable[[], Tensor]]:
        return [self._groups.expect_tensor(f"the {content} of a batch", spec, 0, stream) for spec in specs]
