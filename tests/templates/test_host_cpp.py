"""The host part of a CPU artifact alone: argument checks, parallel loops, the pool."""

import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm_ffi.libinfo
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.runtime.devices.cpu import (
    Call,
    CpuDevice,
    CpuLibrary,
    CpuPool,
    LaunchFailed,
    LaunchTable,
    Slot,
    allocate,
)
from tilewright.targets.cpu.toolchain import HOST_SOURCES

pytestmark = pytest.mark.cpu
HOST = Path(__file__).parents[2] / "templates" / "cpp"

SOURCE = r"""
#include "tw_host.h"
struct Count { int32_t* hits; int32_t* by_thread; int64_t inner; };
static void inner_items(void* arg, int64_t begin, int64_t end, int) {
  for (int64_t i = begin; i < end; ++i) ++*static_cast<int64_t*>(arg);
}
static void count_items(void* arg, int64_t begin, int64_t end, int thread_id) {
  Count* c = static_cast<Count*>(arg);
  for (int64_t i = begin; i < end; ++i) {
    int64_t calls = 0;  // a loop inside a body runs inline, so no one else touches it
    tw_parallel(c->inner, inner_items, &calls);
    c->hits[i] += 1 + int32_t(calls);
    c->by_thread[thread_id] += 1;
  }
}
// hits[i] += 1 + inner; by_thread[t] += items that thread t ran; its last entry: the pool's size.
TW_KERNEL(count) {
  TW_ARGUMENTS(4);
  TW_TENSOR(hits, 0, kDLInt, 32, 1);
  TW_TENSOR(by_thread, 1, kDLInt, 32, 1);
  TW_INT(num_items, 2, 0, 1 << 20);
  TW_INT(inner, 3, 0, 100);
  Count c = {TW_DATA(int32_t, hits), TW_DATA(int32_t, by_thread), inner};
  tw_parallel(num_items, count_items, &c);
  c.by_thread[63] = tw_num_threads();
  return 0;
}
static void spin_items(void* arg, int64_t begin, int64_t end, int) {
  for (int64_t i = 0; i < (end - begin) * *static_cast<int64_t*>(arg); ++i) asm volatile("");
}
TW_KERNEL(spin) {
  TW_ARGUMENTS(2);
  TW_INT(num_items, 0, 0, 1 << 20);
  TW_INT(rounds, 1, 0, 1 << 30);
  tw_parallel(num_items, spin_items, &rounds);
  return 0;
}
TW_KERNEL(check) {
  TW_ARGUMENTS(2);
  TW_TENSOR(x, 0, kDLFloat, 32, 2);
  TW_INT(n, 1, 1, 9);
  TW_EXTENT(x, 1, n);
  return 0;
}
TW_KERNEL(halves) {
  TW_ARGUMENTS(1);
  TW_TENSOR(x, 0, kDLBfloat, 16, 1);
  return 0;
}
TW_KERNEL(silent) { return -1; }
"""
SYMBOLS = ("count", "spin", "check", "halves", "silent")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    root = tmp_path_factory.mktemp("host")
    source, path = root / "kernels.cpp", root / "kernels.so"
    source.write_text(SOURCE)
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    includes = [f"-I{HOST}", f"-I{tvm_ffi.libinfo.find_include_path()}"]
    files = [str(source), *(str(HOST / name) for name in HOST_SOURCES), "-o", str(path)]
    subprocess.run(["g++", *flags, "-fvisibility=hidden", *includes, *files], check=True)
    return CpuLibrary(path, SYMBOLS)


@pytest.fixture(scope="module")
def pools(library: CpuLibrary) -> dict[int, CpuPool]:
    return {n: CpuDevice(n).create_pool(library) for n in (1, 2, 3, 8)}


@settings(deadline=None, max_examples=60)
@given(
    threads=st.sampled_from((1, 2, 3, 8)),
    num_items=st.integers(0, 300),
    inner=st.integers(0, 3),
    repeats=st.integers(1, 20),
)
def test_every_item_runs_once(
    library: CpuLibrary,
    pools: dict[int, CpuPool],
    threads: int,
    num_items: int,
    inner: int,
    repeats: int,
) -> None:
    hits = allocate(4 * 300).view(np.int32)
    by_thread = allocate(4 * 64).view(np.int32)
    slots = [Slot(hits.ctypes.data, "i32", (300,)), Slot(by_thread.ctypes.data, "i32", (64,))]
    calls = [Call("count", (0, 1), ("items", inner))] * repeats
    LaunchTable(library, slots, calls).run(pools[threads], {"items": num_items})
    assert (hits[:num_items] == repeats * (1 + inner)).all() and not hits[num_items:].any()
    assert by_thread[:threads].sum() == repeats * num_items and not by_thread[threads:63].any()
    assert by_thread[63] == threads


