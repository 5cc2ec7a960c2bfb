"""Contraction kernels of the CPU target: every schedule, form, row count and thread count gives the
bits of a scalar loop, for every weight format and order of evaluation."""

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray

from tilewright.codegen.pack_cpu import FORMATS, pack_panels, unpack_panels

pytestmark = pytest.mark.cpu
SOURCES = Path(__file__).parents[2] / "templates" / "cpp"
X86 = ("g++", "-march=x86-64-v3")
ARM = ("aarch64-linux-gnu-g++", "-march=armv8.2-a")
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
F32 = NDArray[np.float32]

PREAMBLE = r"""
#include <pthread.h>
#include <stdint.h>
typedef void (*tw_body)(void* arg, int64_t begin, int64_t end, int thread_id);
static int num_threads = 1;
static int64_t chunk = 1;
static int tw_num_threads() { return num_threads; }
struct Share { int64_t num_items; tw_body body; void* arg; int thread_id; };
// Thread t takes every num_threads-th chunk of items, the last first.
static void* work(void* arg) {
  const Share& s = *(const Share*)arg;
  for (int64_t c = (s.num_items - 1) / chunk; c >= 0; --c) {
    const int64_t begin = c * chunk, end = begin + chunk;
    if (c % num_threads == s.thread_id)
      s.body(s.arg, begin, end < s.num_items ? end : s.num_items, s.thread_id);
  }
  return nullptr;
}
static void tw_parallel(int64_t num_items, tw_body body, void* arg) {
  Share shares[8];
  pthread_t threads[8];
  for (int t = 0; t < num_threads; ++t) shares[t] = {num_items, body, arg, t};
  for (int t = 1; t < num_threads; ++t) pthread_create(&threads[t], nullptr, work, &shares[t]);
  work(&shares[0]);
  for (int t = 1; t < num_threads; ++t) pthread_join(threads[t], nullptr);
}
"""

# y of section 0 (one weight), and the product of the two weights' results of section 1
ARGS = "  const float* x; const uint8_t* w[3]; float* y; float* z;"
PROLOGUE = """static inline void prologue(const Args& args, int64_t row, float* a) {{
  for (int64_t i = 0; i < {k}; ++i) a[i] = args.x[row * {k} + i];
}}"""
INPUT_ROW = """static inline const float* input_row(const Args& args, int64_t row) {{
  return args.x + row * {k};
}}"""
STORE = "    for (int64_t i = 0; i < width; ++i) args.y[row * N + col + i] = acc[0][i];"
MULTIPLY = """    for (int64_t i = 0; i < width; ++i) {
      args.z[row * N + col + i] = acc[0][i] * acc[1][i];
    }"""
ENTRY = """extern "C" int64_t {name}_bytes(int64_t rows) {{
  return {name}::workspace_bytes(rows, num_threads);
}}
extern "C" void {name}_run(const {name}::Args* args, int64_t rows, uint8_t* workspace) {{
  {name}::run(*args, rows, workspace);
}}
"""

# The living definition of the two orders; w, q, d, m as in tw_contract_formats.h.
REFERENCE = r"""
extern "C" void set_threads(int threads, int64_t items) { num_threads = threads; chunk = items; }
extern "C" void row_FORMAT(const uint8_t* packed, int64_t n, int64_t k, float* out) {
  tw_row_FORMAT(packed, n, k, out);
}
extern "C" void reference(const float* a, const float* w, const float* d, const float* m,
                          const float* prescale, int64_t n, int64_t k, int64_t group,
                          int64_t segments, int factored, float* y) {
  for (int64_t col = 0; col < n; ++col) {
    float total = 0.0f;
    for (int64_t s = 0; s < segments; ++s) {
      float acc = 0.0f;
      const int64_t begin = s * (k / segments), end = begin + k / segments;
      for (int64_t i = begin; i < end; i += factored ? group : 1) {
        if (!factored) { acc = __builtin_fmaf(a[i], w[col * k + i], acc); continue; }
        float part = 0.0f, sum = 0.0f;
        for (int64_t j = i; j < i + group; ++j) {
          part = __builtin_fmaf(a[j] * prescale[j - i], w[col * k + j] / prescale[j - i], part);
          sum = sum + a[j];
        }
        acc = __builtin_fmaf(d[col * (k / group) + i / group], part, acc);
        if (m) acc = __builtin_fmaf(m[col * (k / group) + i / group], sum, acc);
      }
      total = s == 0 ? acc : total + acc;
    }
    y[col] = total;
  }
}
"""


