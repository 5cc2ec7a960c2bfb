"""Paged attention on the CPU: accuracy against fp64; bits depend on nothing but the row."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
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

from support.cpu_flags import WARNINGS, instruction_flags
from tilewright.codegen.expr import prelude

TEMPLATES = Path(__file__).parents[2] / "templates" / "cpp"
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
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
    nullptr, nullptr, nullptr, nullptr, tw::attend<attend::Problem, 4>, nullptr,
    tw::attend<attend::Problem, 6>};
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
    Schedule(tile_tokens=3, split_units=2, register_rows=4),
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
    source.write_text(POOL + prelude("cpp") + render(problem))
    library = folder / "kernels.so"
    flags = "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math"
    command = ["g++", *flags.split(), *instruction_flags(), *WARNINGS, "-shared", "-fPIC"]
    paths = [f"-I{TEMPLATES}", str(source), "-o", str(library)]
    subprocess.run([*command, "-pthread", *paths], check=True)
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


SMOLLM2 = Problem()
PROBLEMS = (
    SMOLLM2,
    Problem(heads=4, kv_heads=1, width=40, block_size=8, chunk=32, cache="bfloat16"),
    Problem(heads=7, kv_heads=7, width=16, block_size=5, chunk=24),  # blocks and chunks cross
)
RAGGED = [(0, 5), (70, 1), (3, 90), (0, 1), (200, 1), (126, 4)]


def assert_same(got: F32, want: F32, what: object = "") -> None:
    """Equal bits; any NaN equals any NaN."""
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{what}: {np.argwhere(~same)[:3].tolist()} differ"


@pytest.fixture(scope="module", autouse=True)
def _compile_all() -> None:
    """Compile the kernels side by side: most of the time of these tests."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(compiled, PROBLEMS))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_accuracy(problem: Problem) -> None:
    batch = make_batch(problem, RAGGED, seed=1)
    want = reference(problem, batch)
    assert np.abs(attend(problem, batch) - want).max() < 1e-6 * np.abs(want).max()


def test_large_scores() -> None:
    batch = make_batch(SMOLLM2, RAGGED, seed=2, size=30.0)
    want = reference(SMOLLM2, batch)
    # Scores reach thousands, where an ulp is 2e-4: weights are off by as much.
    assert np.abs(attend(SMOLLM2, batch) - want).max() < 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_schedules_and_threads_change_no_bit(problem: Problem) -> None:
    batch = make_batch(problem, RAGGED, seed=3)
    want = attend(problem, batch)
    assert np.isfinite(want).all()
    for schedule, threads in itertools.product((*SCHEDULES, None), (1, 2, 4)):
        assert_same(attend(problem, batch, schedule, threads), want, (schedule, threads))


@settings(max_examples=25, deadline=None)
@given(
    problem=st.sampled_from(PROBLEMS),
    requests=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 30)), min_size=1, max_size=5),
    schedules=st.tuples(st.sampled_from(SCHEDULES), st.sampled_from(SCHEDULES)),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_a_token_alone_equals_a_token_in_a_batch(
    problem: Problem,
    requests: list[tuple[int, int]],
    schedules: tuple[Schedule, Schedule],
    seed: int,
    data: st.DataObject,
) -> None:
    batch = make_batch(problem, requests, seed)
    whole = attend(problem, batch, schedules[0], threads=2)
    token = data.draw(st.integers(0, len(batch.positions) - 1))
    alone = attend(problem, batch.take(slice(token, token + 1)), schedules[1])
    assert_same(whole[token : token + 1], alone)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_prefill_cut_anywhere(problem: Problem) -> None:
    batch = make_batch(problem, [(0, 75)], seed=4)
    want = attend(problem, batch, Schedule(tile_tokens=64))
    for cut in range(1, 75):
        parts = [batch.take(slice(0, cut)), batch.take(slice(cut, None))]
        schedule = SCHEDULES[cut % len(SCHEDULES)]
        got = np.concatenate([attend(problem, part, schedule) for part in parts])
        assert_same(got, want, cut)


def test_blocks_may_lie_anywhere() -> None:
    batch = make_batch(SMOLLM2, RAGGED, seed=5)
    order = np.random.default_rng(6).permutation(len(batch.k))
    k, v = np.empty_like(batch.k), np.empty_like(batch.v)
    k[order], v[order] = batch.k, batch.v
    used = batch.tables < len(order)
    tables = np.where(used, order[np.where(used, batch.tables, 0)], batch.tables).astype(np.int32)
    moved = replace(batch, k=k, v=v, tables=tables)
    assert_same(attend(SMOLLM2, moved), attend(SMOLLM2, batch))


