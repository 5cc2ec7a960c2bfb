"""Printing scalar expressions: exact text, messages, and bits equal to the numpy meaning."""

from __future__ import annotations

import math
import random
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.codegen.expr import LANGUAGES, evaluate_scalar, prelude, print_scalar
from tilewright.graph import scalar as s
from tilewright.graph.errors import LowerError

NAMES = {"x": "a[i]", "y": "b[i]", "z": "c[i]"}
X, Y, Z = (s.Var(n) for n in NAMES)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (s.add(s.mul(X, Y), 1.0), "(tw_mul(a[i], b[i]) + 0x1p+0f)"),
        (s.sub(X, s.sub(Y, Z)), "(a[i] - (b[i] - c[i]))"),
        (s.call("fma", X, Y, Z), "__builtin_fmaf(a[i], b[i], c[i])"),
        (s.call("neg", s.call("neg", X)), "(-(-a[i]))"),
        (s.sub(X, -0.5), "(a[i] - (-0x1p-1f))"),
        (s.call("max", X, s.call("min", Y, 7.0)), "tw_max(a[i], tw_min(b[i], 0x1.cp+2f))"),
        (s.call("select_lt", X, 0.0, Y, Z), "(a[i] < 0x0p+0f ? b[i] : c[i])"),
        (s.mul(X, s.call("sigmoid", X)), "tw_mul(a[i], tw_sigmoid(a[i]))"),
        (s.call("round_bf16", s.div(X, Y)), "tw_round_bf16((a[i] / b[i]))"),
        (s.call("sqrt", s.call("abs", X)), "__builtin_sqrtf(__builtin_fabsf(a[i]))"),
        (s.Const(0.1), "0x1.99999ap-4f"),
        (s.Const(-0.0), "(-0x0p+0f)"),
        (s.Const(1e-45), "0x1p-149f"),
        (s.Const(math.inf), "__builtin_inff()"),
        (s.Const(-math.inf), "(-__builtin_inff())"),
        (s.Const(math.nan), '__builtin_nanf("")'),
    ],
)
def test_cpp_text(expr: s.Scalar, text: str) -> None:
    assert print_scalar(expr, NAMES, "cpp") == text


def test_unknown_language_lists_the_known_ones() -> None:
    for attempt in (lambda: print_scalar(X, NAMES, "fortran"), lambda: prelude("fortran")):
        with pytest.raises(LowerError) as caught:
            attempt()
        known = ", ".join(LANGUAGES)
        assert str(caught.value) == f"language 'fortran': unknown: have {known}"


def test_variable_without_a_name() -> None:
    with pytest.raises(LowerError) as caught:
        print_scalar(s.add(X, s.Var("w")), NAMES, "cpp")
    assert str(caught.value) == "variable 'w': has no name in the source: have x, y, z"


def test_literal_too_large() -> None:
    with pytest.raises(LowerError) as caught:
        print_scalar(s.Const(1e39), NAMES, "cpp")
    assert str(caught.value) == (
        "literal '1e+39': too large for fp32: got 1e+39, want at most 3.4028235e+38"
    )


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_literals_are_exact(value: float) -> None:
    text = print_scalar(s.Const(value), {}, "cpp").strip("()").removesuffix("f")
    assert struct.pack("<f", float.fromhex(text)) == struct.pack("<f", value)


def test_prelude_defines_every_function_and_is_stable() -> None:
    text = prelude("cpp")
    assert text == prelude("cpp")
    exact_calls = ("min", "max")
    for name in s.FUNCTIONS + s.ROUNDINGS + exact_calls:
        assert f" float tw_{name}(float " in text, name
    for signature in (
        "float tw_bf16_to_f32(uint16_t ",
        "uint16_t tw_f32_to_bf16(float ",
        "float tw_f16_to_f32(uint16_t ",
        "uint16_t tw_f32_to_f16(float ",
        "int32_t tw_f32_to_i32(float ",
    ):
        assert signature in text


def random_tree(rng: random.Random, depth: int) -> s.Scalar:
    """Return an expression that uses the whole vocabulary."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice([X, Y, Z, s.Const(rng.uniform(-3, 3)), s.Const(-0.0), s.Const(math.inf)])
    fn = rng.choice(s.EXACT + s.FUNCTIONS + s.ROUNDINGS)
    return s.call(fn, *(random_tree(rng, depth - 1) for _ in range(s.ARITY.get(fn, 1))))


@pytest.mark.cpu
def test_printed_trees_give_the_bits_of_the_numpy_meaning(tmp_path: Path) -> None:
    rng = random.Random(5)
    trees = [s.call(fn, *(X, Y, Z, X)[: s.ARITY.get(fn, 1)]) for fn in s.EXACT]
    trees += [random_tree(rng, 3) for _ in range(30)]
    count = 1003
    values = np.random.default_rng(2).standard_normal((3, count)).astype(np.float32) * 3
    values[:, :7] = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 1e30], np.float32)
    values[1, :7] = values[0, 6::-1]
    values.tofile(tmp_path / "v")
    lines = ["#include <cstdio>", prelude("cpp"), f"static float v[3][{count}], r[{count}];"]
    lines += ["int main() {", "const float *a = v[0], *b = v[1], *c = v[2];"]
    lines += ['FILE* in = fopen("v", "rb"); if (!fread(v, sizeof v, 1, in)) return 1;']
    lines += ['FILE* out = fopen("r", "wb"); (void)a; (void)b; (void)c;']
    for tree in trees:
        lines += [f"for (int i = 0; i < {count}; ++i) r[i] = {print_scalar(tree, NAMES, 'cpp')};"]
        lines += ["fwrite(r, sizeof r, 1, out);"]
    (tmp_path / "t.cpp").write_text("\n".join([*lines, "return fclose(out); }"]))
    flags = "-std=c++17 -O2 -march=x86-64-v3 -ffp-contract=off -fno-math-errno -fno-trapping-math"
    subprocess.run(["g++", *flags.split(), "t.cpp", "-o", "t"], cwd=tmp_path, check=True)
    subprocess.run(["./t"], cwd=tmp_path, check=True)
    got = np.fromfile(tmp_path / "r", np.uint32).reshape(len(trees), count)
    for tree, row in zip(trees, got, strict=True):
        want = evaluate_scalar(tree, dict(zip("xyz", values, strict=True)))
        both_nan = np.isnan(want) & np.isnan(row.view(np.float32))
        assert ((row == want.view(np.uint32)) | both_nan).all(), print_scalar(tree, NAMES, "cpp")
