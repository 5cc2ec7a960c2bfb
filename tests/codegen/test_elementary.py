"""Accuracy and special values of our own functions, and equal bits in C++ and in numpy."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewright.codegen.elementary import DEFINITIONS, MATH_VERSION, evaluate
from tilewright.codegen.elementary_numpy import fma
from tilewright.codegen.expr import prelude
from tilewright.graph.errors import LowerError

Floats = NDArray[np.float32]
INF = float("inf")
SPECIAL = np.array(
    [0.0, -0.0, INF, -INF, math.nan, -math.nan, 1e-45, -1e-45, 2e-42, 1.1754942e-38, 1.17549435e-38]
    + [3.4028235e38, -3.4028235e38, 1.0, -1.0, 0.5, 0.55, 2.0, 4.0, -4.0, 10.0, 65504.0, 65519.996]
    + [65520.0, 65536.0, 6e-8, 2.98e-8, 2.9802322e-8, 6.1e-5, 6.0975552e-5, 88.72283, 88.72284]
    + [-87.33654, -87.4, -103.27893, -103.97207, -103.97208, -104.0, 89.0, 200.0, -200.0]
    + [2147483520.0, 2147483648.0, -2147483648.0, -2147483904.0, 0.70710677, 0.70710683, 1.4142135]
    + [1e6, -1e6, 4194303.8, 4194304.0, 1.5707964, 3.1415927, 996607.0, 417884.0, 1e30],
    np.float32,
)


def inputs(count: int, seed: int = 1) -> Floats:
    """Return special values, random bit patterns, and values where the functions vary."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    parts = [SPECIAL, patterns]
    parts += [(rng.standard_normal(count) * s).astype(np.float32) for s in (0.3, 1, 30, 3e5)]
    return np.concatenate(parts).astype(np.float32)


def same_bits(a: NDArray[np.generic], b: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Compare bits; any NaN equals any other, since their payloads differ between machines."""
    word = np.dtype(f"u{a.dtype.itemsize}")
    equal: NDArray[np.bool_] = a.view(word) == b.view(word)
    if a.dtype == np.float32:
        equal = equal | (np.isnan(a) & np.isnan(b))
    return equal


def ulp_error(got: NDArray[np.generic], want: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return |got - want| in units of the last fp32 place of `want` (2^-149 among subnormals)."""
    _, exponent = np.frexp(want)
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 24)
    return np.abs(got.astype(np.float64) - want) / unit


def exact(name: str, x: Floats) -> NDArray[np.float64]:
    """Return the function in fp64."""
    wide = x.astype(np.float64)
    if name == "erf":
        return np.asarray(torch.special.erf(torch.from_numpy(wide)).numpy())
    if name == "sigmoid":
        e = np.exp(-np.abs(wide))
        return np.where(wide < 0, e, 1.0) / (1.0 + e)
    return np.asarray(getattr(np, name)(wide))


# Function, samples' range, allowed ulps: at or just above the largest error over all fp32 inputs.
ACCURACY = [
    ("exp", -103.9, 88.72, 1.0),
    ("exp", -1.0, 1.0, 1.0),
    ("log", 1e-45, 3.4e38, 1.0),
    ("log", 0.5, 2.0, 1.0),
    ("log1p", 0.0, 1.0, 2.4),
    ("log1p", -0.99, 3.0, 2.4),
    ("log1p", 1e-45, 3.4e38, 2.4),
    ("tanh", -10.0, 10.0, 1.5),
    ("tanh", -0.6, 0.6, 1.5),
    ("erf", -4.0, 4.0, 1.1),
    ("sigmoid", -103.0, 20.0, 1.6),
    ("sigmoid", -6.0, 6.0, 1.6),
    ("sin", -10.0, 10.0, 1.0),
    ("sin", -1e6, 1e6, 1.0),
    ("cos", -10.0, 10.0, 1.0),
    ("cos", -1e6, 1e6, 1.0),
    ("sin", -4194303.0, 4194303.0, 1.02),
    ("cos", -4194303.0, 4194303.0, 1.0),
]


