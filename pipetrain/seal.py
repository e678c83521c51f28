"""What a rank believes of what others seem to say.

torchrun's store listens on every address and asks nobody who they are, and ranks find each other's addresses
there. So whoever reaches it could tell a rank what to run, or answer in another's place. What one rank tells
another is therefore sealed (HMAC-SHA256) with a key that only the run's own user can know: a random number in
the run's folder, in a file that nobody else may read, or, where PIPETRAIN_SECRET is set on every machine,
that. Nothing is unpickled, built or run before its seal is proved.
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
    """Return the error for what came under a name without a proof."""
    return TrainingStopped(
        f"what came as {name} was not said by this run: somebody else has written into torchrun's store, or "
        f"answers in a rank's place; keep its port from others, and start again"
    )


class Seal:
    """Seals what is said in one attempt of one run, with a `key` or, where it is set, PIPETRAIN_SECRET.

    `scope` keeps what was said elsewhere under the same key from being said again here.
    """

    def __init__(self, key: str, scope: str) -> None:
        self._key = (os.environ.get(SECRET) or key).encode()
        self._scope = scope

    def within(self, scope: str) -> Seal:
        """Return one for a part of its scope."""
        return Seal(self._key.decode(), f"{self._scope} {scope}")

    def close(self, name: str, content: bytes) -> bytes:
        """Seal what is said under a name."""
        return self._mac(name, content) + content

    def open(self, name: str, sealed: bytes) -> bytes:
        """Return what was sealed. Raises TrainingStopped where it was not sealed by this run's user."""
        mac, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not self._key or not hmac.compare_digest(mac, self._mac(name, content)):
            raise forged(name)
        return content

    def _mac(self, name: str, content: bytes) -> bytes:
        said = b"\0".join([self._scope.encode(), name.encode(), content])
        return hmac.new(self._key, said, hashlib.sha256).digest()


class SealedStore:
    """What the ranks of one job tell each other through torchrun's store. `raw` is for torch's own use."""

    def __init__(self, raw: Store, seal: Seal) -> None:
        self.raw = raw
        self.seal = seal

    def set(self, key: str, text: str) -> None:
        """Say something under a key, once."""
        self.raw.set(key, self.seal.close(key, text.encode()))  # type: ignore[arg-type]

    def get(self, key: str) -> str:
        """Return what was said under a key; waits until it is. Raises TrainingStopped as Seal.open does."""
        return self.seal.open(key, self.raw.get(key)).decode()

    def check(self, key: str) -> bool:
        """Whether something was said under a key."""
        return bool(self.raw.check([key]))

    def under(self, prefix: str) -> SealedStore:
        """Return one for a part of it, in which nothing that was said elsewhere is believed."""
        return SealedStore(PrefixStore(prefix, self.raw), self.seal.within(prefix))

    def clone(self) -> SealedStore:
        """Return one with a connection of its own, for another thread."""
        return SealedStore(self.raw.clone(), self.seal)  # type: ignore[attr-defined]
