"""A channel that hands on all that it does not do itself."""

from __future__ import annotations

from typing import Any

from pipetrain.runtime.channel import Channel


class Wrapped:
    """Stands before a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        """Return what the channel has."""
        return getattr(self._channel, name)