@pytest.mark.parametrize(("name", "low", "high", "limit"), ACCURACY)
def test_error_in_ulps(name: str, low: float, high: float, limit: float) -> None:
    rng = np.random.default_rng(7)
    x = rng.uniform(low, high, 150_000).astype(np.float32)
    if name.startswith("log") and high > 3.0:  # even over exponents, subnormals included
        x = rng.integers(1, 0x7F7FFFFF, 150_000, dtype=np.uint32).view(np.float32)
    got = evaluate(name, x)
    assert ulp_error(got, exact(name, x)).max() <= limit


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_trigonometry_next_to_multiples_of_half_pi(name: str) -> None:
    multiples = np.arange(1, 630_000, dtype=np.float64) * (np.pi / 2)
    x = multiples.astype(np.float32)
    got, want = evaluate(name, x), exact(name, x)
    # fp64 sine of an fp32 argument keeps at least 2^-50 absolute, far below these results.
    assert ulp_error(got, want).max() <= 1.0


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "sin", "erf"])
def test_tiny_and_subnormal_inputs(name: str) -> None:
    bits = np.random.default_rng(3).integers(1, 0x0C000000, 20_000, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    assert ulp_error(evaluate(name, x), exact(name, x)).max() <= 1.0


SPECIAL_VALUES = [
    ("exp", [0.0, -0.0, INF, -INF, 88.72284, -103.9, -103.98], [1, 1, INF, 0, INF, 1e-45, 0]),
    ("log", [0.0, -0.0, 1.0, INF, -1.0, -INF, -1e-45], [-INF, -INF, 0, INF] + [math.nan] * 3),
    ("log1p", [0.0, -0.0, -1.0, INF, -2.0, 1e-45, -1e-40], [0, -0.0, -INF, INF, math.nan, 1e-45,
                                                            -1e-40]),
    ("tanh", [0.0, -0.0, INF, -INF, 1e-45, -1e-45, 9.1], [0, -0.0, 1, -1, 1e-45, -1e-45, 1]),
    ("erf", [0.0, -0.0, INF, -INF, 1e-44, -1e-44, -4.0], [0, -0.0, 1, -1, 1.1e-44, -1.1e-44, -1]),
    ("sigmoid", [0.0, -0.0, INF, -INF, 20.0, -103.9], [0.5, 0.5, 1, 0, 1, 1e-45]),
    ("sin", [0.0, -0.0, 1e-45, -1e-45, INF, 2.0**22], [0, -0.0, 1e-45, -1e-45] + [math.nan] * 2),
    ("cos", [0.0, -0.0, 1e-45, -1e-45, INF, 2.0**22], [1, 1, 1, 1] + [math.nan] * 2),
    ("round_i32", [2.5, -2.5, 3e9, -3e9, math.nan, INF], [2, -2, 2.0**31, -(2.0**31), 0, 2.0**31]),
]


@pytest.mark.parametrize(("name", "x", "want"), SPECIAL_VALUES)
def test_special_values(name: str, x: list[float], want: list[float]) -> None:
    got = evaluate(name, np.array(x, np.float32))
    if name == "erf":  # 2/sqrt(pi) times a subnormal
        assert ulp_error(got, np.array(want)).max() <= 1.0
    else:
        assert same_bits(got, np.array(want, np.float32)).all(), got


def test_every_function_keeps_nan() -> None:
    nan = np.array([math.nan, -math.nan], np.float32)
    functions = ("exp", "log", "log1p", "tanh", "erf", "sin", "cos", "sigmoid")
    for name in (*functions, "round_bf16", "round_f16"):
        assert np.isnan(evaluate(name, nan)).all(), name


def test_extremes_follow_ieee_2019() -> None:
    a, b = (g.ravel() for g in np.meshgrid(SPECIAL, SPECIAL))
    got = {n: evaluate(n, np.ascontiguousarray(a), np.ascontiguousarray(b)) for n in ("min", "max")}
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if math.isnan(x) or math.isnan(y):
            assert math.isnan(got["min"][i]) and math.isnan(got["max"][i])
            continue
        small, large = sorted((x, y), key=lambda v: (v, math.copysign(1, v)))
        assert str(got["min"][i]) == str(small) and str(got["max"][i]) == str(large), (x, y)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("exp", -104, 88), ("log", 1e-3, 1e3), ("tanh", -10, 10), ("erf", -4, 4), ("sigmoid", -90, 9)],
)
def test_monotone_on_a_grid(name: str, low: float, high: float) -> None:
    y = evaluate(name, np.linspace(low, high, 100_001).astype(np.float32)).astype(np.float64)
    assert (np.diff(y) >= 0).all()


def test_symmetries() -> None:
    x = inputs(20_000)
    for name in ("tanh", "erf", "sin"):
        assert same_bits(evaluate(name, -x), -evaluate(name, x)).all(), name
    assert same_bits(evaluate("cos", -x), evaluate("cos", x)).all()


@pytest.mark.parametrize(
    ("wide", "narrow", "dtype"),
    [("bf16_to_f32", "f32_to_bf16", torch.bfloat16), ("f16_to_f32", "f32_to_f16", torch.float16)],
)
class TestSixteenBitFormats:
    def test_every_pattern(self, wide: str, narrow: str, dtype: torch.dtype) -> None:
        patterns = np.arange(65536, dtype=np.uint16)
        got = evaluate(wide, patterns)
        want = torch.from_numpy(patterns).view(dtype).float().numpy()
        assert same_bits(got, want).all()
        number = ~np.isnan(want)
        assert (evaluate(narrow, got)[number] == patterns[number]).all()

    def test_rounding_equals_torch(self, wide: str, narrow: str, dtype: torch.dtype) -> None:
        values = evaluate(wide, np.arange(65536, dtype=np.uint16))
        bits = values.view(np.uint32).astype(np.int64)
        # Each representable value, and around the ties half a place above it.
        half = {torch.bfloat16: 0x8000, torch.float16: 0x1000}[dtype]
        near = [(bits + d).astype(np.uint32) for d in (-1, 0, 1, half - 1, half, half + 1)]
        x = np.concatenate([*(n.view(np.float32) for n in near), inputs(100_000)])
        want = torch.from_numpy(x).to(dtype)
        number = ~np.isnan(x)
        stored = want.view(torch.uint16).numpy()
        assert (evaluate(narrow, x)[number] == stored[number]).all()
        rounded = evaluate("round_" + narrow.removeprefix("f32_to_"), x)
        assert same_bits(rounded, want.float().numpy()).all()


