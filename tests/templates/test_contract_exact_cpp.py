"""Products of e4m3 rows with fp4 weights on the CPU: sums of a block are exact and rounded once,
whatever the schedule, the rows beside it, the threads and the instruction set."""

from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.contract_units import (
    N0,
    N1,
    ROWS,
    SCHEDULES,
    Unit,
    assert_same_bits,
    build,
    expect,
    run,
    run_on_arm,
    source,
    unit,
)
from support.panel_weights import F32, Weight, random_weight

pytestmark = pytest.mark.cpu
K = 96
# Rows are always made: those that others read in place are made by each thread.
KERNELS = tuple(f"e_{s}" for s, fields in SCHEDULES.items() if fields["rows"] != "direct")


def compiled() -> Unit:
    return unit("fp4", K, KERNELS)


def e4m3_rows(rng: np.random.Generator, rows: int) -> F32:
    """Rows of all codes of e4m3, a power of two for each block: wide and narrow blocks, zeros."""
    sign = rng.integers(0, 2, (rows, K), np.uint8) << 7
    codes = rng.integers(0, 127, (rows, K), np.uint8) | sign
    codes[:, 32:64] &= rng.choice(np.array([0xFF, 0x87, 0xC7], np.uint8), (rows, 1))
    narrow = rng.integers(0, 2, (rows, K // 32)).repeat(32, 1).astype(bool)
    codes = np.where(narrow, codes & 0xBF | 0x40, codes)  # six binades: two digits are enough
    codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
    codes[1] &= 0x80
    codes[2] = 0x01  # the smallest subnormal
    codes[3] = 0x7E
    codes[4, ::2], codes[4, 1::2] = 0x7E, 0xFE
    scale = np.exp2(rng.integers(-22, 20, (rows, K // 32))).astype(np.float32).repeat(32, 1)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


@cache
def example() -> tuple[list[Weight], F32, F32]:
    """Weights, rows, and what is wanted of them."""
    rng = np.random.default_rng()
    weights = [random_weight(rng, "fp4", n, K) for n in (N0, N1, N1)]
    x = e4m3_rows(rng, ROWS)
    y = [expect(compiled(), "e", w, x) for w in weights]
    with np.errstate(over="ignore", invalid="ignore"):
        return weights, x, np.concatenate((y[0], y[1] * y[2]), 1)


def test_every_schedule_gives_exact_sums_rounded_once() -> None:
    weights, x, want = example()
    for name in KERNELS:
        for rows in (1, 2, 3, 4, 5, 7, 13, ROWS):
            got = run(compiled(), name, weights, x[:rows], threads=1 + rows % 3, chunk=1 + rows % 2)
            assert_same_bits(got, want[:rows], f"{name} with {rows} rows")


@given(st.data())
@settings(max_examples=20)
def test_a_row_has_the_same_bits_alone_and_among_any_rows(data: st.DataObject) -> None:
    weights, x, want = example()
    picks = data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS))
    name = data.draw(st.sampled_from(KERNELS))
    threads, chunk = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    rows = np.ascontiguousarray(x[picks])
    got = run(compiled(), name, weights, rows, threads=threads, chunk=chunk)
    assert_same_bits(got, want[picks], f"{name} rows {picks}")


def test_every_pair_of_codes_and_every_scale() -> None:
    """All weights meet all numbers of e4m3, each in a block with the largest and the smallest."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    x = np.zeros((len(codes), K), np.float32)
    x[:, ::3] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
    x[:, 1::32], x[:, 2::32] = 448.0, 2.0**-9
    weights, _, _ = example()
    want = expect(compiled(), "e", weights[0], x)
    got = [run(compiled(), "e_s2", weights, x[i : i + 18])[:, :N0] for i in range(0, len(x), 18)]
    assert_same_bits(np.concatenate(got), want, "all codes")


def test_a_value_that_is_no_number_makes_its_row_nan() -> None:
    weights, x, want = example()
    bad = x.copy()
    bad[2], bad[5, K // 2], bad[9, K - 1] = np.nan, np.inf, np.nan
    keep = [i for i in range(ROWS) if i not in (2, 5, 9)]
    for name in KERNELS:
        got = run(compiled(), name, weights, bad)
        assert np.isnan(got[[2, 5, 9]]).all(), name
        assert_same_bits(got[keep], want[keep], name)


def test_no_rows_touch_nothing() -> None:
    weights, x, _ = example()
    for name in KERNELS:
        assert run(compiled(), name, weights, x[:0]).shape == (0, N0 + N1)


def test_sums_are_closer_than_those_of_fp32_products() -> None:
    """The error is that of one rounding a block and one an addition: half the last place each."""
    weights, x, _ = example()
    w = weights[0].w.astype(np.float64)
    got = expect(compiled(), "e", weights[0], x)
    exact = x.astype(np.float64) @ w.T
    scale = np.abs(x).astype(np.float64) @ np.abs(w).T
    assert (np.abs(got - exact) <= (K // 32 + 1) * 2.0**-24 * scale + 1e-30).all()


def test_neon_gives_the_bits_of_avx2(tmp_path: Path) -> None:
    weights, x, want = example()
    kernels = ("e_s3", "e_g3")
    for name, got in zip(kernels, run_on_arm(tmp_path, "fp4", K, kernels, weights, x), strict=True):
        assert_same_bits(got, want, name)


def test_avx512_compiles(tmp_path: Path) -> None:
    flags = ("-c", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
    text = source("fp4", K, ("e_s3", "e_g3"))
    build(tmp_path, ("g++", "-march=x86-64-v4"), text, flags, tmp_path / "unit.o")
