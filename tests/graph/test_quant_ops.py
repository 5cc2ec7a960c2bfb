"""`quantise` bit for bit against ml_dtypes and scales found another way."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewright.graph.ops import op_def
from tilewright.graph.ops.quant import FP8_FLOOR, quantised_format

MXFP4 = "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
NVFP4 = "fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]"
FP8 = "fp8_e4m3[g=32,axis=1,scale=ue8m0]"
EVERY = (
    MXFP4, NVFP4, FP8, "fp8_e4m3[g=64,axis=1,scale=ue8m0]", "fp8_e4m3[g=128,axis=1,scale=ue8m0]",
    "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=64xbf16]",
)  # fmt: skip
Single = NDArray[np.float32]
F8, F4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
FP4_CODES = np.arange(16, dtype=np.uint8).view(F4).astype(np.float32)
FP8_CODES = np.arange(256, dtype=np.uint8).view(F8).astype(np.float32)
FINITE = FP8_CODES[~np.isnan(FP8_CODES)]


def quantise(x: Single, format: str) -> Single:
    rounded = op_def("quantise").reference([torch.from_numpy(x)], {"dtype": format})
    result: Single = rounded.numpy()
    return result


def same_bits(a: Single, b: Single) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), np.float32(b).view(np.uint32))


def exact_scale(largest: float, format: str) -> float:
    """The smallest power of two, in exact arithmetic, that is at least the rounded quotient."""
    if format == NVFP4:
        floored = np.float32(max(largest, 6 * 2.0**-9))
        stored = np.float32(min(max(floored / np.float32(6), 2.0**-9), 448)).astype(F8)
        return float(stored.astype(np.float32))
    fp4 = format == MXFP4
    floor, limit = (6 * 2.0**-126, 6) if fp4 else (FP8_FLOOR, 448)
    ratio = np.float32(max(np.float32(largest), np.float32(floor))) * np.float32(1 / limit)
    exponent = math.floor(math.log2(ratio)) - 2
    while Fraction(2) ** exponent < Fraction(float(ratio)):
        exponent += 1
    return float(2.0**exponent)


def expected(x: Single, format: str) -> Single:
    """One group at a time; codes by ml_dtypes."""
    target = quantised_format(format)
    code, limit = (F4, 6) if "fp4" in format else (F8, 448)
    result = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    coded = x.shape[1] - target.tail
    for row in range(x.shape[0]):
        for start in range(0, coded, target.block[1]):
            part = slice(start, min(start + target.block[1], coded))
            scale = np.float32(exact_scale(float(np.abs(x[row, part]).max()), format))
            quotient = np.clip(x[row, part] / scale, -limit, limit)
            result[row, part] = quotient.astype(code).astype(np.float32) * scale
    return result


def test_every_fp4_code_with_every_scale_stays() -> None:
    """Groups whose largest element is 6 scales: all that a packed group can hold, but NaN."""
    for byte in range(1, 253):  # 2^-126 is the smallest scale made, 6 * 2^126 is no float
        x = np.zeros((1, 32), np.float32)
        x[0, :16] = FP4_CODES * np.float32(2.0 ** (byte - 127))
        same_bits(quantise(x, MXFP4), x)
    for byte in range(1, 127):  # 0 is no scale; from 128 on they are negative
        scale = np.uint8(byte).view(F8).astype(np.float32)
        x = (FP4_CODES * scale)[None].astype(np.float32)
        same_bits(quantise(x, NVFP4), x)


def test_every_fp8_code_with_every_scale_stays() -> None:
    lowest = math.ceil(math.log2(FP8_FLOOR / 448))
    for exponent in range(lowest, 120):  # 448 * 2^120 is no float
        x = np.full((len(FINITE), 32), 448, np.float32)
        x[:, 5] = FINITE
        x = x * np.float32(2.0**exponent)
        same_bits(quantise(x, FP8), x)


@pytest.mark.parametrize("format", EVERY)
@pytest.mark.parametrize("spread", [0, 6, 40])
def test_random_rows(format: str, spread: int) -> None:
    r = np.random.default_rng(spread)
    width = quantised_format(format).tail + 100
    x = r.standard_normal((30, width)) * np.exp2(r.integers(-spread, spread + 1, (30, width)))
    same_bits(quantise(x.astype(np.float32), format), expected(x.astype(np.float32), format))


@pytest.mark.parametrize("format", [MXFP4, NVFP4, FP8])
def test_ties_go_to_the_even_code(format: str) -> None:
    """Midpoints of all neighbouring codes, and the floats next to them."""
    codes = np.unique(FP4_CODES if "fp4" in format else FINITE)
    middle = ((codes[1:].astype(np.float64) + codes[:-1]) / 2).astype(np.float32)
    for values in (middle, np.nextafter(middle, np.float32(1e9)), np.nextafter(middle, -1e9)):
        for scale in (2.0**-9, 0.5, 1.0, 64.0) if format == NVFP4 else (2.0**-20, 1.0, 2.0**90):
            x = np.full((len(values), 16), codes[-1], np.float32)
            x[:, 3] = values
            x *= np.float32(scale)
            same_bits(quantise(x, format), expected(x, format))


@pytest.mark.parametrize("format", [MXFP4, FP8])
def test_scale_at_powers_of_two(format: str) -> None:
    """A largest element of exactly 6 or 448 scales keeps the scale; the next float doubles it."""
    limit = 6.0 if format == MXFP4 else 448.0
    for exponent in range(-13 if format == FP8 else -125, 100, 7):
        top = np.float32(limit * 2.0**exponent)
        for largest in (np.nextafter(top, np.float32(0)), top, np.nextafter(top, np.float32(1e38))):
            x = np.full((1, 32), largest / 3, np.float32)
            x[0, 31] = largest
            same_bits(quantise(x, format), expected(x, format))


@pytest.mark.parametrize("format", [MXFP4, NVFP4, FP8])
def test_zeros_subnormals_and_floors(format: str) -> None:
    tiny = np.float32(2.0**-149)
    steps = np.arange(-16, 16, dtype=np.float32)
    for unit in (tiny, tiny * 2**20, np.float32(2.0**-127), np.float32(1e-30), np.float32(3e-7)):
        x = (steps * unit)[None].astype(np.float32)
        same_bits(quantise(x, format), expected(x, format))
    signed = np.array([[0.0, -0.0] * 16], np.float32)
    same_bits(quantise(signed, format), signed)


@pytest.mark.parametrize("format", EVERY)
def test_a_group_with_nan_is_nan_and_no_other(format: str) -> None:
    size, tail = quantised_format(format).block[1], quantised_format(format).tail
    x = np.ones((2, 3 * size + tail), np.float32)
    x[1, size + 3] = np.nan
    result = quantise(x, format)
    nan = np.zeros(x.shape, bool)
    nan[1, size : 2 * size] = True
    np.testing.assert_array_equal(np.isnan(result), nan)
    same_bits(result[0], quantise(x[:1], format)[0])


def test_infinity_makes_a_group_nan_unless_its_scale_has_a_largest_value() -> None:
    x = np.ones((1, 32), np.float32)
    x[0, 2] = -np.inf
    assert np.isnan(quantise(x, MXFP4)).all() and np.isnan(quantise(x, FP8)).all()
    result = quantise(x, NVFP4)
    assert result[0, 2] == -6 * 448
    same_bits(result[0, 16:], quantise(np.ones((1, 16), np.float32), NVFP4)[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(EVERY))
def test_idempotent_and_negation_changes_the_sign_alone(seed: int, format: str) -> None:
    r = np.random.default_rng(seed)
    x = (r.standard_normal((2, 200)) * np.exp2(r.integers(-8, 8, (2, 1)))).astype(np.float32)
    once = quantise(x, format)
    same_bits(-quantise(-x, format), once)
    if format != NVFP4:  # its scale is rounded, so the largest element may move
        same_bits(quantise(once, format), once)


def test_doubles_are_rounded_to_single_first() -> None:
    x = torch.tensor([[1.0 + 2.0**-40] * 32], dtype=torch.float64)
    result = op_def("quantise").reference([x], {"dtype": FP8})
    assert result.dtype == torch.float64 and bool((result == 1.0).all())


def test_gradients_pass_straight_through() -> None:
    x = torch.randn(3, 64, requires_grad=True)
    op_def("quantise").reference([x], {"dtype": MXFP4}).square().sum().backward()
    with torch.no_grad():
        rounded = op_def("quantise").reference([x.detach()], {"dtype": MXFP4})
    torch.testing.assert_close(x.grad, 2 * rounded)