def test_plain_call_runs_on_one_thread(library: CpuLibrary) -> None:
    hits, by_thread = torch.zeros(300, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    library.module["count"](hits, by_thread, 300, 2)
    assert (hits == 3).all() and by_thread[0] == 300 and by_thread[63] == 1


def test_work_is_shared(library: CpuLibrary, pools: dict[int, CpuPool]) -> None:
    """With items of real length, every thread of the pool takes some."""
    used: set[int] = set()
    for _ in range(50):
        hits, by_thread = np.zeros(64, np.int32), allocate(256).view(np.int32)
        hits = allocate(256).view(np.int32)
        slots = [Slot(hits.ctypes.data, "i32", (64,)), Slot(by_thread.ctypes.data, "i32", (64,))]
        calls = [Call("count", (0, 1), (64, 100)), Call("spin", (), (64, 20000))] * 4
        LaunchTable(library, slots, calls).run(pools[2], {})
        used |= set(np.flatnonzero(by_thread[:63]).tolist())
        if used == {0, 1}:
            return
    raise AssertionError(f"only threads {used} took items")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((torch.zeros(2, 4),), "number of arguments: got 1, want 2"),
        ((1, 4), "argument 0 'x': got type index 1, want a tensor"),
        ((torch.zeros(2, 4), 0.5), "argument 1 'n': got type index 3, want an int"),
        ((torch.zeros(2, 4), 10), "argument 1 'n': got 10, want 1 to 9"),
        ((torch.zeros(2, 4), 5), "tensor 'x': extent of axis 1: got 4, want 5"),
        ((torch.zeros(8), 4), "argument 0 'x': number of axes: got 1, want 2"),
        ((torch.zeros(2, 4).double(), 4), "argument 0 'x': element type: got f64, want f32"),
        ((torch.zeros(2, 4).bfloat16(), 4), "argument 0 'x': element type: got bf16, want f32"),
        ((torch.zeros(2, 4).byte(), 4), "argument 0 'x': element type: got u8, want f32"),
        ((torch.zeros(4, 2).T, 4), "argument 0 'x': stride: got 2, want 1"),
        ((torch.zeros(2, 8)[:, :4], 4), "argument 0 'x': stride: got 8, want 4"),
        (
            (torch.zeros(3, 4)[1:], 4),
            "argument 0 'x': data address modulo 64: got 16, want 0",
        ),
    ],
)
def test_wrong_arguments_are_named(
    library: CpuLibrary, args: tuple[object, ...], text: str
) -> None:
    with pytest.raises(ValueError) as caught:
        library.module["check"](*args)
    assert str(caught.value) == f"kernel 'check': {text}"


def test_right_arguments_pass(library: CpuLibrary) -> None:
    library.module["check"](torch.zeros(2, 4), 4)
    library.module["check"](torch.zeros(0, 4), 4)
    library.module["check"](torch.zeros(8, 1).T[:, :8], 8)  # one row: any row stride
    library.module["halves"](torch.zeros(3, dtype=torch.bfloat16))


def test_failure_without_a_message(library: CpuLibrary, pools: dict[int, CpuPool]) -> None:
    calls = [Call("spin", (), (1, 1)), Call("silent", (), ()), Call("spin", (), (-1, 1))]
    with pytest.raises(LaunchFailed, match="failed without a message") as caught:
        LaunchTable(library, [], calls).run(pools[2], {})
    assert caught.value.launch_id == 1


def test_runs_on_one_pool_take_turns(library: CpuLibrary, pools: dict[int, CpuPool]) -> None:
    """Four threads use one pool; each loop is whole, so its counts are exact."""
    results: list[bool] = []

    def run() -> None:
        hits, by_thread = (allocate(256).view(np.int32) for _ in range(2))
        slots = [Slot(a.ctypes.data, "i32", (64,)) for a in (hits, by_thread)]
        table = LaunchTable(library, slots, [Call("count", (0, 1), (63, 1))] * 10)
        for _ in range(50):
            table.run(pools[3], {})
        results.append(bool((hits[:63] == 1000).all()))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_pools_come_and_go(library: CpuLibrary) -> None:
    before = threading.active_count(), len(list(Path("/proc/self/task").iterdir()))
    table = LaunchTable(library, [], [Call("spin", (), (8, 100))])
    for _ in range(30):
        pool = CpuPool(library, 4)
        table.run(pool, {})
        pool.close()
        pool.close()
    time.sleep(0.01)
    assert len(list(Path("/proc/self/task").iterdir())) <= before[1]


def test_sleeping_workers_wake(library: CpuLibrary, pools: dict[int, CpuPool]) -> None:
    table = LaunchTable(library, [], [Call("spin", (), (16, 50000))])
    for pause in (0.0, 0.0005, 0.002, 0.02) * 5:
        time.sleep(pause)
        table.run(pools[8], {})
