"""Paged rows for kernels under test: random packed bytes with the values they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.graph.types import BlockFormat, DType, element_type
from tilewright.tools.packed_rows import bf16_values, row_values

Array = NDArray[Any]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FORMATS = {
    "f32": "f32",
    "bf16": "bf16",
    "v4": "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=64xbf16]",
    "v4_short": "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=8xbf16]",
    "fp8": "fp8_e4m3[g=32,axis=1,scale=ue8m0]",
    "nvfp4": "fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]",
    "mxfp4": "fp4_e2m1[g=32,axis=1,scale=ue8m0]",
}


@dataclass(frozen=True, eq=False)
class Rows:
    """A state as it lies in memory, and the fp32 values it stands for."""

    memory: Array
    values: NDArray[np.float32]


def format_of(name: str) -> DType | BlockFormat:
    return element_type(FORMATS[name])


def e4m3(code: Array) -> NDArray[np.float32]:
    """Values of e4m3 codes by their definition."""
    c = code.astype(np.int64)
    exponent, fraction = c >> 3 & 15, c & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    size = np.where(c & 127 == 127, np.nan, size)
    return np.where(c & 128, -size, size).astype(np.float32)


def random_rows(
    rng: np.random.Generator,
    name: str,
    pages: int,
    entries: int,
    width: int,
    *,
    whole: bool = False,
) -> Rows:
    """Rows of ordinary size; with `whole` the values are small integers, so that sums are exact."""
    kind, shape = format_of(name), (pages, entries, width)
    if not isinstance(kind, BlockFormat):
        values = rng.standard_normal(shape).astype(np.float32)
        if whole:
            values = rng.integers(-3, 4, shape).astype(np.float32)
        if name == "f32":
            return Rows(values, values)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return Rows(bits, bf16_values(bits))
    coded, group = width - kind.tail, kind.block[1]
    codes = _codes(rng, kind, (pages, entries, coded), whole)
    count = -(-coded // group)
    scales = _scales(rng, kind, (pages, entries, count), whole)
    tail = rng.standard_normal((pages, entries, kind.tail)).astype(np.float32)
    tail = np.round(tail * 2) if whole else tail
    bits = (tail.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    pad = kind.row_bytes(width) - codes.shape[-1] - 2 * kind.tail - count
    parts = (codes, bits.view(np.uint8), scales.astype(np.uint8),
             rng.integers(0, 256, (pages, entries, pad)).astype(np.uint8))  # fmt: skip
    memory = np.concatenate(parts, -1)
    return Rows(memory, row_values(kind, memory, width).astype(np.float32))


def _codes(
    rng: np.random.Generator, kind: BlockFormat, shape: tuple[int, ...], whole: bool
) -> Array:
    if kind.code.bits == 8:
        small = np.array([0x00, 0x38, 0x40, 0xB8, 0xC0, 0x44, 0x80])  # 0 1 2 -1 -2 3 -0
        codes = rng.choice(small, shape) if whole else rng.integers(0, 256, shape)
        return np.where(codes & 127 == 127, 0x7E, codes).astype(np.uint8)
    codes = rng.choice([0, 2, 4, 10, 12, 8], shape) if whole else rng.integers(0, 16, shape)
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def _scales(
    rng: np.random.Generator, kind: BlockFormat, shape: tuple[int, ...], whole: bool
) -> Array:
    if kind.scale.name == "fp8_e4m3":
        return np.full(shape, 0x38) if whole else rng.integers(0x28, 0x3C, shape)
    if whole:
        return np.full(shape, 127)
    return rng.integers(117, 121, shape) if kind.code.bits == 8 else rng.integers(124, 128, shape)
