"""Logarithm and exponential of the sampler: the same bits on every machine and device.

Every step is one IEEE operation (add, multiply, divide, round to integer, exact scaling by a
power of two), rounded to nearest, in the order written; none may be contracted to a fused
multiply-add. numpy's own log and exp differ between processors, so they are not used here.
"""

import numpy as np
from numpy.typing import NDArray

WEIGHT_BITS = 32
CHUNK = 8192

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
# 2 / (2 k + 1) for k = 7 ... 1: the series of log((1 + s) / (1 - s)); at |s| <= 0.1716 the terms
# left out are below 2^-44 of the sum.
LOG_TERMS = tuple(2.0 / (2 * k + 1) for k in range(7, 0, -1))
# ln(2)^k / k! for k = 6 ... 0: the series of 2^f; at |f| <= 1/2 the rest is below 2^-22.
EXP2_TERMS = (
    np.float32(1.5403530393381610e-04),
    np.float32(1.3333558146428443e-03),
    np.float32(9.6181291076284770e-03),
    np.float32(5.5504108664821580e-02),
    np.float32(2.4022650695910072e-01),
    np.float32(6.9314718055994530e-01),
    np.float32(1.0),
)


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive normal numbers, float64, relative error below 1e-13.

    x = m 2^e with m in [sqrt(1/2), sqrt(2)); s = (m - 1) / (m + 1);
    log x = e ln 2 + (2 s + (s s^2) (2/3 + s^2 (2/5 + ...))).
    """
    mantissa, exponent = np.frexp(x)
    is_low = mantissa < SQRT_HALF
    np.multiply(mantissa, 2.0, out=mantissa, where=is_low)
    scale = exponent - is_low.astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * LOG_TERMS[0]
    for term in LOG_TERMS[1:-1]:
        series += term
        series *= square
    series += LOG_TERMS[-1]
    result: NDArray[np.float64] = scale * LN2 + (s * 2.0 + (s * square) * series)
    return result


def weights(
    logits: NDArray[np.float32], max_logit: np.float32, temperature: float
) -> NDArray[np.int64]:
    """exp((logit - max) / T) as integers in units of 2^-32, rounded down; the largest is 2^32.

    Integers, so that sums of them are exact whatever their order: 2^31 of them fit 63 bits.
    t = max((logit - max) * (log2(e) / T), -34); 2^t = 2^round(t) * series(t - round(t)), float32.
    """
    scale = np.float32(min(1.4426950408889634 / temperature, 3e38))
    t = logits - max_logit
    t *= scale
    # fmax, not maximum: a banned token at an infinite temperature scale gives -inf * 0 = NaN.
    np.fmax(t, np.float32(-34.0), out=t)
    whole = np.rint(t)
    t -= whole
    series = t * EXP2_TERMS[0]
    for term in EXP2_TERMS[1:-1]:
        series += term
        series *= t
    series += EXP2_TERMS[-1]
    # The scaling by 2^(whole + 32) is exact: the result's exponent lies within -2 .. 32.
    power = ((whole.astype(np.int32) + (127 + WEIGHT_BITS)) << 23).view(np.float32)
    series *= power
    return series.astype(np.int64)


def total_weight(logits: NDArray[np.float32], max_logit: np.float32, temperature: float) -> int:
    """The exact sum of `weights`, in pieces that stay in the processor's first caches."""
    total = 0
    for start in range(0, len(logits), CHUNK):
        total += int(weights(logits[start : start + CHUNK], max_logit, temperature).sum())
    return total
