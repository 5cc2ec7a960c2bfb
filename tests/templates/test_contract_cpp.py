"""Contraction kernels of the CPU target: every schedule, form, row count and thread count gives the
bits of a scalar loop, for every weight format and order of evaluation."""

import shutil
from functools import cache
from pathlib import Path

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
    int64,
    pointer,
    run,
    run_on_arm,
    source,
)
from support.contract_units import unit as compiled
from support.panel_weights import F32, Weight, random_weight, wide
from tilewright.codegen.pack_cpu import FORMATS

pytestmark = pytest.mark.cpu
FULL = {("q4_1", 96): tuple(SCHEDULES), ("bf16", 33): ("s2", "s6", "g2", "g4")}
SOME = ("s3", "g3")  # what the other units, orders and instruction sets are compiled with


def kernel_names(format: str, k: int) -> tuple[str, ...]:
    """Kernels of a unit: all orders it allows, the schedules of FULL for the first."""
    orders = "abcd" if FORMATS[format].words else "ab" if k % 3 == 0 else "a"
    first = tuple(f"a_{s}" for s in FULL.get((format, k), SOME))
    return first + tuple(f"{o}_{s}" for o in orders[1:] for s in SOME)

UNITS = [("f32", 33), ("f32", 1), ("f16", 7), ("bf16", 33)]
UNITS += [("q4_1", 96), ("q8_0", 96), ("q8s16", 48), ("fp8", 96), ("fp4", 96)]


def unit(format: str, k: int) -> Unit:
    return compiled(format, k, kernel_names(format, k))


@cache
def example(format: str, k: int) -> tuple[list[Weight], F32]:
    rng = np.random.default_rng(k)
    weights = [random_weight(rng, format, n, k) for n in (N0, N1, N1)]
    return weights, wide(rng, (ROWS, k), 20)


@cache
def wanted(format: str, k: int, order: str) -> F32:
    u = unit(format, k)
    weights, x = example(format, k)
    y = [expect(u, order, w, x) for w in weights]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.concatenate((y[0], y[1] * y[2]), 1)


@pytest.mark.parametrize(("format", "k"), UNITS)
def test_every_schedule_gives_the_bits_of_the_scalar_loop(format: str, k: int) -> None:
    u = unit(format, k)
    weights, x = example(format, k)
    for name in u.kernels:
        want = wanted(format, k, name[0])
        for rows in (1, 2, 3, 4, 5, 7, 13, ROWS):
            got = run(u, name, weights, x[:rows], threads=1 + rows % 3, chunk=1 + rows % 2)
            assert_same_bits(got, want[:rows], f"{name} with {rows} rows")


@pytest.mark.parametrize(("format", "k"), UNITS)
@given(st.data())
@settings(max_examples=10)
def test_a_row_has_the_same_bits_alone_and_among_any_rows(
    format: str, k: int, data: st.DataObject
) -> None:
    u = unit(format, k)
    weights, x = example(format, k)
    picks = data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS))
    name = data.draw(st.sampled_from(u.kernels))
    threads, chunk = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    got = run(u, name, weights, np.ascontiguousarray(x[picks]), threads=threads, chunk=chunk)
    assert_same_bits(got, wanted(format, k, name[0])[picks], f"{name} rows {picks}")


@pytest.mark.parametrize(("format", "k"), UNITS)
def test_nan_and_infinity_stay_in_their_row(format: str, k: int) -> None:
    u = unit(format, k)
    weights, x = example(format, k)
    bad = x.copy()
    bad[2], bad[5, k // 2] = np.nan, np.inf
    keep = [i for i in range(ROWS) if i not in (2, 5)]
    for name in u.kernels:
        got = run(u, name, weights, bad)
        assert np.isnan(got[2]).all(), name
        assert_same_bits(got[keep], wanted(format, k, name[0])[keep], name)


@pytest.mark.parametrize(("format", "k"), UNITS)
def test_no_rows_touch_nothing(format: str, k: int) -> None:
    u = unit(format, k)
    weights, x = example(format, k)
    for name in u.kernels:
        assert run(u, name, weights, x[:0]).shape == (0, N0 + N1)


@pytest.mark.parametrize(("format", "k"), UNITS)
def test_row_lookup_reads_what_the_contraction_multiplies_with(format: str, k: int) -> None:
    u = unit(format, k)
    weight = example(format, k)[0][1]
    out = np.empty(k, np.float32)
    look_up = getattr(u.library, f"row_{format}")
    for n in range(N1):
        look_up(pointer(weight.packed), int64(n), int64(k), pointer(out))
        np.testing.assert_array_equal(out, weight.w[n])


@pytest.mark.parametrize("order", ["dequantise", "factored"])
@pytest.mark.parametrize(("format", "k"), UNITS[4:])
def test_both_orders_are_as_accurate_as_fp32(format: str, k: int, order: str) -> None:
    u = unit(format, k)
    rng = np.random.default_rng(3)
    weight = random_weight(rng, format, N0, k)
    x = rng.standard_normal((ROWS, k)).astype(np.float32)
    got = expect(u, {"dequantise": "a", "factored": "c"}[order], weight, x)
    exact = x.astype(np.float64) @ weight.w.T.astype(np.float64)
    scale = np.abs(x).astype(np.float64) @ np.abs(weight.w).T.astype(np.float64)
    if weight.d is not None and weight.m is not None:
        spread = np.repeat(np.abs(weight.d) * 15 + np.abs(weight.m), 32, 1).astype(np.float64)
        scale = np.abs(x).astype(np.float64) @ spread.T
    assert (np.abs(got - exact) <= 2e-6 * scale + 1e-30).all()


@pytest.mark.parametrize(("format", "k"), [("q4_1", 96), ("q8_0", 96), ("fp8", 96), ("fp4", 96)])
def test_neon_gives_the_bits_of_avx2(format: str, k: int, tmp_path: Path) -> None:
    kernels = ("a_s3", "b_g3", "d_s3", "c_g3")
    weights, x = example(format, k)
    outputs = run_on_arm(tmp_path, format, k, kernels, weights, x)
    for name, output in zip(kernels, outputs, strict=True):
        assert_same_bits(output, wanted(format, k, name[0]), name)


@pytest.mark.parametrize(
    ("march", "format"),
    [("-march=x86-64-v4", "q8_0"), ("-march=x86-64-v4", "fp4"), ("-march=cooperlake", "fp8")],
)
def test_avx512_compiles(march: str, format: str, tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    # GCC 12 warns of a variable in its own AVX-512 header.
    flags = ("-c", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
    text = source(format, 96, ("a_s3", "c_g3"))
    build(tmp_path, ("g++", march), text, flags, tmp_path / "unit.o")
