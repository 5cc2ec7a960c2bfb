"""Float codes of one byte or less and their power-of-two scales, as float32.

Formats: OCP 8-bit floating point (e4m3), OCP microscaling formats (e2m1, ue8m0).
"""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Single = NDArray[np.float32]


def _e4m3_table() -> Single:
    """Values of all 256 codes: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))
    size[code & 127 == 127] = np.nan
    table: Single = np.where(code >= 128, -size, size).astype(np.float32)
    return table


def _e8m0_table() -> Single:
    """2^(code - 127); 255 is NaN."""
    exponents = np.arange(256) - 127.0
    exponents[255] = np.nan
    table: Single = np.exp2(exponents).astype(np.float32)
    return table


E4M3 = _e4m3_table()
E8M0 = _e8m0_table()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e2m1_values(packed: Bytes) -> Single:
    """Values [.., 2 n] of bytes [.., n] with two codes each, the first in the low nibble."""
    codes = np.stack((packed & np.uint8(15), packed >> np.uint8(4)), -1)
    return E2M1[codes.reshape(*packed.shape[:-1], -1)]


def scaled_values(format: str, codes: Bytes, scale: Bytes, block: tuple[int, int]) -> Single:
    """Values [n, k] of fp8_e4m3 codes [n, k] or fp4_e2m1 codes [n, k / 2].

    `scale` are ue8m0 bytes, one per block of rows and columns; edge blocks may be cut short.
    """
    values = E4M3[codes] if format == "fp8_e4m3" else e2m1_values(codes)
    (n, k), (rows, cols) = values.shape, block
    spread = E8M0[scale].repeat(rows, 0)[:n].repeat(cols, 1)[:, :k]
    # A broken file may hold any scale: the values say so, a warning would not help.
    with np.errstate(over="ignore", invalid="ignore"):
        values *= spread
    return values


def power_of_two_bytes(scale: Single) -> Bytes | None:
    """The ue8m0 bytes of fp32 scales, or None if one is no power of two from 2^-126 on."""
    bits = np.ascontiguousarray(scale, np.float32).view(np.uint32)
    exponent = bits >> np.uint32(23)
    exact = (bits & np.uint32(0x7FFFFF) == 0) & (exponent > 0) & (exponent < 255)
    return exponent.astype(np.uint8) if bool(exact.all()) else None
