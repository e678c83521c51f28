"""The channel of a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipetrain.runtime.channel import Channel, Message


class LoopbackChannel(Channel):
    """A channel to nobody: what is sent on it is dropped, and what is received is made up.

    A gradient has not arrived until it is waited for, so that a policy goes on with forwards, as where other
    ranks lag, and updates keep the versions of open microbatches.
    """

    _late: Sequence[Message] = ()  # gradients that were waited for last

    def arrived(self, message: Message) -> bool:
        return message.src < message.dst or message in self._late

    def wait(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        self._late = receives

    def _begin(self, message: Message, tensor: Tensor, sending: bool) -> dist.Work:
        if not sending and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.normal_()
        elif not sending:  # what is valid everywhere: 0 for an index, True in a mask
            tensor.fill_(tensor.dtype is torch.bool)
        return _Done()

    def _add_up(self, numbers: Tensor, group: Any) -> dist.Work:
        return _Done()

    def _complete(self, *works_and_errors: Any) -> None:
        """Nothing is waited for."""


class _Done(dist.Work):
    """A transfer that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
