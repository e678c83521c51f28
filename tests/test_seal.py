"""What a rank believes: what was sealed by its own run, under its own name, and nothing else."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pipetrain.errors import TrainingStopped
from pipetrain.seal import MAC_BYTES, SECRET, Seal, SealedStore

FORGED = "was not said by this run: somebody else has written into torchrun's store"


def test_what_is_sealed_is_believed_under_its_name():
    seal = Seal("key", "run")
    for content in (b"", b"words", bytes(range(256))):
        assert Seal("key", "run").open("name", seal.close("name", content)) == content


@pytest.mark.parametrize(
    ("seal", "name", "change"),
    [
        (Seal("another key", "run"), "name", bytes),
        (Seal("key", "another run"), "name", bytes),
        (Seal("key", "run").within("job"), "name", bytes),
        (Seal("key", "run"), "another name", bytes),
        (Seal("key", "run"), "name", lambda said: said + b"!"),
        (Seal("key", "run"), "name", lambda said: said[:-1]),
        (Seal("key", "run"), "name", lambda said: bytes(MAC_BYTES) + said[MAC_BYTES:]),
        (Seal("key", "run"), "name", lambda said: said[MAC_BYTES:]),
        (Seal("key", "run"), "name", lambda said: b""),
    ],
)
def test_nothing_else_is(seal, name, change):
    said = Seal("key", "run").close("name", b"words")
    with pytest.raises(TrainingStopped, match=FORGED):
        seal.open(name, change(said))


def test_without_a_key_nothing_is():
    with pytest.raises(TrainingStopped, match=FORGED):
        Seal("", "run").open("name", Seal("", "run").close("name", b"words"))


def test_a_secret_that_is_handed_down_is_preferred(monkeypatch):
    without = Seal("key", "run").close("name", b"words")
    monkeypatch.setenv(SECRET, "some random words")
    assert Seal("", "run").open("name", Seal("key", "run").close("name", b"words")) == b"words"
    with pytest.raises(TrainingStopped, match=FORGED):
        Seal("key", "run").open("name", without)


def test_a_store_tells_what_was_sealed_and_nothing_that_was_slipped_in():
    raw = dist.HashStore()
    store, other = (SealedStore(raw, Seal("key", "run")) for _ in range(2))
    assert not store.check("a")
    store.set("a", "wörds")
    assert (other.check("a"), other.get("a"), other.clone().get("a")) == (True, "wörds", "wörds")
    raw.set("b", raw.get("a"))  # said again in another place
    raw.set("c", "stop")
    for key in ("b", "c"):
        with pytest.raises(TrainingStopped, match=f"what came as {key} {FORGED}"):
            store.get(key)


def test_parts_of_a_store_do_not_meet():
    raw = dist.HashStore()
    store = SealedStore(raw, Seal("key", "run"))
    store.under("1").set("a", "first")
    store.under("2").set("a", "second")
    assert [store.under(part).get("a") for part in "12"] == ["first", "second"]
    dist.PrefixStore("2", raw).set("a", dist.PrefixStore("1", raw).get("a"))
    with pytest.raises(TrainingStopped, match=FORGED):
        store.under("2").get("a")
