"""Formats of weights against ggml's own Python formulas, on random and on extreme blocks."""

import re

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewright.graph.errors import VerifyError
from tilewright.models import quants

DTYPES = list(quants.BLOCK_FORMATS)
# Zero, the smallest and largest subnormal, the smallest normal, the largest, infinity, NaN; signed.
HALVES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0x7E00]
SCALE_AT = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q6_k": (208,)}


def random_raw(dtype: str, rows: int, blocks: int, seed: int, half: int | None) -> quants.Bytes:
    """Random bytes of [rows, blocks] blocks, with one float16 pattern as every scale if given."""
    form = quants.BLOCK_FORMATS[dtype]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, form.block_bytes), dtype=np.uint8)
    for at in SCALE_AT.get(dtype, ()) if half is not None else ():
        raw[..., at : at + 2] = np.array([half], "<u2").view(np.uint8)
    return raw.reshape(-1)


def oracle(dtype: str, raw: quants.Bytes, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The formulas of the gguf package."""
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(raw.reshape(shape[0], -1), kind)
    return np.asarray(values, np.float32).reshape(shape)


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    half=st.none() | st.sampled_from(HALVES),
)
def test_values_equal_ggml_bit_for_bit(
    dtype: str, rows: int, blocks: int, seed: int, half: int | None
) -> None:
    raw = random_raw(dtype, rows, blocks, seed, half)
    shape = (rows, blocks * quants.BLOCK_FORMATS[dtype].block)
    got, want = quants.dequantise(dtype, raw, shape), oracle(dtype, raw, shape)
    assert got.shape == shape and got.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint32)[numbers], want.view(np.uint32)[numbers])


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 4), blocks=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_codes_and_scales_give_the_values(rows: int, blocks: int, seed: int) -> None:
    def spread(scale: NDArray[np.generic], group: int) -> NDArray[np.float32]:
        return np.repeat(scale.astype(np.float32), group, axis=1)

    shape = (rows, blocks * 32)
    raw = random_raw("q4_0", rows, blocks, seed, 0x0123)
    codes, d = quants.unpack_q4_0(raw, shape)
    assert (codes.dtype, codes.max() <= 15, d.dtype) == (np.uint8, True, np.float16)
    values = spread(d, 32) * (codes.astype(np.float32) - 8)
    np.testing.assert_array_equal(values, oracle("q4_0", raw, shape))

    raw = random_raw("q4_1", rows, blocks, seed, 0x2345)
    codes, d, m = quants.unpack_q4_1(raw, shape)
    assert codes.shape == shape and d.shape == m.shape == (rows, blocks)
    np.testing.assert_array_equal(spread(d, 32) * codes + spread(m, 32), oracle("q4_1", raw, shape))

    raw = random_raw("q8_0", rows, blocks, seed, 0x1234)
    signed, d = quants.unpack_q8_0(raw, shape)
    assert signed.dtype == np.int8
    np.testing.assert_array_equal(spread(d, 32) * signed, oracle("q8_0", raw, shape))

    shape = (rows, blocks * 256)
    raw = random_raw("q6_k", rows, blocks, seed, 0x1234)
    signed, scale = quants.unpack_q6_k(raw, shape)
    assert signed.min() >= -32 and signed.max() <= 31 and scale.shape == (rows, blocks * 16)
    np.testing.assert_array_equal(spread(scale, 16) * signed, oracle("q6_k", raw, shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_number_of_bytes_is_named(dtype: str) -> None:
    form = quants.BLOCK_FORMATS[dtype]
    raw = np.zeros(form.block_bytes * 2 + 1, np.uint8)
    shape = (2, form.block)
    text = (
        f"tensor 'a': bytes do not match the shape: got {raw.size}, "
        f"want {raw.size - 1} for {dtype} {list(shape)}"
    )
    with pytest.raises(VerifyError, match=f"^{re.escape(text)}$"):
        quants.dequantise(dtype, raw, shape, where="tensor 'a'")


def test_rows_that_cut_a_block_are_named() -> None:
    text = "tensor: rows do not divide into blocks of q8_0: got 48 columns, want a multiple of 32"
    with pytest.raises(VerifyError, match=f"^{re.escape(text)}$"):
        quants.unpack_q8_0(np.zeros(102, np.uint8), (2, 48))


def test_dtype_without_formula_is_named() -> None:
    text = (
        "tensor: no formula for its dtype: got f8_e4m3, "
        "want one of f32, f16, bf16, q8_0, q4_0, q4_1, q6_k"
    )
    with pytest.raises(VerifyError, match=f"^{re.escape(text)}$"):
        quants.dequantise("f8_e4m3", np.zeros(4, np.uint8), (4,))
