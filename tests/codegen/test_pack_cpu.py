"""Panel packing of CPU weights: inverse, sizes, the row address formula, and its errors."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewright.codegen.pack_cpu import FORMATS, pack_panels, packed_bytes, unpack_panels
from tilewright.graph.errors import LowerError

GROUPED = [name for name, layout in FORMATS.items() if layout.words]


def arrays(format: str, n: int, k: int, seed: int) -> dict[str, NDArray[Any]]:
    """Random arguments of `pack_panels` for a weight [n, k]."""
    rng = np.random.default_rng(seed)
    layout = FORMATS[format]
    if not layout.words:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if format == "bf16":
            return {"values": (values.view(np.uint32) >> 16).astype(np.uint16)}
        return {"values": values.astype(np.float16) if format == "f16" else values}
    if layout.float_codes:
        width = k if format == "fp8" else k // 2
        codes, d = rng.integers(0, 256, (n, width), np.uint8), rng.integers(0, 255, (n, k // 32))
        return {"codes": codes, "d": d.astype(np.uint8)}
    scales = {
        name: rng.standard_normal((n, k // layout.group)).astype(layout.scale)
        for name in ("d", "m")[: 1 + layout.has_min]
    }
    if layout.has_min:
        return {"codes": rng.integers(0, 16, (n, k), np.uint8), **scales}
    return {"codes": rng.integers(-128, 128, (n, k), np.int8), **scales}


@pytest.mark.parametrize("format", FORMATS)
@given(n=st.integers(1, 40), groups=st.integers(1, 5), seed=st.integers(0, 99))
def test_unpacking_inverts_packing(format: str, n: int, groups: int, seed: int) -> None:
    k = groups * FORMATS[format].group
    given_arrays = arrays(format, n, k, seed)
    packed = pack_panels(format, **given_arrays)
    assert packed.dtype == np.uint8 and packed.shape == (packed_bytes(format, n, k),)
    back = unpack_panels(format, packed, n, k)
    for name, array in given_arrays.items():
        np.testing.assert_array_equal(getattr(back, name), array)


@pytest.mark.parametrize(
    ("format", "bits"),
    [("f32", 32), ("bf16", 16), ("q4_1", 5), ("q8_0", 8.5), ("q8s16", 10), ("fp8", 8.25),
     ("fp4", 4.25)],
)
def test_packed_size_is_that_of_the_format(format: str, bits: float) -> None:
    assert packed_bytes(format, 576, 1536) == 576 * 1536 * bits / 8
    assert packed_bytes(format, 1, 32) == packed_bytes(format, 16, 32)


@pytest.mark.parametrize("rows, cols", [(128, 128), (32, 32), (1, 64)])
def test_scales_of_blocks_reach_all_their_rows_and_groups(rows: int, cols: int) -> None:
    rng = np.random.default_rng(1)
    n, k = 300, 160
    codes = rng.integers(0, 256, (n, k), np.uint8)
    d = rng.integers(0, 255, (-(-n // rows), -(-k // cols))).astype(np.uint8)
    back = unpack_panels("fp8", pack_panels("fp8", codes=codes, d=d, block=(rows, cols)), n, k)
    assert back.d is not None and back.d.shape == (n, k // 32)
    for row, group in rng.integers(0, (n, k // 32), (50, 2)):
        assert back.d[row, group] == d[row // rows, group * 32 // cols]


def test_q4_0_becomes_q4_1_with_an_exact_minimum() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (17, 64), np.uint8)
    d = rng.standard_normal((17, 2)).astype(np.float16)
    back = unpack_panels("q4_1", pack_panels("q4_0", codes=codes, d=d), 17, 64)
    assert back.d is not None and back.m is not None
    np.testing.assert_array_equal(back.m.astype(np.float64), -8.0 * d.astype(np.float64))
    np.testing.assert_array_equal(back.codes, codes)


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFF800000]], np.uint32)
    back = unpack_panels("bf16", pack_panels("bf16", values=bits.view(np.float32)), 1, 5).values
    assert back is not None
    assert back[0].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0xFF80]


def test_padding_columns_are_zero() -> None:
    packed = pack_panels("f32", values=np.ones((3, 2), np.float32)).view(np.float32)
    np.testing.assert_array_equal(packed.reshape(2, 16), [[1.0] * 3 + [0.0] * 13] * 2)


CODES = np.zeros((2, 32), np.uint8)
ERRORS = {
    f"packed format 'q5': unknown: got q5, want one of {', '.join(FORMATS)}": (
        lambda: pack_panels("q5", codes=CODES)
    ),
    "packed format 'fp4': codes do not fit: got uint8 [2, 20], want bytes of whole groups of 32 "
    "k": (
        lambda: pack_panels("fp4", codes=CODES[:, :20], d=CODES)
    ),
    "packed format 'fp8': shape of 'd' does not fit the codes: got uint8 [2, 1], want uint8 [1, 1] "
    "for blocks of 32x32": (
        lambda: pack_panels("fp8", codes=CODES, d=CODES[:, :1], block=(32, 32))
    ),
    "packed format 'q4_1': row length does not hold whole groups: got 33, want a multiple of 32": (
        lambda: packed_bytes("q4_1", 16, 33)
    ),
    "packed format 'q4_1': an array is missing: got none, want 'm'": (
        lambda: pack_panels("q4_1", codes=CODES, d=np.zeros((2, 1), np.float16))
    ),
    "packed format 'q8_0': shape of 'd' does not fit the codes: got [2, 2], want [2, 1]": (
        lambda: pack_panels("q8_0", codes=CODES, d=np.zeros((2, 2), np.float16))
    ),
    "packed format 'f32': size differs from [1, 2]: got 4 bytes, want 128": (
        lambda: unpack_panels("f32", np.zeros(4, np.uint8), 1, 2)
    ),
    "packed format 'q4_0': -8 d overflows f16: got |d| = 8192, want at most 8188": (
        lambda: pack_panels("q4_0", codes=CODES, d=np.full((2, 1), 8192, np.float16))
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    with pytest.raises(LowerError, match=f"^{re.escape(message)}$"):
        ERRORS[message]()
