"""Authentication of the messages between ranks.

torchrun's store listens on every address and has no authentication, and ranks find each other's addresses
in it: anyone who reaches it could tell a rank what to run. Messages are therefore authenticated (HMAC-SHA256)
with a key that only the run's user knows: a random number in a file of the run's folder that others cannot
read, or PIPETRAIN_SECRET where that is set on every machine. Nothing is unpickled, built or run unverified.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from torch.distributed.distributed_c10d import PrefixStore, Store

from pipetrain.errors import TrainingStopped

SECRET = "PIPETRAIN_SECRET"
MAC_BYTES = hashlib.sha256().digest_size


def forged(name: str) -> TrainingStopped:
    """Return the error for a message that failed verification."""
    return TrainingStopped(
        f"what came as {name} was not said by this run: somebody else has written into torchrun's store, or "
        f"answers in a rank's place; keep its port from others, and start again"
    )


class Seal:
    """Authenticates messages in a `scope` (an attempt of a run) by PIPETRAIN_SECRET, if set, or `key`."""

    def __init__(self, key: str, scope: str) -> None:
        self._key = (os.environ.get(SECRET) or key).encode()
        self._scope = scope

    def within(self, scope: str) -> Seal:
        return Seal(self._key.decode(), f"{self._scope} {scope}")

    def close(self, name: str, content: bytes) -> bytes:
        """Return `content` with its authentication code, which depends on `name`."""
        return self._mac(name, content) + content

    def open(self, name: str, sealed: bytes) -> bytes:
        """Return the content of a sealed message. Raises TrainingStopped if its code is wrong."""
        mac, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not self._key or not hmac.compare_digest(mac, self._mac(name, content)):
            raise forged(name)
        return content

    def _mac(self, name: str, content: bytes) -> bytes:
        message = b"\0".join([self._scope.encode(), name.encode(), content])
        return hmac.new(self._key, message, hashlib.sha256).digest()


class SealedStore:
    """torchrun's store with authenticated values. `raw` is the store itself, for torch's own use."""

    def __init__(self, raw: Store, seal: Seal) -> None:
        self.raw = raw
        self.seal = seal

    def set(self, key: str, text: str) -> None:
        self.raw.set(key, self.seal.close(key, text.encode()))  # type: ignore[arg-type]

    def get(self, key: str) -> str:
        """Wait for a key and return its value. Raises TrainingStopped as Seal.open does."""
        return self.seal.open(key, self.raw.get(key)).decode()

    def check(self, key: str) -> bool:
        return bool(self.raw.check([key]))

    def under(self, prefix: str) -> SealedStore:
        """Return a store for the keys under a prefix, with a scope of its own."""
        return SealedStore(PrefixStore(prefix, self.raw), self.seal.within(prefix))

    def clone(self) -> SealedStore:
        """Return a store with a connection of its own, for another thread."""
        return SealedStore(self.raw.clone(), self.seal)  # type: ignore[attr-defined]
