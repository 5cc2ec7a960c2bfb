"""Contraction kernels of the CPU compiled in chosen schedules, and the scalar loop they equal."""

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray

from support.panel_weights import F32, Weight, prescale
from tilewright.codegen.pack_cpu import FORMATS

SOURCES = Path(__file__).parents[2] / "templates" / "cpp"
X86 = ("g++", "-march=x86-64-v3")
ARM = ("aarch64-linux-gnu-g++", "-march=armv8.2-a")
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")

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

# The living definition of the orders; w, q, d, m as in tw_contract_formats.h.
REFERENCE = r"""
extern "C" void set_threads(int threads, int64_t items) { num_threads = threads; chunk = items; }
extern "C" void row_FORMAT(const uint8_t* packed, int64_t n, int64_t k, float* out) {
  tw_row_FORMAT(packed, n, k, out);
}
extern "C" void reference(const float* a, const float* w, const float* d, const float* m,
                          const float* prescale, int64_t n, int64_t k, int64_t group,
                          int64_t segments, int order, float* y) {
  const bool factored = order > 0;
  for (int64_t col = 0; col < n; ++col) {
    float total = 0.0f;
    for (int64_t s = 0; s < segments; ++s) {
      float acc = 0.0f;
      const int64_t begin = s * (k / segments), end = begin + k / segments;
      for (int64_t i = begin; i < end; i += factored ? group : 1) {
        if (order == 2) {  // products and sums of a group are exact in double
          double whole = 0.0;
          for (int64_t j = i; j < i + group; ++j) whole += (double)a[j] * w[col * k + j];
          acc = __builtin_fmaf(d[col * (k / group) + i / group], (float)whole, acc);
          continue;
        }
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
    "e": ("exactly", 1),
}  # fmt: skip
N0, N1 = 17, 47
ROWS = 20


@dataclass(frozen=True)
class Unit:
    """One translation unit: a format, a row length, and the kernels compiled for it."""

    format: str
    k: int
    kernels: tuple[str, ...]  # <order>_<schedule>
    library: ctypes.CDLL

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


@cache
def unit(format: str, k: int, names: tuple[str, ...]) -> Unit:
    """Compile a unit of kernels once per test session; skip without the compiler."""
    if not shutil.which(X86[0]) or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs g++ and an x86-64-v3 processor")
    folder = Path(tempfile.mkdtemp(prefix="contract-"))
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


def expect(u: Unit, order: str, weight: Weight, x: F32) -> F32:
    """The scalar loop over rows of x."""
    name, segments = ORDERS[order]
    factored = name != "dequantise" and weight.d is not None
    values = weight.q if factored else weight.w
    scale = prescale(u.format)
    y = np.empty((len(x), len(values)), np.float32)
    for row in range(len(x)):
        u.library.reference(
            pointer(x[row]), pointer(values), pointer(weight.d) if factored else None,
            pointer(weight.m) if weight.m is not None else None, pointer(scale),
            int64(len(values)), int64(u.k), int64(FORMATS[u.format].group), int64(segments),
            2 if name == "exactly" else int(factored), pointer(y[row]),
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


def program(format: str, k: int, kernels: tuple[str, ...], weights: list[Weight]) -> str:
    """A unit with a main that runs every kernel on weights and rows from its standard input."""
    calls = "\n".join(f"  run_all({n}_bytes, {n}_run, x, w);" for n in kernels)
    text = MAIN.replace("SIZES", ", ".join(str(w.packed.size) for w in weights))
    for name, value in (("ROWS", ROWS), ("N0", N0), ("N1", N1)):
        text = text.replace(name, str(value))
    return source(format, k, kernels) + text.replace("* K", f"* {k}").replace("CALLS", calls)


def run_on_arm(
    folder: Path, format: str, k: int, kernels: tuple[str, ...], weights: list[Weight], x: F32
) -> list[F32]:
    """Run kernels under qemu: y and z of each, side by side. Skips without the tools."""
    if not (shutil.which(ARM[0]) and shutil.which("qemu-aarch64")):
        pytest.skip(f"needs {ARM[0]} and qemu-aarch64")
    text = program(format, k, kernels, weights)
    build(folder, ARM, text, ("-static", "-pthread"), folder / "unit")
    given_bytes = b"".join(w.packed.tobytes() for w in weights) + x.tobytes()
    done = subprocess.run(
        ["qemu-aarch64", str(folder / "unit")], input=given_bytes, capture_output=True, check=True
    )
    found = []
    for output in np.frombuffer(done.stdout, np.float32).reshape(len(kernels), -1):
        y = output[: ROWS * N0].reshape(ROWS, N0)
        z = output[ROWS * N0 :].reshape(ROWS, N1)
        found.append(np.concatenate((y, z), 1))
    return found
