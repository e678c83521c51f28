from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipetrain.data.hashing import draw, key


def test_draw_is_splitmix64():
    """The first numbers of the reference generator (Vigna's splitmix64.c) from the state 1234567."""
    assert draw(1234567, np.arange(5, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.integers(-(2**63), 2**63), st.integers(0, 2**40))
def test_key_tells_every_number_and_order_apart(seed, epoch):
    assert 0 <= key(seed, epoch) < 2**64
    assert len({key(seed, epoch), key(seed, epoch + 1), key(seed + 1, epoch), key(seed)}) == 4
    assert seed == epoch or key(seed, epoch) != key(epoch, seed)


def test_each_bit_is_set_half_of_the_time():
    words = draw(key(0, 0), np.arange(20_000, dtype=np.uint64))
    share = [(words >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]
    assert 0.48 < min(share) < max(share) < 0.52
