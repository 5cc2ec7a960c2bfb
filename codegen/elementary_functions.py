"""exp, log, tanh, erf, sin, cos and sigmoid in fp32, branch-free.

Coefficients are our own weighted minimax fits, rounded to fp32 one by one from the lowest power,
with the remaining ones refitted each time. Subnormals count as numbers: the functions must not run
with flush-to-zero. Errors are the largest over every fp32 input of the range, against fp64.
"""

from __future__ import annotations

from tilewright.codegen.elementary_steps import Name, Recorder

_INF = float("inf")
_NAN = float("nan")
_SIGN = 0x80000000
_TANH_SPLIT = 0.5498046875
# Adding 1.5 * 2^23 leaves the nearest integer in the low bits, ties to even; the low nine bits of
# this constant's own pattern are zero, so a left shift by 23 removes it.
_MAGIC = float.fromhex("0x1.8p+23")
_MAGIC_BITS = 0x4B400000
_ONE_BITS = 0x3F800000

_LOG2_E = float.fromhex("0x1.715476p+0")
_LN2_HIGH = float.fromhex("0x1.62e430p-1")
_LN2_LOW = float.fromhex("-0x1.05c610p-29")
# Sixteen bits, so that times an exponent of eight bits it is exact.
_LN2_SHORT = float.fromhex("0x1.62e400p-1")
_LN2_REST = float.fromhex("0x1.7f7d1cp-20")
_TWO_OVER_PI = float.fromhex("0x1.45f306p-1")
_HALF_PI = tuple(
    map(float.fromhex, ("0x1.921fb6p+0", "-0x1.777a5cp-25", "-0x1.ee59dap-50"))
)

# (e^r - 1 - r) / r^2 on |r| <= ln2 / 2, closest for negative r, where the result has smaller ulps.
_EXP = "0x1.fffff2p-2 0x1.55549cp-3 0x1.556110p-5 0x1.1233aep-7 0x1.64102cp-10"
# (tanh(x) / x - 1) / x^2 in x^2 on x <= 0.55.
_TANH_NEAR = "-0x1.55554ap-2 0x1.110ceep-3 -0x1.b91e7ep-5 0x1.58e518p-6 -0x1.9921a0p-8"
# (log(1 + f) - f + f^2 / 2) / f^3 on sqrt(1/2) <= 1 + f <= sqrt(2).
_LOG = (
    "0x1.555554p-2 -0x1.000226p-2 0x1.99a01ep-3 -0x1.54728cp-3"
    " 0x1.22d8f8p-3 -0x1.0d81f2p-3 0x1.05602ep-3 -0x1.38cf20p-4"
)
# In z = r^2: (sin r - r) / r^3 and (cos r - 1 + z / 2) / z^2. On |r| <= 0.915 rather than pi / 4:
# the quadrant of a large x may round to a neighbour, since 2 / pi has 24 bits.
_SIN = "-0x1.555556p-3 0x1.111152p-7 -0x1.a031d2p-13 0x1.719468p-19"
_COS = "0x1.555538p-5 -0x1.6c02d8p-10 0x1.97a03cp-16"
# erf(x) / x - 1 in x^2 on x <= 1, and log(1 - erf(x)) in x on 1 <= x <= 4.
_ERF_NEAR = (
    "0x1.06eba8p-3 -0x1.81273ep-2 0x1.ce2ce6p-4 -0x1.b7f71ap-6"
    " 0x1.53f224p-8 -0x1.a3515ep-11 0x1.4771fcp-14"
)
_ERF_FAR = (
    "-0x1.661a16p-12 -0x1.2088ecp+0 -0x1.46bae6p-1 -0x1.a65372p-4"
    " 0x1.65cbdcp-6 -0x1.825bcap-9 0x1.86debep-13"
)
# Beyond this the reduction of sin and cos would need more parts of pi / 2.
TRIG_LIMIT = 2.0**22


def _horner(op: Recorder, x: Name, coefficients: str) -> Name:
    """Evaluate a polynomial, lowest power first in `coefficients`, with one fma per power."""
    *rest, top = (float.fromhex(c) for c in coefficients.split())
    value = op("fma", x, top, rest.pop())
    while rest:
        value = op("fma", value, x, rest.pop())
    return value


