"""Logarithm and exponential of the sampler: the same bits on every machine and device.

Every step is one IEEE operation (add, multiply, divide, round to integer, exact scaling by a
power of two), rounded to nearest, in the order written; none may be contracted to a fused
multiply-add. numpy's own log and exp differ between processors, so they are not used here.
"""

import numpy as np
from numpy.typing import NDArray

WEIGHT_BITS = 40

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
# 2 / (2 k + 1) for k = 11 ... 1: the series of log((1 + s) / (1 - s)); at |s| <= 0.1716 the first
# term left out is below 2^-54 of the sum.
_LOG_TERMS = tuple(2.0 / (2 * k + 1) for k in range(11, 0, -1))
# ln(2)^k / k! for k = 7 ... 0: the series of 2^f; at |f| <= 1/2 the rest is below 2^-27.
_EXP2_TERMS = tuple(
    np.float32(term)
    for term in (
        1.525273380405984e-05, 1.5403530393381606e-04, 1.3333558146428443e-03,
        9.618129107628477e-03, 5.550410866482158e-02, 2.402265069591007e-01,
        6.931471805599453e-01, 1.0,
    )
)  # fmt: skip


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive normal numbers, float64, error below 2 ulp.

    x = m 2^e with m in [sqrt(1/2), sqrt(2)); s = (m - 1) / (m + 1);
    log x = e ln 2 + (2 s + s^3 (2/3 + s^2 (2/5 + ...))).
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    scale = exponent.astype(np.float64) - low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        series *= square
        series += term
    result: NDArray[np.float64] = scale * _LN2 + (s * 2.0 + (s * square) * series)
    return result


def weights(
    logits: NDArray[np.float32], max_logit: np.float32, temperature: float
) -> NDArray[np.int64]:
    """exp((logit - max) / T) as integers in units of 2^-40, rounded down; the largest is 2^40.

    Integers, so that sums of them are exact whatever their order: 2^23 of them fit 63 bits.
    t = max((logit - max) * (log2(e) / T), -42); 2^t = 2^round(t) * series(t - round(t)), float32.
    """
    scale = np.float32(min(1.4426950408889634 / temperature, 3e38))
    t = logits - max_logit
    t *= scale
    # fmax, not maximum: a banned token at an infinite temperature scale gives -inf * 0 = NaN.
    np.fmax(t, np.float32(-42.0), out=t)
    whole = np.rint(t)
    t -= whole
    series = np.full_like(t, _EXP2_TERMS[0])
    for term in _EXP2_TERMS[1:]:
        series *= t
        series += term
    # The scaling by 2^(whole + 40) is exact: the result's exponent lies within -2 .. 40.
    power = ((whole.astype(np.int32) + (127 + WEIGHT_BITS)) << 23).view(np.float32)
    series *= power
    return series.astype(np.int64)