@given(*[st.integers(0, (1 << 32) - 1)] * 3)
def test_fma_is_exact(a: int, b: int, c: int) -> None:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fmaf.restype, library.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    x, y, z = (np.array([v], np.uint32).view(np.float32) for v in (a, b, c))
    # The same addend near minus the product, where rounding twice would show.
    with np.errstate(all="ignore"):
        for addend in (z, -(x * y), np.nextafter(-(x * y), z)):
            want = library.fmaf(float(x[0]), float(y[0]), float(addend[0]))
            assert same_bits(fma(x, y, addend), np.array([want], np.float32)).all()


def test_version_is_pinned() -> None:
    # A change here is a change of results on every target: artifacts built before no longer match.
    assert MATH_VERSION == "0049241cf684d24b"


def test_unknown_function_lists_the_known_ones() -> None:
    with pytest.raises(LowerError) as caught:
        evaluate("expm1", np.zeros(1, np.float32))
    assert str(caught.value) == f"function 'expm1': unknown: have {', '.join(DEFINITIONS)}"


def test_wrong_operands_are_refused() -> None:
    with pytest.raises(LowerError) as caught:
        evaluate("max", np.zeros(1, np.float64))
    assert str(caught.value) == (
        "function 'max': operands differ from its parameters:"
        " got (float64), want (float32, float32)"
    )


C_TYPES = {"f32": "float", "i32": "int32_t", "u16": "uint16_t"}
NUMPY_TYPES = {"f32": np.float32, "i32": np.int32, "u16": np.uint16}


def program() -> str:
    """Return C++ that reads floats from one file and writes all functions of them to another."""
    lines = ["#include <cstdio>", "#include <vector>", prelude("cpp"), "int main(int, char** v) {"]
    lines += ["std::vector<float> x(1 << 20); FILE* in = fopen(v[1], \"rb\");"]
    lines += ["const size_t n = fread(x.data(), 4, x.size(), in); FILE* out = fopen(v[2], \"wb\");"]
    for name, d in DEFINITIONS.items():
        operands = "(uint16_t)i" if d.params[0][1] == "u16" else "x[i]"
        operands += ", x[n - 1 - i]" if len(d.params) == 2 else ""
        lines += [f"{{ std::vector<{C_TYPES[d.returns]}> y(n);"]
        lines += [f"for (size_t i = 0; i < n; ++i) y[i] = tw_{name}({operands});"]
        lines += ["fwrite(y.data(), sizeof y[0], n, out); }"]
    return "\n".join([*lines, "return fclose(out); }"])


X86 = ("g++", "-march=x86-64-v3")
BUILDS = {
    "O3": (*X86, "-O3", "-fno-math-errno", "-fno-trapping-math"),
    "O2-without-flags": (*X86, "-O2"),
    "O0": (*X86, "-O0"),
    "aarch64": ("aarch64-linux-gnu-g++", "-O3", "-static", "-fno-trapping-math"),
}


@pytest.mark.cpu
@pytest.mark.parametrize("build", BUILDS)
def test_cpp_gives_the_bits_of_the_definition(build: str, tmp_path: Path) -> None:
    compiler, *flags = BUILDS[build]
    runner = ["qemu-aarch64"] if build == "aarch64" else []
    for tool in (compiler, *runner):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    x = inputs(14_000)
    x.tofile(tmp_path / "x")
    (tmp_path / "all.cpp").write_text(program())
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", *flags]
    subprocess.run([*command, "all.cpp", "-o", "all"], cwd=tmp_path, check=True)
    subprocess.run([*runner, "./all", "x", "y"], cwd=tmp_path, check=True)
    got = (tmp_path / "y").read_bytes()
    index = np.arange(len(x)).astype(np.uint16)
    for name, d in DEFINITIONS.items():
        first = index if d.params[0][1] == "u16" else x
        arrays = [first, np.ascontiguousarray(x[::-1])][: len(d.params)]
        want = evaluate(name, *arrays)
        mine, got = got[: want.nbytes], got[want.nbytes :]
        equal = same_bits(np.frombuffer(mine, NUMPY_TYPES[d.returns]), want)
        assert equal.all(), (name, first[~equal][:4])
    assert not got