def schedule(form: str, **fields: object) -> dict[str, object]:
    """One schedule; what is not named has the plainest value."""
    plain = {
        "max_rows": None, "form": form, "row_tile": 1, "panel_tile": 1, "panels_per_item": 1,
        "row_block": 32, "k_block": 32, "prefetch": 0, "rows": "inline", "split": "rows",
        "few_rows": 0,
    }  # fmt: skip
    return plain | fields


SCHEDULES = {
    "s1": schedule("stream", panel_tile=4, panels_per_item=5),
    "s2": schedule("stream", row_tile=2, panel_tile=2, panels_per_item=4, split="panels"),
    "s3": schedule("stream", row_tile=3, panels_per_item=2, prefetch=2048),
    "s4": schedule("stream", row_tile=4, panels_per_item=2, row_block=4, rows="phase"),
    "s6": schedule("stream", row_tile=6, rows="direct", prefetch=64, row_block=7),
    "g1": schedule("slab", panels_per_item=3),
    "g2": schedule("slab", row_tile=2, panel_tile=2, panels_per_item=2, k_block=64, rows="direct"),
    "g3": schedule("slab", row_tile=3, panel_tile=2, rows="phase", row_block=5, split="panels"),
    "g4": schedule("slab", row_tile=4, k_block=128, row_block=8),
    "g6": schedule("slab", row_tile=6, rows="phase", k_block=96, row_block=12),
}
ORDERS = {
    "a": ("dequantise", 1), "b": ("dequantise", 3), "c": ("factored", 1), "d": ("factored", 3),
}  # fmt: skip
FULL = {("q4_1", 96): tuple(SCHEDULES), ("bf16", 33): ("s2", "s6", "g2", "g4")}
SOME = ("s3", "g3")  # what the other units, orders and instruction sets are compiled with
N0, N1 = 17, 47


@dataclass(frozen=True)
class Unit:
    """One translation unit: a format, a row length, and the kernels compiled for it."""

    format: str
    k: int
    kernels: tuple[str, ...]  # <order>_<schedule>
    library: ctypes.CDLL


def kernel_names(format: str, k: int) -> tuple[str, ...]:
    """Kernels of a unit: all orders it allows, the schedules of FULL for the first."""
    orders = "abcd" if FORMATS[format].words else "ab" if k % 3 == 0 else "a"
    first = tuple(f"a_{s}" for s in FULL.get((format, k), SOME))
    return first + tuple(f"{o}_{s}" for o in orders[1:] for s in SOME)