def test_later_entries_do_not_matter() -> None:
    """A token of a chunk sees what it would see before the rest of the chunk is written."""
    batch = make_batch(SMOLLM2, [(0, 100)], seed=7)
    want = attend(SMOLLM2, batch, Schedule(tile_tokens=64))
    for position in (0, 15, 16, 63, 64, 80):
        k, v = batch.k.copy(), batch.v.copy()
        later = np.arange(position + 1, 100)
        for cache in (k, v):
            cache[batch.tables[0, later // 16], :, later % 16] = np.nan
        got = attend(SMOLLM2, replace(batch, k=k, v=v), Schedule(tile_tokens=64))
        assert_same(got[: position + 1], want[: position + 1], position)


def _entry(batch: Batch, position: int) -> tuple[int, int]:
    return int(batch.tables[0, position // 16]), position % 16


@pytest.mark.parametrize("schedule", (SCHEDULES[0], SCHEDULES[1], SCHEDULES[8]), ids=str)
def test_infinite_scores(schedule: Schedule) -> None:
    """-inf weighs nothing, even for a whole first unit; +inf and NaN give NaN, as softmax says."""
    batch = make_batch(SMOLLM2, [(0, 100)], seed=8)
    batch = replace(batch, q=np.abs(batch.q) + 1)
    k = batch.k.copy()
    for position in range(64):
        k[_entry(batch, position)[0], :, _entry(batch, position)[1]] = -np.inf
    low = attend(SMOLLM2, replace(batch, k=k), schedule)
    assert np.isnan(low[:64]).all()  # nothing but -inf is seen
    v = batch.v.copy()
    shifted = reference(SMOLLM2, replace(batch, k=np.where(np.isinf(k), -1e4, k), v=v))
    assert np.abs(low[64:] - shifted[64:]).max() < 1e-5
    for bad in (np.inf, np.nan):
        k = batch.k.copy()
        block, entry = _entry(batch, 70)
        k[block, :, entry] = bad
        got = attend(SMOLLM2, replace(batch, k=k), schedule)
        assert np.isfinite(got[:70]).all() and np.isnan(got[70:]).all()


def test_padding_tokens_give_zeros_and_no_tokens_do_nothing() -> None:
    batch = make_batch(SMOLLM2, [(0, 3), (5, 2)], seed=9)
    want = attend(SMOLLM2, batch, SCHEDULES[4])
    padded = replace(batch, positions=np.where(batch.rows == 1, -1, batch.positions))
    got = attend(SMOLLM2, replace(padded, positions=padded.positions.astype(np.int32)))
    assert_same(got[:3], want[:3])
    assert not got[3:].any()
    assert attend(SMOLLM2, batch.take(slice(0, 0))).shape == (0, 9, 64)


def test_negative_zero_survives() -> None:
    """Values that underflow to -0 keep their sign beside rows that see more positions."""
    batch = make_batch(SMOLLM2, [(0, 8)], seed=10)
    k, v = np.zeros_like(batch.k), np.full_like(batch.v, 1.0)
    v[batch.tables[0, 0], :, :4] = -1e-45
    batch = replace(batch, k=k, v=v)
    whole = attend(SMOLLM2, batch, SCHEDULES[8])
    for token in range(8):
        assert_same(whole[token : token + 1], attend(SMOLLM2, batch.take(slice(token, token + 1))))


@pytest.mark.parametrize("threads", (1, 3))
def test_workspace_is_no_smaller_than_what_is_written(threads: int) -> None:
    batch = make_batch(SMOLLM2, RAGGED, seed=11)
    library = compiled(SMOLLM2)
    size = library.workspace_bytes(len(batch.positions), batch.tables.shape[1] * 16, threads)
    buffer = aligned(size + 4096)
    buffer[:] = 0xA5
    out = np.empty_like(batch.q)
    held = [batch.q, out, batch.k, batch.v, batch.positions, batch.rows, batch.tables]
    args = Args(*(x.ctypes.data for x in held), batch.tables.shape[1], batch.scale)
    library.set_threads(threads)
    library.run(ctypes.byref(args), len(batch.positions), buffer.ctypes.data)
    assert (buffer[size:] == 0xA5).all()
