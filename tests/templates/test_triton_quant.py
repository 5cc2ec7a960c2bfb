"""Rounding and codes of quantised rows in Triton, bit for bit: all codes, ties, subnormals, NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support import triton_run
from support.paged_rows import E2M1, e4m3
from tilewright.graph.ops import quant

SIZE = 1024
TEXT = '''
import triton
import triton.language as tl
from tw_math import *
from tw_rows import *


@triton.jit
def apply(x, y, size: tl.constexpr):
    j = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + j, {call})
'''
F32 = NDArray[np.float32]


def applied(call: str, x: NDArray[Any], folder: Path, *, ints: bool = False) -> NDArray[Any]:
    """Apply a function of tw_quant to every element."""
    padded = np.zeros(-(-x.size // SIZE) * SIZE, x.dtype)
    padded[: x.size] = x
    source = torch.from_numpy(padded)
    result = torch.full(source.shape, -7, dtype=torch.int32 if ints else torch.float32)
    module = triton_run.load(TEXT.replace("{call}", call), f"apply_{abs(hash(call))}", folder)
    module.apply[(padded.size // SIZE,)](source, result, SIZE)
    return result.numpy()[: x.size]


def bits(x: NDArray[Any]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def around(values: F32) -> F32:
    """Values, the midpoints between neighbours, and the floats next to all of them."""
    ascending = np.unique(values)
    middles = ((ascending[1:].astype(np.float64) + ascending[:-1]) / 2).astype(np.float32)
    points = np.concatenate((ascending, middles))
    near = [points, np.nextafter(points, np.float32(np.inf)),
            np.nextafter(points, np.float32(-np.inf))]  # fmt: skip
    tiny = np.array([1e-45, 1e-40, 2**-10, 2**-11, 0.0], np.float32)
    found = np.concatenate((*near, tiny))
    return np.concatenate((found, -found)).astype(np.float32)


def same(got: F32, want: F32) -> None:
    """Equal bits; NaN for NaN."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan])


def test_e4m3_rounds_like_the_reference(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = e4m3(codes)
    x = around(values[np.isfinite(values)])
    x = np.append(x[np.abs(x) <= 448], np.float32(np.nan))
    random = np.random.default_rng(1).uniform(-448, 448, 4000) * 2.0 ** -np.arange(4000) ** 0.3
    x = np.concatenate((x, random.astype(np.float32)))
    want = quant.round_e4m3(torch.from_numpy(x)).numpy()
    same(applied("tw_round_e4m3(tl.load(x + j))", x, tmp_path), want)


def test_e2m1_rounds_like_the_reference(tmp_path: Path) -> None:
    x = around(np.concatenate((E2M1, -E2M1)))
    x = np.append(x[np.abs(x) <= 6], np.float32(np.nan))
    want = quant.round_e2m1(torch.from_numpy(x)).numpy()
    same(applied("tw_round_e2m1(tl.load(x + j))", x, tmp_path), want)


def test_codes_of_all_values(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8)
    found = applied("tw_code_e4m3(tl.load(x + j))", e4m3(codes), tmp_path, ints=True)
    np.testing.assert_array_equal(found, codes)
    values = np.concatenate((E2M1, -E2M1))
    found = applied("tw_code_e2m1(tl.load(x + j))", values, tmp_path, ints=True)
    np.testing.assert_array_equal(found, np.arange(16))


def test_values_of_all_codes(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.int32)
    same(applied("tw_e4m3_value(tl.load(x + j))", codes, tmp_path), e4m3(codes.astype(np.uint8)))
    want = np.append(np.ldexp(1.0, codes[:-1] - 127), np.nan).astype(np.float32)
    same(applied("tw_power_value(tl.load(x + j))", codes, tmp_path), want)


def test_scales_are_those_of_the_rules(tmp_path: Path) -> None:
    """Exact powers stay, the next float goes up; zeros, subnormals, infinity, NaN."""
    r = np.random.default_rng(2)
    exact = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    random = r.integers(0, 0x7F800001, 3000, dtype=np.uint32).view(np.float32)
    limits = [np.ldexp(np.float32(m), np.arange(-149, 120)) for m in (448, 6, 0.875)]
    x = np.concatenate((exact, *limits, random))
    x = np.concatenate((x, np.nextafter(x, np.float32(np.inf)), [0.0, np.inf, np.nan]))
    x = x.astype(np.float32)
    rows = torch.from_numpy(x)[:, None]
    rules = {
        "mxfp8": quant.power_of_two_at_least(quant._maximum(rows, 1e-4) * (1 / 448)),
        "mxfp4": quant.power_of_two_at_least(quant._maximum(rows, 6 * 2.0**-126) * (1 / 6)),
        "nvfp4": quant.round_e4m3((quant._maximum(rows, 6 * 2.0**-9) / 6).clamp(2.0**-9, 448)),
    }
    for name, want in rules.items():
        got = applied(f"tw_scale_{name}(tw_size(tl.load(x + j)))", x, tmp_path)
        same(got, want[:, 0].numpy())


@pytest.mark.parametrize("size", [2, 16, 128])
def test_hadamard_keeps_the_order_of_sums(size: int, tmp_path: Path) -> None:
    x = np.random.default_rng(size).standard_normal(SIZE).astype(np.float32)
    call = f"tw_hadamard(tl.load(x + j), {float(np.float32(size**-0.5))!r}, 1, {SIZE}, 1)"
    if size < SIZE:
        lines = SIZE // size
        call = (f"tl.reshape(tw_hadamard(tl.reshape(tl.load(x + j), ({lines}, {size})), "
                f"{float(np.float32(size**-0.5))!r}, {lines}, {size}, 2), ({SIZE},))")  # fmt: skip
    want = quant._hadamard([torch.from_numpy(x).reshape(-1, size)], {})
    same(applied(call, x, tmp_path), want.flatten().numpy())
