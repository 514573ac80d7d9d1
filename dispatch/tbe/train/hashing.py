"""Hashes that are the same in every process, on every platform and in every release of this package.

The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). Python's own ``hash`` is salted by process and cannot be used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF


def mix(value: int) -> int:
    """One SplitMix64 output for a non-negative integer: 64 well mixed bits."""
    x = (value + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)


def mix_array(values: U64) -> U64:
    """``mix`` for every element; same shape. Arrays wrap at 64 bits, as the scalar version does by mask."""
    x = values + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
    return x ^ (x >> np.uint64(31))


def uniform(bits: U64) -> NDArray[np.float64]:
    """64 random bits to a float64 in [0, 1); same shape."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def combine(keys: U64, counter: U64) -> U64:
    """A new stream of bits for every (key, counter) pair; the shapes broadcast."""
    return mix_array(keys ^ mix_array(counter))


def shuffled(size: int, key: int) -> NDArray[np.int64]:
    """A permutation of ``range(size)`` chosen by ``key`` (64 bits).

    Not numpy's: its generators may change their streams between releases, and checkpoints outlive releases.
    """
    bits = mix_array(np.arange(size, dtype=np.uint64) ^ np.uint64(key))
    return np.argsort(bits, kind="stable").astype(np.int64)


def is_held_out(row: int, share: float) -> bool:
    """Whether row number ``row`` belongs to the held-out part; ``share`` of all rows do, in no pattern.

    By a hash of the number rather than every k-th row: a periodic log would alias with a stride.
    """
    return mix(row) < share * 2.0**64
