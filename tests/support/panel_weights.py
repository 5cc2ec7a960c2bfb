"""Random weights of every packed format, as panels and as the fp32 values they stand for."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.pack_cpu import FORMATS, pack_panels, unpack_panels

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Weight:
    """A random weight: packed, and what its values are made of (fp32)."""

    packed: NDArray[np.uint8]
    w: F32
    q: F32
    d: F32 | None
    m: F32 | None


def wide(rng: np.random.Generator, shape: tuple[int, ...], exponents: int) -> F32:
    """Normal values times powers of two, with cancelling pairs, both zeros and subnormals."""
    values = rng.standard_normal(shape).astype(np.float32)
    values *= np.exp2(rng.integers(-exponents, exponents + 1, shape)).astype(np.float32)
    flat = values.reshape(-1)
    picks = rng.integers(0, flat.size, (4, max(1, flat.size // 16)))
    flat[picks[0]] = -0.0
    flat[picks[1]] = 0.0
    flat[picks[2]] = np.float32(1e-40)
    flat[picks[3]] = -flat[(picks[3] + 1) % flat.size]
    return values


def random_weight(rng: np.random.Generator, format: str, n: int, k: int) -> Weight:
    """Draw a weight [n, k]; about one group in sixteen has scale 0."""
    layout = FORMATS[format]
    if not layout.words:
        values = wide(rng, (n, k), 20 if format != "f16" else 8)
        packed = pack_panels(format, values=values)
        back = unpack_panels(format, packed, n, k).values
        assert back is not None
        if format == "bf16":
            back = (back.astype(np.uint32) << 16).view(np.float32)
        return Weight(packed, back.astype(np.float32), back.astype(np.float32), None, None)
    if layout.float_codes:
        return random_floats(rng, format, n, k)
    shape = (n, k // layout.group)
    exponents = 8 if layout.scale == "<f2" else 20
    d = wide(rng, shape, exponents).astype(layout.scale)
    if layout.has_min:
        m = wide(rng, shape, exponents).astype(layout.scale)
        codes: NDArray[Any] = rng.integers(0, 16, (n, k), np.uint8)
        packed = pack_panels(format, codes=codes, d=d, m=m)
        low: NDArray[Any] | float = np.repeat(m.astype(np.float64), layout.group, 1)
    else:
        codes = rng.integers(-128, 128, (n, k), np.int8)
        packed = pack_panels(format, codes=codes, d=d)
        m, low = None, 0.0
    exact = np.repeat(d.astype(np.float64), layout.group, 1) * codes + low
    return Weight(
        packed, exact.astype(np.float32), codes.astype(np.float32), d.astype(np.float32),
        None if m is None else m.astype(np.float32),
    )  # fmt: skip


def random_floats(rng: np.random.Generator, format: str, n: int, k: int) -> Weight:
    """Draw codes of fp8 or fp4 with ue8m0 scales: all codes, and scales from 2^-127 on."""
    d = rng.integers(100, 150, (n, k // 32), np.uint8)
    d.reshape(-1)[rng.integers(0, d.size, d.size // 16 + 1)] = 0
    if format == "fp8":
        codes = rng.integers(0, 127, (n, k), np.uint8) | (rng.integers(0, 2, (n, k), np.uint8) << 7)
        q = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        packed = pack_panels(format, codes=codes, d=d)
    else:
        codes = rng.integers(0, 16, (n, k), np.uint8)
        q = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        packed = pack_panels(format, codes=codes[:, ::2] | codes[:, 1::2] << 4, d=d)
    scale = d.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return Weight(packed, q * scale.repeat(32, 1), q, scale, None)


def prescale(format: str) -> F32:
    """Powers of two of the factored order, by k within a group."""
    layout = FORMATS[format]
    if not layout.words:
        return np.ones(1, np.float32)
    if layout.float_codes:
        return np.ones(32, np.float32)  # exact: their powers of two cancel in any place
    subs = layout.group // layout.words
    bits = 4 if layout.has_min else 8
    scale = [2.0 ** (-bits * j) if j < subs - 1 else 1.0 for j in range(subs)]
    return np.repeat(np.array(scale, np.float32), layout.words)
