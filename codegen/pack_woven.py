"""Tiles of fp4 codes (pack_tiles.py) for kernels that decode them in registers, and back.

Codes of one word become four pairs of bf16 fields, sign at bit 15, exponent and mantissa at bits 8
to 6 of a half. Bits of two words, of neighbouring groups of 32 values of k of a row, are placed so
that a shift and a mask of a word give a pair; each has one pair whose bits are in both words.
Each tile has its scales behind it, 120 more, modulo 256: fields are values times 2^-126, what they
give times 2^-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.pack_tiles import PART, SPAN, TILE_BITS, TILE_ROWS, scales_at

_FORMAT = "fp4_e2m1"
_NIBBLES = (0, 2, 1, 3)  # of each half, in the order of the pairs
SCALE_STEP = 120
CODE_BYTES = TILE_ROWS * SPAN * TILE_BITS[_FORMAT] // 8  # of a tile
_KEPT = np.uint32(0x0C180C18)  # bits of the pairs in both words that lie in the first
Words = NDArray[Any]  # uint32
Bytes = NDArray[np.uint8]
Change = Callable[[Words, Words], tuple[Words, Words]]


def is_woven(name: str) -> bool:
    """Say whether codes of a format are woven for kernels in CUDA."""
    return name == _FORMAT


def weave(packed: Bytes, n: int, k: int) -> Bytes:
    """Return one packed [n, k] matrix with its codes woven."""
    start = scales_at(_FORMAT, n, k)
    codes, scales = packed[:start].reshape(-1, CODE_BYTES), packed[start:]
    scales = scales.reshape(len(codes), -1) + np.uint8(SCALE_STEP)
    return np.concatenate((_replaced(codes, _woven), scales), 1).reshape(-1)


def unweave(packed: Bytes, n: int, k: int) -> Bytes:
    """Invert `weave`."""
    tiles = packed.reshape(scales_at(_FORMAT, n, k) // CODE_BYTES, -1)
    codes, scales = tiles[:, :CODE_BYTES], tiles[:, CODE_BYTES:] - np.uint8(SCALE_STEP)
    return np.concatenate((_replaced(codes, _straight).reshape(-1), scales.reshape(-1)))


def _replaced(codes: Bytes, change: Change) -> Bytes:
    """Change words of parts of 16 bytes, two by two: [tiles, 2, 2, rows * words]."""
    words = np.ascontiguousarray(codes).view("<u4").reshape(-1, 2, 2, TILE_ROWS * PART // 4)
    first, second = change(words[:, :, 0], words[:, :, 1])
    return np.stack((first, second), 2).view(np.uint8).reshape(codes.shape)


def _woven(x: Words, y: Words) -> tuple[Words, Words]:
    of_x, of_y = _fields(x), _fields(y)
    both = of_x[3] >> 2 | _turned(of_y[3], 28)
    first = of_x[0] >> 6 | of_x[1] | _turned(of_x[2], 26) | both & _KEPT
    second = of_y[0] >> 6 | of_y[1] | _turned(of_y[2], 26) | (both & ~_KEPT) >> 2
    return first, second


def _straight(x: Words, y: Words) -> tuple[Words, Words]:
    both = x & _KEPT | y << 2 & ~_KEPT
    last = both << 2, _turned(both, 4)
    first, second = (
        _nibbles([w << 6, w, _turned(w, 6), rest]) for w, rest in zip((x, y), last, strict=True)
    )
    return first, second


def _fields(words: Words) -> list[Words]:
    """The four pairs of a word of nibbles."""
    found = []
    for nibble in _NIBBLES:
        code = words >> 4 * nibble
        found.append((code & 0x00070007) << 6 | (code & 0x00080008) << 12)
    return found


def _nibbles(pairs: list[Words]) -> Words:
    found = np.zeros_like(pairs[0])
    for pair, nibble in zip(pairs, _NIBBLES, strict=True):
        found |= (pair >> 6 & 0x00070007 | pair >> 12 & 0x00080008) << 4 * nibble
    return found


def _turned(words: Words, bits: int) -> Words:
    """Words turned right by so many bits."""
    return words >> bits | words << 32 - bits