def _reduce_exp(op: Recorder, x: Name) -> tuple[Name, Name]:
    """Return r and the magic sum holding k, with x = k ln2 + r and |r| <= ln2 / 2."""
    shifted = op("fma", x, _LOG2_E, _MAGIC)
    k = op("sub", shifted, _MAGIC)
    # k * high has 32 bits and meets x near itself, so the first difference is exact.
    r = op("fma", k, -_LN2_LOW, op("fma", k, -_LN2_HIGH, x))
    return r, op("bits", shifted)


def _power_of_two(op: Recorder, k: Name) -> Name:
    """Return 2^k for -126 <= k <= 127; only the low nine bits of `k` count."""
    return op("from_bits", op("iadd", op("ishl", k, 23), _ONE_BITS))


def _exp_near(op: Recorder, r: Name) -> Name:
    """e^r for |r| <= ln2 / 2."""
    square = op("mul", r, r)
    return op("add", op("fma", square, _horner(op, r, _EXP), r), 1.0)


def _exp_in_range(op: Recorder, x: Name) -> Name:
    """e^x for -104 <= x <= 89, NaN for NaN; the last product rounds into the subnormals."""
    r, shifted = _reduce_exp(op, x)
    k = op("isub", shifted, _MAGIC_BITS)
    half = op("ishr", k, 1)
    scaled = op("mul", _exp_near(op, r), _power_of_two(op, half))
    return op("mul", scaled, _power_of_two(op, op("isub", k, half)))


def exp(op: Recorder, x: Name) -> Name:
    """e^x within 0.992 ulp: gradual underflow, +0 below -103.98, +Inf above 88.73."""
    above = op("select_lt", x, -104.0, -104.0, x)
    return _exp_in_range(op, op("select_lt", 89.0, above, 89.0, above))


def sigmoid(op: Recorder, x: Name) -> Name:
    """1 / (1 + e^-x) within 1.48 ulp, through e^-|x| so that the left tail keeps its precision."""
    negative = op("neg", op("abs", x))
    e = _exp_in_range(op, op("select_lt", negative, -104.0, -104.0, negative))
    below = op("add", e, 1.0)
    # One Newton step on the reciprocal, which also puts back what 1 + e lost.
    inverse = op("div", 1.0, below)
    lost = op("sub", e, op("sub", below, 1.0))
    missing = op("fma", op("neg", lost), inverse, op("fma", op("neg", below), inverse, 1.0))
    numerator = op("select_lt", x, 0.0, e, 1.0)
    return op("fma", numerator, inverse, op("mul", numerator, op("mul", missing, inverse)))


def _with_sign_of(op: Recorder, magnitude: Name, x: Name) -> Name:
    """Return `magnitude` with the sign bit of x."""
    sign = op("iand", op("bits", x), _SIGN)
    return op("from_bits", op("ior", op("bits", magnitude), sign))


def tanh(op: Recorder, x: Name) -> Name:
    """Within 1.47 ulp: odd polynomial up to 0.55, then 1 - 2 / (e^2|x| + 1); 1 from 9.02."""
    magnitude = op("abs", x)
    square = op("mul", x, x)
    cube = op("mul", square, magnitude)
    near = op("fma", cube, _horner(op, square, _TANH_NEAR), magnitude)
    clamped = op("select_lt", 10.0, magnitude, 10.0, magnitude)
    r, shifted = _reduce_exp(op, op("add", clamped, clamped))
    below = op("fma", _exp_near(op, r), _power_of_two(op, shifted), 1.0)
    far = op("sub", 1.0, op("div", 2.0, below))
    return _with_sign_of(op, op("select_lt", magnitude, _TANH_SPLIT, near, far), x)


def erf(op: Recorder, x: Name) -> Name:
    """Within 1.08 ulp: odd polynomial up to 1, then 1 - e^P(|x|); 1 from 3.92."""
    magnitude = op("abs", x)
    near = op("fma", magnitude, _horner(op, op("mul", x, x), _ERF_NEAR), magnitude)
    clamped = op("select_lt", 4.0, magnitude, 4.0, magnitude)
    r, shifted = _reduce_exp(op, _horner(op, clamped, _ERF_FAR))
    tail = _exp_near(op, r)
    far = op("fma", op("neg", tail), _power_of_two(op, shifted), 1.0)
    return _with_sign_of(op, op("select_lt", magnitude, 1.0, near, far), x)


