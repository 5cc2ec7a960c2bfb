"""Rows of activation formats as states and tables hold them: codes, bf16 tail, scales."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.graph.types import BlockFormat
from tilewright.models.float_codes import E4M3, E8M0, e2m1_values

_SCALES = {"ue8m0": E8M0, "fp8_e4m3": E4M3}


def row_values(format: BlockFormat, rows: NDArray[np.uint8], width: int) -> NDArray[np.float32]:
    """Values [.., width] of packed rows [.., BlockFormat.row_bytes(width)], exactly.

    A tail lies after the codes, scales are last; what pads them is not read.
    """
    coded, group = width - format.tail, format.block[1]
    tail_at = -(-coded * format.code.bits // 8)
    scales_at = tail_at + 2 * format.tail
    codes, scales = rows[..., :tail_at], rows[..., scales_at:][..., : -(-coded // group)]
    values = E4M3[codes] if format.code.bits == 8 else e2m1_values(codes)[..., :coded]
    spread = _SCALES[format.scale.name][scales].repeat(group, -1)[..., :coded]
    tail = bf16_values(np.ascontiguousarray(rows[..., tail_at:scales_at]).view("<u2"))
    # Rows that nobody wrote may hold any scale.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.concatenate((values * spread, tail), -1)


def bf16_values(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Values of bf16 numbers given by their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