def source(format: str, k: int, kernels: tuple[str, ...]) -> str:
    """The text of a unit: the reference loop and the kernels named."""
    environment = Environment(
        loader=FileSystemLoader(SOURCES), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    template = environment.get_template("contract.cpp.j2")
    weights = [{"format": format, "pointer": f"args.w[{i}]"} for i in range(3)]
    text = PREAMBLE
    for name in kernels:
        order, segments = ORDERS[name[0]]
        text += template.render(
            name=name, k=k, order=order, segments=segments, args=ARGS, routing=None,
            prologue=PROLOGUE.format(k=k), input_row=INPUT_ROW.format(k=k),
            sections=[
                {"n": N0, "weights": weights[:1], "epilogue": STORE},
                {"n": N1, "weights": weights[1:], "epilogue": MULTIPLY},
            ],
            schedules=[SCHEDULES[name[2:]]], entry=ENTRY.format(name=name),
        )  # fmt: skip
    return text + REFERENCE.replace("FORMAT", format)



UNITS = [("f32", 33), ("f32", 1), ("f16", 7), ("bf16", 33)]
UNITS += [("q4_1", 96), ("q8_0", 96), ("q8s16", 48), ("fp8", 96), ("fp4", 96)]
ROWS = 20


@cache
def unit(format: str, k: int) -> Unit:
    """Compile a unit once per test session; skip without the compiler."""
    if not shutil.which(X86[0]) or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs g++ and an x86-64-v3 processor")
    folder = Path(tempfile.mkdtemp(prefix="contract-"))
    names = kernel_names(format, k)
    text = source(format, k, names)
    build(folder, X86, text, ("-shared", "-fPIC", "-pthread"), folder / "unit.so")
    library = ctypes.CDLL(str(folder / "unit.so"))
    for name in names:
        getattr(library, f"{name}_bytes").restype = ctypes.c_int64
    return Unit(format, k, names, library)


def build(
    folder: Path, compiler: tuple[str, ...], text: str, flags: tuple[str, ...], out: Path
) -> None:
    path = folder / "unit.cpp"
    path.write_text(text)
    command = [*compiler, *FLAGS, f"-I{SOURCES}", *flags, str(path), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def int64(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


class Args(ctypes.Structure):
    """The `Args` of the compiled kernels."""

    _fields_ = [
        ("x", ctypes.c_void_p), ("w", ctypes.c_void_p * 3), ("y", ctypes.c_void_p),
        ("z", ctypes.c_void_p),
    ]  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A random weight: packed, and what its values are made of (fp32)."""

    packed: NDArray[np.uint8]
    w: F32
    q: F32
    d: F32 | None
    m: F32 | None


def wide(rng: np.random.Generator, shape: tuple[int, ...], exponents: int) -> F32:
    """Normal values times powers of two, with cancelling pairs, both zeros and subnormals."""
    values = rng.standard_normal(shape).astype(np.float32)
    values *= np.exp2(rng.integers(-exponents, exponents + 1, shape)).astype(np.float32)
    flat = values.reshape(-1)
    picks = rng.integers(0, flat.size, (4, max(1, flat.size // 16)))
    flat[picks[0]] = -0.0
    flat[picks[1]] = 0.0
    flat[picks[2]] = np.float32(1e-40)
    flat[picks[3]] = -flat[(picks[3] + 1) % flat.size]
    return values


def random_weight(rng: np.random.Generator, format: str, n: int, k: int) -> Weight:
    """Draw a weight [n, k]; about one group in sixteen has scale 0."""
    layout = FORMATS[format]
    if not layout.words:
        values = wide(rng, (n, k), 20 if format != "f16" else 8)
        packed = pack_panels(format, values=values)
        back = unpack_panels(format, packed, n, k).values
        assert back is not None
        if format == "bf16":
            back = (back.astype(np.uint32) << 16).view(np.float32)
        return Weight(packed, back.astype(np.float32), back.astype(np.float32), None, None)
    if layout.float_codes:
        return random_floats(rng, format, n, k)
    shape = (n, k // layout.group)
    exponents = 8 if layout.scale == "<f2" else 20
    d = wide(rng, shape, exponents).astype(layout.scale)
    if layout.has_min:
        m = wide(rng, shape, exponents).astype(layout.scale)
        codes: NDArray[Any] = rng.integers(0, 16, (n, k), np.uint8)
        packed = pack_panels(format, codes=codes, d=d, m=m)
        low: NDArray[Any] | float = np.repeat(m.astype(np.float64), layout.group, 1)
    else:
        codes = rng.integers(-128, 128, (n, k), np.int8)
        packed = pack_panels(format, codes=codes, d=d)
        m, low = None, 0.0
    exact = np.repeat(d.astype(np.float64), layout.group, 1) * codes + low
    return Weight(
        packed, exact.astype(np.float32), codes.astype(np.float32), d.astype(np.float32),
        None if m is None else m.astype(np.float32),
    )  # fmt: skip


def random_floats(rng: np.random.Generator, format: str, n: int, k: int) -> Weight:
    """Draw codes of fp8 or fp4 with ue8m0 scales: all codes, and scales from 2^-127 on."""
    d = rng.integers(100, 150, (n, k // 32), np.uint8)
    d.reshape(-1)[rng.integers(0, d.size, d.size // 16 + 1)] = 0
    if format == "fp8":
        codes = rng.integers(0, 127, (n, k), np.uint8) | (rng.integers(0, 2, (n, k), np.uint8) << 7)
        q = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        packed = pack_panels(format, codes=codes, d=d)
    else:
        codes = rng.integers(0, 16, (n, k), np.uint8)
        q = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        packed = pack_panels(format, codes=codes[:, ::2] | codes[:, 1::2] << 4, d=d)
    scale = d.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return Weight(packed, q * scale.repeat(32, 1), q, scale, None)


def prescale(format: str) -> F32:
    """Powers of two of the factored order, by k within a group."""
    layout = FORMATS[format]
    if not layout.words:
        return np.ones(1, np.float32)
    if layout.float_codes:
        return np.ones(32, np.float32)  # exact: their powers of two cancel in any place
    subs = layout.group // layout.words
    bits = 4 if layout.has_min else 8
    scale = [2.0 ** (-bits * j) if j < subs - 1 else 1.0 for j in range(subs)]
    return np.repeat(np.array(scale, np.float32), layout.words)


def expect(u: Unit, order: str, weight: Weight, x: F32) -> F32:
    """The scalar loop over rows of x."""
    name, segments = ORDERS[order]
    factored = name == "factored" and weight.d is not None
    values = weight.q if factored else weight.w
    scale = prescale(u.format)
    y = np.empty((len(x), len(values)), np.float32)
    for row in range(len(x)):
        u.library.reference(
            pointer(x[row]), pointer(values), pointer(weight.d) if factored else None,
            pointer(weight.m) if weight.m is not None else None, pointer(scale),
            int64(len(values)), int64(u.k), int64(FORMATS[u.format].group), int64(segments),
            int(factored), pointer(y[row]),
        )  # fmt: skip
    return y


def run(u: Unit, name: str, weights: list[Weight], x: F32, threads: int = 1, chunk: int = 1) -> F32:
    """Run a kernel into outputs and workspace full of NaN: y and z side by side."""
    y = np.full((len(x) + 1, N0), np.nan, np.float32)
    z = np.full((len(x) + 1, N1), np.nan, np.float32)
    u.library.set_threads(threads, int64(chunk))
    size = getattr(u.library, f"{name}_bytes")(int64(len(x)))
    workspace = np.full(size + 128, 255, np.uint8)
    at = -workspace.ctypes.data % 64
    packed = tuple(w.packed.ctypes.data for w in weights)
    args = Args(x.ctypes.data, packed, y.ctypes.data, z.ctypes.data)
    getattr(u.library, f"{name}_run")(
        ctypes.byref(args), int64(len(x)), pointer(workspace[at:])
    )
    assert np.isnan(y[-1]).all() and np.isnan(z[-1]).all(), "wrote past the last row"
    assert (workspace[at + size :] == 255).all(), "wrote past the workspace"
    return np.concatenate((y[:-1], z[:-1]), 1)


def assert_same_bits(got: F32, want: F32, text: str) -> None:
    """Equal bits; any NaN equals any NaN (its payload depends on operand order)."""
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{text}: {np.argwhere(~same)[:4].tolist()}"


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


MAIN = r"""
#include <stdio.h>
#include <stdlib.h>
template <class A>
static void run_all(int64_t (*bytes)(int64_t), void (*run)(const A*, int64_t, uint8_t*),
                    const float* x, uint8_t* const* w) {
  static float y[ROWS * N0], z[ROWS * N1];
  A args = {x, {w[0], w[1], w[2]}, y, z};
  run(&args, ROWS, (uint8_t*)aligned_alloc(64, (bytes(ROWS) + 127) / 64 * 64));
  fwrite(y, 4, ROWS * N0, stdout);
  fwrite(z, 4, ROWS * N1, stdout);
}
int main() {
  const size_t sizes[3] = {SIZES};
  uint8_t* w[3];
  bool good = true;
  for (int i = 0; i < 3; ++i) {
    w[i] = (uint8_t*)aligned_alloc(64, (sizes[i] + 63) / 64 * 64);
    good = good && fread(w[i], 1, sizes[i], stdin) == sizes[i];
  }
  static float x[ROWS * K];
  good = good && fread(x, 4, ROWS * K, stdin) == ROWS * K;
CALLS
  return good ? 0 : 1;
}
"""


def program(format: str, k: int, kernels: tuple[str, ...]) -> str:
    """A unit with a main that runs every kernel on weights and rows from its standard input."""
    weights, _ = example(format, k)
    calls = "\n".join(f"  run_all({n}_bytes, {n}_run, x, w);" for n in kernels)
    text = MAIN.replace("SIZES", ", ".join(str(w.packed.size) for w in weights))
    for name, value in (("ROWS", ROWS), ("N0", N0), ("N1", N1)):
        text = text.replace(name, str(value))
    return source(format, k, kernels) + text.replace("* K", f"* {k}").replace("CALLS", calls)


@pytest.mark.parametrize(("format", "k"), [("q4_1", 96), ("q8_0", 96), ("fp8", 96), ("fp4", 96)])
def test_neon_gives_the_bits_of_avx2(format: str, k: int, tmp_path: Path) -> None:
    if not (shutil.which(ARM[0]) and shutil.which("qemu-aarch64")):
        pytest.skip(f"needs {ARM[0]} and qemu-aarch64")
    kernels = ("a_s3", "b_g3", "d_s3", "c_g3")
    weights, x = example(format, k)
    build(tmp_path, ARM, program(format, k, kernels), ("-static", "-pthread"), tmp_path / "unit")
    given_bytes = b"".join(w.packed.tobytes() for w in weights) + x.tobytes()
    done = subprocess.run(
        ["qemu-aarch64", str(tmp_path / "unit")], input=given_bytes, capture_output=True, check=True
    )
    outputs = np.frombuffer(done.stdout, np.float32).reshape(len(kernels), ROWS * (N0 + N1))
    for name, output in zip(kernels, outputs, strict=True):
        y = output[: ROWS * N0].reshape(ROWS, N0)
        z = output[ROWS * N0 :].reshape(ROWS, N1)
        assert_same_bits(np.concatenate((y, z), 1), wanted(format, k, name[0]), name)


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
