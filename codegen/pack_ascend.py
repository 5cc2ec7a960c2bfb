"""Matrices for the Ascend matrix unit. bf16 rows [N, K], row-major; formats of integers (q4_1, q8)
are dequantised to them here, rounded once to nearest even. fp8 and fp4 stay codes: rows [N, K] of
codes, then a scale for each row and 32 of K in pairs, [K / 64, N, 2], as the matrix unit takes
them. K is filled up to a multiple of 64 with zeros; both parts begin at multiples of 64 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.pack_cpu import Unpacked
from tilewright.graph.errors import LowerError
from tilewright.graph.types import BlockFormat, ElementType

LAYOUT, CODED, F32_ROWS = "rows_bf16", "rows_coded", "rows_f32"
GROUP, PAIR = 32, 64  # of K that one scale, and a pair of them, take
ONE = 127  # the ue8m0 code of 1


def bf16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round float32 to the bits of bf16, to nearest even; NaN stays NaN; bits pass through."""
    if values.dtype == np.uint16:
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | 0x40, rounded)


def dequantise(found: Unpacked) -> NDArray[Any]:
    """Return the values of a weight [N, K]: codes times scales, plus minima; fp32, or bf16 bits."""
    if found.values is not None:
        return found.values
    if found.codes is None or found.d is None:
        raise LowerError("weight: codes or scales are missing: want both")
    n, k = found.codes.shape
    groups = found.d.shape[1]
    values = found.codes.astype(np.float32).reshape(n, groups, k // groups)
    values = values * found.d.astype(np.float32)[..., None]
    if found.m is not None:
        values = values + found.m.astype(np.float32)[..., None]
    return values.reshape(n, k)


def pack_rows(found: Unpacked) -> NDArray[np.uint8]:
    """Pack a weight into bf16 rows."""
    return np.ascontiguousarray(bf16_bits(dequantise(found))).reshape(-1).view(np.uint8)


def unpack_rows(packed: NDArray[np.uint8], n: int, k: int) -> Unpacked:
    """Invert `pack_rows`: the bits [n, k]."""
    return Unpacked(values=packed.reshape(-1).view(np.uint16).reshape(n, k))


def padded(k: int) -> int:
    """Values of K that a row of codes holds."""
    return -(-k // PAIR) * PAIR


def code_bytes(dtype: ElementType, n: int, k: int) -> int:
    """Bytes of the codes of a matrix [n, k], padded."""
    assert isinstance(dtype, BlockFormat)
    return -(-n * padded(k) * dtype.code.bits // 8 // 64) * 64


def coded_bytes(dtype: ElementType, n: int, k: int) -> int:
    """Bytes of a matrix of codes and scales."""
    return code_bytes(dtype, n, k) + -(-n * padded(k) // GROUP // 64) * 64


def pack_coded(found: Unpacked, dtype: ElementType) -> NDArray[np.uint8]:
    """Pack codes [N, K] (fp4: [N, K / 2], even k in the low nibble) and their ue8m0 scales.

    Raises LowerError if K is no multiple of 32.
    """
    if found.codes is None or found.d is None or not isinstance(dtype, BlockFormat):
        raise LowerError("weight: codes or scales are missing: want both")
    n, k = found.codes.shape[0], found.codes.shape[1] * 8 // dtype.code.bits
    if k % GROUP:
        raise LowerError(f"weight of {dtype}: k: got {k}, want a multiple of {GROUP}")
    rows, columns = dtype.block
    scales = found.d.repeat(rows, 0)[:n].repeat(columns // GROUP, 1)[:, : k // GROUP]
    packed = np.zeros(coded_bytes(dtype, n, k), np.uint8)
    codes = np.zeros((n, padded(k) * dtype.code.bits // 8), np.uint8)
    codes[:, : found.codes.shape[1]] = found.codes
    packed[: codes.size] = codes.reshape(-1)
    pairs = np.full((n, padded(k) // GROUP), ONE, np.uint8)
    pairs[:, : k // GROUP] = scales
    start = code_bytes(dtype, n, k)
    laid = pairs.reshape(n, -1, 2).transpose(1, 0, 2)
    packed[start : start + pairs.size] = np.ascontiguousarray(laid).reshape(-1)
    return packed


def unpack_coded(packed: NDArray[np.uint8], dtype: BlockFormat, n: int, k: int) -> Unpacked:
    """Invert `pack_coded`: codes as they were, and a scale for each row and 32 of K."""
    width, start = padded(k) * dtype.code.bits // 8, code_bytes(dtype, n, k)
    codes = packed[: n * width].reshape(n, width)[:, : k * dtype.code.bits // 8]
    scales = packed[start : start + n * padded(k) // GROUP].reshape(-1, n, 2)
    scales = scales.transpose(1, 0, 2).reshape(n, -1)[:, : k // GROUP]
    return Unpacked(codes=np.ascontiguousarray(codes), d=np.ascontiguousarray(scales))
