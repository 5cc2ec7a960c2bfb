"""Matrices for the Ascend matrix unit: bf16 rows [N, K], row-major. Quantised formats (q4_1, q8)
are dequantised here, rounded once to nearest even: this target does not read them packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.pack_cpu import Unpacked
from tilewright.graph.errors import LowerError

LAYOUT = "rows_bf16"


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