def log(op: Recorder, x: Name) -> Name:
    """Natural logarithm within 0.923 ulp: -Inf at both zeros, NaN below."""
    grown = op("mul", x, 2.0**25)
    normal = op("bits", op("select_lt", x, 2.0**-126, grown, x))
    # Subtracting the bits of sqrt(1/2) makes the exponent field that of a mantissa around 1.
    e = op("ishr", op("isub", normal, 0x3F3504F3), 23)
    mantissa = op("from_bits", op("isub", normal, op("ishl", e, 23)))
    f = op("sub", mantissa, 1.0)
    bias = op("select_lt", x, 2.0**-126, -25.0, 0.0)
    exponent = op("add", op("to_float", e), bias)
    square = op("mul", f, f)
    small = op("mul", square, op("fma", f, _horner(op, f, _LOG), -0.5))
    high = op("mul", exponent, _LN2_SHORT)
    total = op("add", high, f)
    lost = op("sub", f, op("sub", total, high))
    rest = op("add", lost, op("fma", exponent, _LN2_REST, small))
    value = op("add", total, rest)
    positive = op("select_lt", 0.0, x, value, -_INF)
    signed = op("select_lt", x, 0.0, _NAN, positive)
    return op("select_lt", x, _INF, signed, x)


def log1p(op: Recorder, x: Name) -> Name:
    """log(1 + x) within 2.34 ulp, tiny x too: log of the rounded sum, times the share of x that the
    sum kept (Kahan). NaN below -1."""
    sum_ = op("add", x, 1.0)
    kept = op("sub", sum_, 1.0)
    value = log(op, sum_)
    near = op("select_eq", kept, 0.0, x, op("mul", value, op("div", x, kept)))
    return op("select_lt", x, 2.0**25, near, value)


def _reduce_trig(op: Recorder, x: Name) -> tuple[Name, Name, Name]:
    """Return r, its rounding error t and the bits of q + magic: |x| = q pi/2 + r + t."""
    magnitude = op("abs", x)
    known = op("select_lt", magnitude, TRIG_LIMIT, magnitude, _NAN)
    shifted = op("fma", known, _TWO_OVER_PI, _MAGIC)
    q = op("sub", shifted, _MAGIC)
    first, second, third = _HALF_PI
    # Exact: a multiple of 2^-24 below 1 (Cody and Waite; the fma makes 24-bit parts usable).
    start = op("fma", q, -first, known)
    product = op("mul", q, second)
    r = op("sub", start, product)
    # What the subtraction lost (Knuth's two-sum), then what the product lost.
    moved = op("sub", r, start)
    kept = op("sub", start, op("sub", r, moved))
    lost = op("sub", kept, op("add", product, moved))
    tail = op("sub", lost, op("fma", q, second, op("neg", product)))
    return r, op("fma", q, -third, tail), op("bits", shifted)


def _sin_near(op: Recorder, r: Name, tail: Name, square: Name) -> Name:
    """sin(r + tail) for |r| <= 0.915."""
    cube = op("mul", square, r)
    return op("add", r, op("fma", cube, _horner(op, square, _SIN), tail))


def _cos_near(op: Recorder, r: Name, tail: Name, square: Name) -> Name:
    """cos(r + tail) for |r| <= 0.915, with what 1 - z/2 loses added back."""
    half = op("mul", square, 0.5)
    high = op("sub", 1.0, half)
    lost = op("sub", op("sub", 1.0, high), half)
    fourth = op("mul", square, square)
    low = op("fma", fourth, _horner(op, square, _COS), op("fma", op("neg", r), tail, lost))
    return op("add", high, low)


def _turn(op: Recorder, r: Name, tail: Name, turns: Name) -> Name:
    """Return sin(r + tail + turns pi/2): the low bit of `turns` picks cos, the next the sign."""
    square = op("mul", r, r)
    sine = op("bits", _sin_near(op, r, tail, square))
    cosine = op("bits", _cos_near(op, r, tail, square))
    chosen = op("select_ilt", 0, op("iand", turns, 1), cosine, sine)
    return op("ixor", chosen, op("iand", op("ishl", turns, 30), _SIGN))


def sin(op: Recorder, x: Name) -> Name:
    """sin x within 0.847 ulp for |x| <= 10^6, 1.02 for |x| < 2^22; NaN beyond and for Inf."""
    r, tail, turns = _reduce_trig(op, x)
    value = _turn(op, r, tail, turns)
    return op("from_bits", op("ixor", value, op("iand", op("bits", x), _SIGN)))


def cos(op: Recorder, x: Name) -> Name:
    """cos x within 0.861 ulp for |x| <= 10^6, 0.998 for |x| < 2^22; NaN beyond and for Inf."""
    r, tail, turns = _reduce_trig(op, x)
    return op("from_bits", _turn(op, r, tail, op("iadd", turns, 1)))
