"""Conversions between fp32 and the 16-bit formats, rounding to integers, minimum and maximum.

Integer code throughout: nothing here depends on a machine's conversion instructions.
"""

from __future__ import annotations

from tilewright.codegen.elementary_steps import Name, Recorder

_SIGN = 0x80000000
_REST = 0x7FFFFFFF
_INF_BITS = 0x7F800000


def bf16_bits(op: Recorder, x: Name) -> Name:
    """fp32 to bf16 bits: nearest even, overflow to Inf, any NaN to 0x7fc0."""
    bits = op("bits", x)
    odd = op("iand", op("ushr", bits, 16), 1)
    rounded = op("ushr", op("iadd", op("iadd", bits, 0x7FFF), odd), 16)
    return op("select_ilt", _INF_BITS, op("iand", bits, _REST), 0x7FC0, rounded)


def bf16_value(op: Recorder, bits: Name) -> Name:
    """bf16 bits to fp32, exact."""
    return op("from_bits", op("ishl", bits, 16))


def round_bf16(op: Recorder, x: Name) -> Name:
    """fp32 to the nearest bf16 value."""
    return bf16_value(op, bf16_bits(op, x))


def f16_bits(op: Recorder, x: Name) -> Name:
    """fp32 to IEEE half bits: nearest even, Inf from 65520, any NaN to 0x7e00."""
    bits = op("bits", x)
    size = op("iand", bits, _REST)
    odd = op("iand", op("ushr", size, 13), 1)
    # Exponent bias 127 to 15, plus just under half of the last place kept.
    normal = op("ushr", op("iadd", op("iadd", size, 0xFFF - (112 << 23)), odd), 13)
    # One half has the last place of the half-precision subnormals: the addition rounds.
    sum_bits = op("bits", op("add", op("from_bits", size), 0.5))
    subnormal = op("isub", sum_bits, 0x3F000000)
    small = op("select_ilt", size, 113 << 23, subnormal, normal)
    finite = op("select_ilt", size, 0x477FF000, small, 0x7C00)
    value = op("select_ilt", _INF_BITS, size, 0x7E00, finite)
    return op("ior", value, op("iand", op("ushr", bits, 16), 0x8000))


def f16_value(op: Recorder, bits: Name) -> Name:
    """IEEE half bits to fp32, exact."""
    size = op("iand", bits, 0x7FFF)
    normal = op("iadd", op("ishl", size, 13), 112 << 23)
    # Inf and NaN move to the top exponent of fp32.
    wide = op("select_ilt", size, 0x7C00, normal, op("iadd", normal, 112 << 23))
    # From the integer, not by scaling the pattern: that would be an fp32 subnormal.
    subnormal = op("bits", op("mul", op("to_float", size), 2.0**-24))
    magnitude = op("select_ilt", size, 0x0400, subnormal, wide)
    return op("from_bits", op("ior", magnitude, op("ishl", op("iand", bits, 0x8000), 16)))


def round_f16(op: Recorder, x: Name) -> Name:
    """fp32 to the nearest IEEE half value."""
    return f16_value(op, f16_bits(op, x))


def round_f32(op: Recorder, x: Name) -> Name:
    """The identity: values are fp32 already."""
    return x


def i32_value(op: Recorder, x: Name) -> Name:
    """fp32 to i32 toward zero; saturates at both ends, NaN gives 0."""
    number = op("select_eq", x, x, x, 0.0)
    above = op("select_lt", number, -(2.0**31), -(2.0**31), number)
    held = op("select_lt", above, 2.0**31, above, 0.0)
    return op("select_ilt", op("bits", above), 0x4F000000, op("to_int", held), 0x7FFFFFFF)


def round_i32(op: Recorder, x: Name) -> Name:
    """fp32 to the fp32 nearest to its i32 conversion."""
    return op("to_float", i32_value(op, x))


def maximum(op: Recorder, a: Name, b: Name) -> Name:
    """IEEE 754-2019 maximum: NaN if either is NaN, and -0 < +0."""
    both = op("from_bits", op("iand", op("bits", a), op("bits", b)))
    tie = op("select_eq", a, b, both, op("add", a, b))
    return op("select_lt", a, b, b, op("select_lt", b, a, a, tie))


def minimum(op: Recorder, a: Name, b: Name) -> Name:
    """IEEE 754-2019 minimum: NaN if either is NaN, and -0 < +0."""
    either = op("from_bits", op("ior", op("bits", a), op("bits", b)))
    tie = op("select_eq", a, b, either, op("add", a, b))
    return op("select_lt", a, b, a, op("select_lt", b, a, b, tie))
