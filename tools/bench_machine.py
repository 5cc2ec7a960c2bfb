"""The machine's own limits, measured: bytes read per second and fp32 operations per second.

Two small loops, built with the compiler and flags of the artifact's target and run on as many
threads as the engine, so that a kernel's rate reads as a fraction of what this machine gives.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np

from tilewright.codegen.flags import Flags
from tilewright.codegen.target import Toolchain
from tilewright.runtime.devices.memory import Bytes, allocate_streamed
from tilewright.targets.registry import resolve

READ_BYTES = 256 << 20  # more than a last-level cache keeps: a GiB was read no slower
READ_SECONDS = 0.15  # about how long one sample reads
FMA_ROUNDS = 1 << 23

SOURCE = r"""
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 Lanes;
static const int kLanes = 16, kSums = 24;
static inline Lanes splat(float x) { return _mm512_set1_ps(x); }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
static inline float first(Lanes a) { return _mm512_cvtss_f32(a); }
#elif defined(__AVX2__)
#include <immintrin.h>
typedef __m256 Lanes;
static const int kLanes = 8, kSums = 12;
static inline Lanes splat(float x) { return _mm256_set1_ps(x); }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
static inline float first(Lanes a) { return _mm256_cvtss_f32(a); }
#else
#include <arm_neon.h>
typedef float32x4_t Lanes;
static const int kLanes = 4, kSums = 24;
static inline Lanes splat(float x) { return vdupq_n_f32(x); }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return vfmaq_f32(c, a, b); }
static inline float first(Lanes a) { return vgetq_lane_f32(a, 0); }
#endif

// Starts all threads at one moment; returns the seconds until the last is done.
template <class Work> static double timed(int threads, Work work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> team;
  for (int i = 1; i < threads; ++i)
    team.emplace_back([&, i] {
      ++ready;
      while (!go.load(std::memory_order_acquire)) {}
      work(i);
    });
  while (ready.load() < threads - 1) {}
  auto start = std::chrono::steady_clock::now();
  go.store(true, std::memory_order_release);
  work(0);
  for (auto& thread : team) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

typedef uint64_t Words __attribute__((vector_size(32)));

static uint64_t read_all(const Words* data, int64_t count) {
  Words sums[8] = {};
  for (int64_t i = 0; i + 8 <= count; i += 8)
    for (int k = 0; k < 8; ++k) sums[k] += data[i + k];
  Words sum = {};
  for (int k = 0; k < 8; ++k) sum += sums[k];
  return sum[0] + sum[1] + sum[2] + sum[3];
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// Reads `bytes` once a pass, each thread its own part; `sink` keeps the sums alive.
EXPORT double read_seconds(const void* data, int64_t bytes, int threads, int passes,
                           uint64_t* sink) {
  int64_t count = bytes / int64_t(sizeof(Words)) / threads;
  return timed(threads, [&](int i) {
    uint64_t sum = 0;
    for (int pass = 0; pass < passes; ++pass)
      sum += read_all(static_cast<const Words*>(data) + i * count, count);
    __atomic_fetch_add(sink, sum, __ATOMIC_RELAXED);
  });
}

// Multiply-adds on registers only; returns fp32 operations a second, two for each.
EXPORT double fma_rate(int threads, int64_t rounds, float* sink) {
  double seconds = timed(threads, [&](int i) {
    Lanes sums[kSums], a = splat(0.999f), b = splat(1e-3f);
    for (int k = 0; k < kSums; ++k) sums[k] = splat(float(k));
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
      for (int k = 0; k < kSums; ++k) sums[k] = fma(sums[k], a, b);
    }
    float total = 0;
    for (int k = 0; k < kSums; ++k) total += first(sums[k]);
    sink[i] = total;
  });
  return 2.0 * kLanes * kSums * double(rounds) * threads / seconds;
}
"""


class MachineProbe:
    """The two loops, compiled and loaded. One sample takes under half a second."""

    def __init__(self, variant: str, flags: Flags, *, threads: int) -> None:
        """`variant` names a target, as "cpu:x86-64-v3". Raises TargetError without a compiler."""
        _, toolchain = resolve(variant, cxx=flags.cxx)
        self.compiler = toolchain.identity()
        self._library = ctypes.CDLL(str(build(toolchain, flags.cache.expanduser() / "bench")))
        self._library.read_seconds.restype = ctypes.c_double
        self._library.fma_rate.restype = ctypes.c_double
        self._threads = threads
        self._buffer = _touched(READ_BYTES)
        self._passes = max(1, round(READ_SECONDS / self._read(1)))

    def read_bandwidth(self) -> float:
        """Return bytes read per second by all threads together."""
        return READ_BYTES * self._passes / self._read(self._passes)

    def _read(self, passes: int) -> float:
        sink = ctypes.c_uint64()
        seconds = self._library.read_seconds(
            ctypes.c_void_p(self._buffer.ctypes.data),
            ctypes.c_int64(READ_BYTES),
            ctypes.c_int(self._threads),
            ctypes.c_int(passes),
            ctypes.byref(sink),
        )
        return float(seconds)

    def fma_rate(self) -> float:
        """Return fp32 operations per second of all threads, a multiply-add counting as two."""
        sink = np.zeros(self._threads, np.float32)
        return float(
            self._library.fma_rate(
                ctypes.c_int(self._threads),
                ctypes.c_int64(FMA_ROUNDS),
                ctypes.c_void_p(sink.ctypes.data),
            )
        )


def build(toolchain: Toolchain, folder: Path) -> Path:
    """Return the compiled loops, from `folder` if they are there already."""
    key = hashlib.sha256((toolchain.identity() + SOURCE).encode()).hexdigest()[:16]
    library = folder / f"machine_{key}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, made = Path(work, "machine.cpp"), Path(work, "machine.so")
        source.write_text(SOURCE)
        toolchain.compile(source, source.with_suffix(".o"))
        toolchain.link([source.with_suffix(".o")], made)
        os.replace(made, library)
    return library


def _touched(num_bytes: int) -> Bytes:
    """Written pages, of the size that weights lie in: unwritten ones all map to the same zeros."""
    pages = allocate_streamed(num_bytes)
    pages[...] = 1
    return pages


def cpu_name() -> str:
    """Return the name the system gives its first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part"):
            return value.strip()
    return "unknown"
