"""Random numbers that are a function of what they are for, and of nothing that happened before.

A generator with a state gives a sample other numbers when another worker draws them, or when the batch before
was cut differently. A hash of (seed, epoch, sample) does not: every schedule, worker count and resumed run
sees the same images. SplitMix64 is a counter with a strong mixer, so its n-th number costs what the first
does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(words: Words) -> Words:
    """Mix each 64-bit word: a bijection in which every bit of the input moves half of the output's.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, with the constants
    of Stafford's variant 13, as in java.util.SplittableRandom.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def key(*numbers: int) -> int:
    """Hash integers, in their order, to a 64-bit key; negative ones count modulo 2**64."""
    state = 0
    for number in numbers:
        word = np.array([(state ^ (number & _MASK)) + _GAMMA & _MASK], dtype=np.uint64)
        state = int(mix(word)[0])
    return state


def draw(stream: int, counters: Words) -> Words:
    """Give the numbers of a stream at the given positions: 64 random bits each, the counters' shape."""
    return mix(np.uint64(stream) + (counters + np.uint64(1)) * np.uint64(_GAMMA))
