"""argmax and top-k of the CPU kernels against the meaning of the ops."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.cpu_flags import WARNINGS, instruction_flags
from tilewright.graph.ops import op_def

TEMPLATES = Path(__file__).parents[2] / "templates" / "cpp"
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

SOURCE = """
#include "tw_select.h"
extern "C" int32_t argmax_row(const float* x, int64_t n) { return tw_argmax_row(x, n); }
extern "C" int32_t argmax_parts(const float* x, int64_t n, int64_t part) {
  tw_best best = tw_argmax_range(x, 0, part < n ? part : n);
  for (int64_t i = part; i < n; i += part)
    best = tw_argmax_join(best, tw_argmax_range(x, i, i + part < n ? i + part : n));
  return tw_argmax_index(best);
}
extern "C" int64_t top_k_bytes(int64_t k) { return tw_top_k_bytes(k); }
extern "C" void top_k_row(const float* x, int64_t n, int64_t k, int32_t* indices, float* values,
                          void* scratch) {
  tw_top_k_row(x, n, k, indices, values, scratch);
}
extern "C" void top_k_join(const float* list, const int32_t* positions, int64_t n, int64_t k,
                           int32_t* indices, float* values, void* scratch) {
  tw_top_k_join(list, positions, n, k, indices, values, scratch);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions under test."""
    folder = tmp_path_factory.mktemp("select")
    (folder / "select.cpp").write_text(SOURCE)
    flags = [*"-std=c++17 -O3 -ffp-contract=off -shared -fPIC".split(), *WARNINGS]
    paths = [f"-I{TEMPLATES}", str(folder / "select.cpp"), "-o", str(folder / "select.so")]
    subprocess.run(["g++", *flags, *instruction_flags(), *paths], check=True)
    loaded = ctypes.CDLL(str(folder / "select.so"))
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.argmax_row.argtypes = [pointer, i64]
    loaded.argmax_parts.argtypes = [pointer, i64, i64]
    loaded.top_k_bytes.argtypes, loaded.top_k_bytes.restype = [i64], i64
    loaded.top_k_row.argtypes = [pointer, i64, i64, pointer, pointer, pointer]
    loaded.top_k_join.argtypes = [pointer, pointer, i64, i64, pointer, pointer, pointer]
    return loaded


def argmax(library: ctypes.CDLL, x: F32) -> int:
    return int(library.argmax_row(x.ctypes.data, len(x)))


def top_k(library: ctypes.CDLL, x: F32, k: int, positions: I32 | None = None) -> tuple[I32, F32]:
    """Top k of a row, or of lists with positions; outputs and scratch are poisoned and guarded."""
    size = library.top_k_bytes(k)
    scratch = np.full(size + 64, 0xA5, np.uint8)
    indices, values = np.full(k, -7, np.int32), np.full(k, np.nan, np.float32)
    out = (len(x), k, indices.ctypes.data, values.ctypes.data, scratch.ctypes.data)
    if positions is None:
        library.top_k_row(x.ctypes.data, *out)
    else:
        library.top_k_join(x.ctypes.data, positions.ctypes.data, *out)
    assert (scratch[size:] == 0xA5).all()
    return indices, values


def expected(name: str, x: F32, **attrs: int) -> NDArray[np.generic]:
    return np.asarray(op_def(name).reference([torch.from_numpy(x)], attrs))


def rows() -> st.SearchStrategy[F32]:
    """Rows with many ties, both zeros, infinities and, in some, NaN."""
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 3e38, -1e-45]
    return st.builds(
        lambda n, kind, nans, seed: _row(n, kind, nans, seed, special),
        st.integers(1, 6000),
        st.sampled_from(["normal", "few", "special", "ascending", "descending", "equal"]),
        st.sampled_from([0, 0, 1, 40]),
        st.integers(0, 1 << 20),
    )


def _row(n: int, kind: str, nans: int, seed: int, special: list[float]) -> F32:
    rng = np.random.default_rng(seed)
    x = {
        "normal": rng.standard_normal(n),
        "few": rng.integers(-3, 3, n),
        "special": rng.choice(special, n),
        "ascending": np.arange(n),
        "descending": -np.arange(n),
        "equal": np.full(n, -np.inf),
    }[kind].astype(np.float32)
    x[rng.integers(0, n, nans)] = np.nan
    return x


@settings(max_examples=150, deadline=None)
@given(x=rows(), part=st.integers(1, 3000))
def test_argmax(library: ctypes.CDLL, x: F32, part: int) -> None:
    want = int(expected("argmax", x))
    assert argmax(library, x) == want
    assert library.argmax_parts(x.ctypes.data, len(x), part) == want


@settings(max_examples=150, deadline=None)
@given(x=rows(), data=st.data())
def test_top_k(library: ctypes.CDLL, x: F32, data: st.DataObject) -> None:
    k = data.draw(st.one_of(st.integers(1, min(40, len(x))), st.integers(1, len(x))))
    indices, values = top_k(library, x, k)
    assert indices.tolist() == expected("top_k_indices", x, k=k).tolist()
    assert values.view(np.uint32).tolist() == x[indices].view(np.uint32).tolist()


@settings(max_examples=60, deadline=None)
@given(x=rows(), k=st.integers(1, 200), parts=st.integers(1, 7))
def test_top_k_of_parts_joins_to_the_top_k(
    library: ctypes.CDLL, x: F32, k: int, parts: int
) -> None:
    k = min(k, len(x))
    bounds = np.linspace(0, len(x), parts + 1).astype(int)
    lists, positions = [], []
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        part = np.ascontiguousarray(x[begin:end])
        found, values = top_k(library, part, min(k, end - begin))
        lists.append(values)
        positions.append((found + begin).astype(np.int32))
    joined = top_k(library, np.concatenate(lists), k, np.concatenate(positions))
    whole = top_k(library, x, k)
    assert joined[0].tolist() == whole[0].tolist()
    assert joined[1].view(np.uint32).tolist() == whole[1].view(np.uint32).tolist()


@pytest.mark.parametrize("order", (-1, 1))
def test_a_million_entries(library: ctypes.CDLL, order: int) -> None:
    x = np.arange(1_000_000, dtype=np.float32)[::order].copy()
    indices, _ = top_k(library, x, 4096)
    best = np.arange(4096) if order < 0 else 999_999 - np.arange(4096)
    assert indices.tolist() == best.tolist()
    assert argmax(library, x) == best[0]
