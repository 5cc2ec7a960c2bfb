"""Correct AscendC kernels of tests/data/ascend with fresh inputs and the values they give.

`printed/contract.asc` is what TileLang printed for a projection with a residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from support.ascend import Array

TEXTS = {
    path.stem: path.read_text()
    for path in sorted((Path(__file__).parent.parent / "data" / "ascend").glob("*.asc"))
}
PRINTED = (
    Path(__file__).parent.parent / "data" / "ascend" / "printed" / "contract.asc"
).read_text()


@dataclass(frozen=True)
class Case:
    """Arguments of a launch; the last array is written and should then hold `want`."""

    arrays: list[Array]
    value: int
    blocks: int
    want: Array

    @property
    def right(self) -> bool:
        return bool(np.allclose(self.arrays[-1], self.want, rtol=2e-4, atol=2e-4))


def as_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _scaled(rng: np.random.Generator, n: int, k: int) -> tuple[Array, Array, Array]:
    """Codes of e2m1 in pairs, scales for 32 of k, and the values of both.

    Scales from 2^-2 to 2^2: products of two such are multiples of 2^-6, and 256 of them add up to
    less than 2^18, so that fp32 sums are exact in any order.
    """
    codes = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    scales = rng.integers(125, 130, (n, k // 32)).astype(np.uint8)
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(n, k)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return codes, scales, values * np.exp2(scales.astype(np.float32) - 127).repeat(32, 1)


def case(kernel: str, rng: np.random.Generator) -> Case:
    def floats(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    match kernel:
        case "stream":
            x, w = floats(5, 256), floats(256)
            return Case([x, w, np.full_like(x, np.nan)], 5, 2, 2 * x + w)
        case "cube":
            given = floats(64, 192), floats(32, 192)
            a, b = ((v.view(np.uint32) >> 16).astype(np.uint16) for v in given)
            want = np.maximum(as_f32(a) @ as_f32(b).T, 0)
            return Case([a, b, np.full((64, 32), np.nan, np.float32)], 3, 1, want)
        case "mx":
            a, a_scale, a_values = _scaled(rng, 48, 256)
            b, b_scale, b_values = _scaled(rng, 32, 256)
            out = np.full((48, 32), np.nan, np.float32)
            return Case([a, a_scale, b, b_scale, out], 2, 1, a_values @ b_values.T)
        case "contract":
            rows = 69  # three tiles of rows, the last one ragged; blocks take more than one each
            residual = floats(rows, 64)
            given = floats(64, 64), floats(rows, 64)
            w, x = ((v.view(np.uint32) >> 16).astype(np.uint16) for v in given)
            out = np.full((rows, 64), np.nan, np.float32)
            return Case([residual, w, x, out], rows, 4, residual + as_f32(x) @ as_f32(w).T)
        case _:
            x = floats(8, 200)
            sums = x.sum(1)
            return Case([x, np.full(8, np.nan, np.float32)], 200, 1, sums - sums.mean())
