"""Paged attention on the CPU: accuracy against fp64, and bits that depend on nothing but the row."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray
from tilewright.codegen.expr import prelude

TEMPLATES = Path(__file__).parents[2] / "templates" / "cpp"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

# Every thread runs ranges of its own; the real pool has the same contract.
POOL = """
#include <cstdint>
#include <atomic>
#include <thread>
#include <vector>
static int num_threads = 1;
extern "C" void set_threads(int count) { num_threads = count; }
typedef void (*tw_body)(void*, int64_t, int64_t, int);
static void tw_parallel(int64_t num_items, tw_body body, void* arg) {
  if (num_threads == 1) return body(arg, 0, num_items, 0);
  std::atomic<int64_t> next(0);
  std::vector<std::thread> threads;
  for (int id = 0; id < num_threads; ++id)
    threads.emplace_back([&, id] {
      for (int64_t i; (i = next.fetch_add(1)) < num_items;) body(arg, i, i + 1, id);
    });
  for (auto& t : threads) t.join();
}
"""

ARGS = """
  const float* q; float* out; const void *k, *v;
  const int32_t *positions, *rows, *tables; int64_t stride; float scale;
"""

# Beside run(), which picks a schedule by the number of tokens, any schedule can be tried.
ENTRY = """
typedef void (*launch)(const attend::Args&, int64_t, const tw::attend_schedule&, uint8_t*);
static const launch launches[] = {
    nullptr, tw::attend<attend::Problem, 1>, nullptr, nullptr, tw::attend<attend::Problem, 4>,
    nullptr, tw::attend<attend::Problem, 6>};
extern "C" int64_t schedule_bytes(const tw::attend_schedule* schedule, int64_t tokens,
                                  int64_t positions, int64_t threads) {
  return tw::attend_bytes<attend::Problem>(*schedule, tokens, positions, threads);
}
extern "C" void schedule_run(const attend::Args* args, int64_t tokens, int register_rows,
                             const tw::attend_schedule* schedule, uint8_t* workspace) {
  launches[register_rows](*args, tokens, *schedule, workspace);
}
extern "C" int64_t workspace_bytes(int64_t tokens, int64_t positions, int64_t threads) {
  return attend::workspace_bytes(tokens, positions, threads);
}
extern "C" void run(const attend::Args* args, int64_t tokens, uint8_t* workspace) {
  attend::run(*args, tokens, workspace);
}
"""


@dataclass(frozen=True)
class Problem:
    """What decides the bits."""

    heads: int = 9
    kv_heads: int = 3
    width: int = 64
    block_size: int = 16
    chunk: int = 64
    cache: str = "float32"


@dataclass(frozen=True)
class Schedule:
    """What must not."""

    max_tokens: int | None = None
    tile_tokens: int = 8
    register_rows: int = 6
    split_units: int = 0
    partial_bytes: int = 1 << 23
    paired: bool = False
    prefetch: bool = False
    inline_units: int = 0


SCHEDULES = (
    Schedule(tile_tokens=1),
    Schedule(tile_tokens=1, split_units=1, prefetch=True),
    Schedule(tile_tokens=2, register_rows=4, paired=True),
    Schedule(tile_tokens=3, split_units=2, register_rows=1),
    Schedule(tile_tokens=8, prefetch=True, inline_units=24),
    Schedule(tile_tokens=16, register_rows=6, split_units=3),
    Schedule(tile_tokens=16, split_units=1, partial_bytes=1 << 14, register_rows=4),
    Schedule(tile_tokens=32, paired=True, register_rows=4),
    Schedule(tile_tokens=64, inline_units=1 << 30),
)


class Args(ctypes.Structure):
    """The `Args` of the rendered kernels."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("q", "out", "k", "v", "positions", "rows", "tables")),
        ("stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


class CSchedule(ctypes.Structure):
    """`tw::attend_schedule`."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("tile_tokens", "split_units", "partial_bytes")),
        ("inline_units", ctypes.c_int64),
        ("paired", ctypes.c_bool),
        ("prefetch", ctypes.c_bool),
    ]


def render(problem: Problem) -> str:
    """The kernel `attend` with two buckets of its own."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True
    )
    kind = {"float32": "float", "bfloat16": "uint16_t"}[problem.cache]
    offset = f"(token * {problem.heads} + head) * {problem.width}"
    return environment.get_template("attend.cpp.j2").render(
        **vars(problem),
        preamble=POOL + prelude("cpp"),
        name="attend",
        args=ARGS,
        load_q=f"    for (int d = 0; d < {problem.width}; ++d) q[d] = args.q[{offset} + d];",
        epilogue=f"    for (int d = 0; d < {problem.width}; ++d) args.out[{offset} + d] = out[d];",
        scale="args.scale",
        positions="args.positions",
        request_rows="args.rows",
        block_tables="args.tables",
        table_stride="args.stride",
        k_cache=f"(const {kind}*)args.k",
        v_cache=f"(const {kind}*)args.v",
        schedules=[
            vars(replace(SCHEDULES[1], max_tokens=2)),
            vars(Schedule(max_tokens=None, tile_tokens=8)),
        ],
        entry=ENTRY,
    )


