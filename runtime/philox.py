"""Philox4x32-10, a counter-based random generator: a pure function of key and counter.

The key is the request's seed; the counter is what is drawn for. Nothing that depends on a batch
(slot, step, order of arrival) can enter, so the same request draws the same numbers anywhere.
"""

import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Multipliers, key increments and round count: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel
# random numbers: as easy as 1, 2, 3", SC 2011, section 3.3 and table 2.
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_INCREMENT_0 = 0x9E3779B9
_INCREMENT_1 = 0xBB67AE85
_NUM_ROUNDS = 10
_LOW = 0xFFFFFFFF
_LOW_64 = np.uint64(_LOW)
_HALF = np.uint64(32)

# Last word of the counter: what the number is drawn for.
TOKEN_STREAM = 0
GROUP_STREAM = 1


@dataclass(frozen=True)
class Draw:
    """All that the randomness of one token depends on.

    seed: 64 bits; position: absolute position of the drawn token in its sequence, counting the
    prompt; sample_index: which of the request's n samples.
    """

    seed: int
    position: int
    sample_index: int = 0


def philox4x32(counters: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Random words of a table of counters, each row independent of the others.

    counters: uint32 [4, rows], one row of the result per column; key: two 32-bit words.
    Returns uint32 [4, rows].
    """
    word0, word1, word2, word3 = counters.astype(np.uint64)
    product0, product1 = np.empty_like(word0), np.empty_like(word0)
    key0, key1 = key
    for _ in range(_NUM_ROUNDS):
        np.multiply(word0, _MULTIPLIER_0, out=product0)
        np.multiply(word2, _MULTIPLIER_1, out=product1)
        np.right_shift(product1, _HALF, out=word0)
        np.bitwise_xor(word0, word1, out=word0)
        np.bitwise_xor(word0, np.uint64(key0), out=word0)
        np.right_shift(product0, _HALF, out=word2)
        np.bitwise_xor(word2, word3, out=word2)
        np.bitwise_xor(word2, np.uint64(key1), out=word2)
        np.bitwise_and(product1, _LOW_64, out=word1)
        np.bitwise_and(product0, _LOW_64, out=word3)
        key0, key1 = (key0 + _INCREMENT_0) & _LOW, (key1 + _INCREMENT_1) & _LOW
    return np.stack((word0, word1, word2, word3)).astype(np.uint32)


def keyed_words(
    ids: NDArray[np.int64], streams: NDArray[np.int64], draw: Draw
) -> NDArray[np.uint32]:
    """Random words uint32 [4, ids] of the counters (position, sample index, id, stream)."""
    counters = np.empty((4, len(ids)), dtype=np.uint32)
    counters[0] = draw.position
    counters[1] = draw.sample_index
    counters[2] = ids
    counters[3] = streams
    return philox4x32(counters, (draw.seed & _LOW, draw.seed >> 32))


def fresh_seed() -> int:
    """Draw a seed from the operating system; below 2^53, so that every JSON reader keeps it."""
    return secrets.randbits(53)