@lru_cache(maxsize=None)
def compiled(problem: Problem) -> ctypes.CDLL:
    """The kernel of a problem as a library, ready to be called with any schedule."""
    folder = Path(mkdtemp(prefix="attend-"))
    source = folder / "kernels.cpp"
    source.write_text(render(problem))
    library = folder / "kernels.so"
    flags = "-std=c++17 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math"
    command = ["g++", *flags.split(), "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, f"-I{TEMPLATES}", str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.schedule_bytes.restype = loaded.workspace_bytes.restype = i64
    loaded.schedule_bytes.argtypes = [pointer, i64, i64, i64]
    loaded.workspace_bytes.argtypes = [i64, i64, i64]
    loaded.schedule_run.argtypes = [pointer, i64, ctypes.c_int, pointer, pointer]
    loaded.run.argtypes = [pointer, i64, pointer]
    return loaded


@dataclass(frozen=True)
class Batch:
    """Queries and a cache; unused cache entries are NaN."""

    q: F32  # [tokens, heads, width]
    k: NDArray[np.generic]  # [blocks, kv_heads, block_size, width]
    v: NDArray[np.generic]
    positions: I32
    rows: I32
    tables: I32
    scale: float = 0.125

    def take(self, tokens: slice) -> Batch:
        """A batch of some of the tokens over the same cache."""
        cut = {n: getattr(self, n)[tokens] for n in ("q", "positions", "rows")}
        return replace(self, **cut)


def to_bf16(x: F32) -> NDArray[np.uint16]:
    """Round to nearest even; NaN stays NaN."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def to_f64(x: NDArray[np.generic]) -> NDArray[np.float64]:
    """fp32 or bf16 bits as fp64."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def make_batch(
    problem: Problem, requests: list[tuple[int, int]], seed: int, size: float = 1.0
) -> Batch:
    """Requests are (first position, number of tokens); all positions before are in the cache."""
    rng = np.random.default_rng(seed)
    lengths = [start + count for start, count in requests]
    need = [-(-n // problem.block_size) for n in lengths]
    blocks = rng.permutation(sum(need) + 3).astype(np.int32)
    tables = np.full((len(requests), max(need) + 1), np.iinfo(np.int32).max, np.int32)
    shape = (len(blocks), problem.kv_heads, problem.block_size, problem.width)
    caches = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    used = 0
    for row, (length, count) in enumerate(zip(lengths, need, strict=True)):
        tables[row, :count] = blocks[used : used + count]
        used += count
        p = np.arange(length)
        for cache in caches:
            entries = rng.standard_normal((length, problem.kv_heads, problem.width))
            cache[tables[row, p // problem.block_size], :, p % problem.block_size] = entries * size
    k, v = (to_bf16(c) if problem.cache == "bfloat16" else c for c in caches)
    rows = np.repeat(np.arange(len(requests)), [c for _, c in requests]).astype(np.int32)
    positions = np.concatenate([np.arange(s, s + c) for s, c in requests]).astype(np.int32)
    q = rng.standard_normal((len(rows), problem.heads, problem.width)).astype(np.float32) * size
    return Batch(q.astype(np.float32), k, v, positions, rows, tables)


def reference(problem: Problem, batch: Batch) -> NDArray[np.float64]:
    """The meaning of attend in fp64, one row at a time."""
    out = np.zeros(batch.q.shape)
    k, v = to_f64(batch.k), to_f64(batch.v)
    for t, (position, row) in enumerate(zip(batch.positions, batch.rows, strict=True)):
        p = np.arange(position + 1)
        blocks, entries = batch.tables[row, p // problem.block_size], p % problem.block_size
        keys, values = k[blocks, :, entries], v[blocks, :, entries]  # [positions, kv_heads, width]
        for head in range(problem.heads):
            kv_head = head // (problem.heads // problem.kv_heads)
            scores = keys[:, kv_head] @ batch.q[t, head].astype(np.float64) * batch.scale
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ values[:, kv_head]
    return out


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """A poisoned workspace, 64-byte aligned."""
    raw = np.full(num_bytes + 64, 0xFF, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:num_bytes]


def attend(
    problem: Problem, batch: Batch, schedule: Schedule | None = SCHEDULES[0], threads: int = 1
) -> F32:
    """Run a schedule, or the kernel's own choice for None; outputs are poisoned before."""
    library = compiled(problem)
    library.set_threads(threads)
    out = np.full(batch.q.shape, np.nan, np.float32)
    held = [np.ascontiguousarray(batch.q), out, batch.k, batch.v]
    held += [np.ascontiguousarray(x) for x in (batch.positions, batch.rows, batch.tables)]
    stride = batch.tables.shape[1]
    args = Args(*(x.ctypes.data for x in held), stride, batch.scale)
    sizes = (len(batch.positions), stride * problem.block_size, threads)
    if schedule is None:
        workspace = aligned(library.workspace_bytes(*sizes))
        library.run(ctypes.byref(args), sizes[0], workspace.ctypes.data)
        return out
    fields = [name for name, _ in CSchedule._fields_]
    record = ctypes.byref(CSchedule(*(getattr(schedule, f) for f in fields)))
    workspace = aligned(library.schedule_bytes(record, *sizes))
    library.schedule_run(
        ctypes.byref(args), sizes[0], schedule.register_rows, record, workspace.ctypes.data
    )
    return out
