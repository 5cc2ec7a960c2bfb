// The functions of tw_hopper.cuh on threads of this machine: a block is as many threads, and a
// matrix product is taken by the threads of its group together, from the same addresses.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <barrier>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define TW_DEVICE static inline
#define TW_EACH(many) for (int m = 0; m < many; ++m)
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)
using std::max;
using std::min;

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 { int x, y, z; };
static thread_local dim3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
alignas(1024) unsigned char memory[232448];

typedef std::barrier<> Meeting;
static std::map<int, std::unique_ptr<Meeting>> meetings;  // by name, those of groups and warps too
static std::mutex meetings_lock;
static Meeting& meeting(int name, int threads) {
  std::lock_guard<std::mutex> hold(meetings_lock);
  auto& found = meetings[name];
  if (!found) found = std::make_unique<Meeting>(threads);
  return *found;
}
static inline void meet(int name, int threads) { meeting(name, threads).arrive_and_wait(); }
static inline int warp_id() { return threadIdx.x / 32; }
static inline int lane_id() { return threadIdx.x % 32; }
static inline void meet_warp() { meet(100 + warp_id(), 32); }
static inline void __syncwarp() { meet_warp(); }
static inline void meet_group() { meet(200 + warp_id() / 4, 128); }
static inline void __syncthreads() { meet(0, blockDim.x); }

static uint32_t of_lanes[64][32];
template <class T>
static T exchanged(T x, int other) {
  T found;
  memcpy(&of_lanes[warp_id()][lane_id()], &x, 4);
  meet_warp();
  memcpy(&found, &of_lanes[warp_id()][other], 4);
  meet_warp();
  return found;
}
template <class T>
static T __shfl_xor_sync(uint32_t, T x, int mask) { return exchanged(x, lane_id() ^ mask); }
static inline uint32_t __ballot_sync(uint32_t, bool x) {
  of_lanes[warp_id()][lane_id()] = x;
  meet_warp();
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= of_lanes[warp_id()][i] << i;
  meet_warp();
  return found;
}
static inline int __reduce_max_sync(uint32_t, int x) {
  of_lanes[warp_id()][lane_id()] = x;
  meet_warp();
  int found = INT32_MIN;
  for (int i = 0; i < 32; ++i) found = max(found, (int)of_lanes[warp_id()][i]);
  meet_warp();
  return found;
}

static inline int __reduce_add_sync(uint32_t, int x) {
  of_lanes[warp_id()][lane_id()] = x;
  meet_warp();
  int found = 0;
  for (int i = 0; i < 32; ++i) found += (int)of_lanes[warp_id()][i];
  meet_warp();
  return found;
}
static inline int __shfl_up_sync(uint32_t, int x, int step) {
  return exchanged(x, lane_id() < step ? lane_id() : lane_id() - step);
}
static inline bool __any_sync(uint32_t all, bool x) { return __ballot_sync(all, x) != 0; }
template <class T>
static T __shfl_sync(uint32_t, T x, int lane) { return exchanged(x, lane & 31); }
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
template <class T>
static T __ldg(const T* p) { T x; memcpy(&x, p, sizeof x); return x; }
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return ((uint64_t)high << 32 | low) >> (shift & 31);
}
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline int __float2int_rz(float a) { return (int)a; }
static inline float __int2float_rn(int a) { return (float)a; }
static inline int __float_as_int(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
static inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }

static inline float of_bf16(uint32_t bits) { return __int_as_float((int)(bits << 16)); }
static inline uint32_t to_bf16(float x) {
  const uint32_t bits = (uint32_t)__float_as_int(x);
  if (x != x) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

TW_DEVICE uint32_t tw_shared(const void* p) { return (uint32_t)((const unsigned char*)p - memory); }

struct Barrier {
  std::mutex lock;
  std::condition_variable changed;
  uint32_t count = 0, waiting = 0, phase = 0;
  int64_t num_bytes = 0;  // still to come
  void end_phase() {
    if (waiting != 0 || num_bytes != 0) return;
    waiting = count;
    phase ^= 1;
    changed.notify_all();
  }
};
static std::map<uint32_t, std::unique_ptr<Barrier>> barriers_of_block;
static std::mutex barriers_lock;
static Barrier& barrier_of(uint32_t barrier) {
  std::lock_guard<std::mutex> hold(barriers_lock);
  return *barriers_of_block.at(barrier);
}
TW_DEVICE void tw_barrier_init(uint32_t barrier, uint32_t count) {
  std::lock_guard<std::mutex> hold(barriers_lock);
  auto& made = barriers_of_block[barrier] = std::make_unique<Barrier>();
  made->count = made->waiting = count;
}
TW_DEVICE void tw_barriers_ready() {}
TW_DEVICE void tw_arrive(uint32_t barrier) {
  Barrier& b = barrier_of(barrier);
  std::lock_guard<std::mutex> hold(b.lock);
  --b.waiting;
  b.end_phase();
}
TW_DEVICE void tw_arrive_for(uint32_t barrier, uint32_t num_bytes) {
  Barrier& b = *barriers_of_block.at(barrier);
  std::lock_guard<std::mutex> hold(b.lock);
  b.num_bytes += num_bytes;
  --b.waiting;
  b.end_phase();
}
TW_DEVICE void tw_ahead(const void*, uint32_t) {}
TW_DEVICE void tw_wait_for_others() {}

TW_DEVICE void tw_bulk(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier) {
  if (num_bytes % 16 || to % 16 || (uintptr_t)from % 16) abort();
  memcpy(memory + to, from, num_bytes);
  Barrier& b = *barriers_of_block.at(barrier);
  std::lock_guard<std::mutex> hold(b.lock);
  b.num_bytes -= num_bytes;
  b.end_phase();
}
TW_DEVICE void tw_arrive_copied(uint32_t barrier) { tw_arrive(barrier); }
TW_DEVICE void tw_copy_group() {}
template <int kLeft>
TW_DEVICE void tw_copied_but() {}
TW_DEVICE void tw_wait(uint32_t barrier, uint32_t parity) {
  Barrier& b = barrier_of(barrier);
  std::unique_lock<std::mutex> hold(b.lock);
  b.changed.wait(hold, [&] { return b.phase != parity; });
}
#define TW_ARRIVALS 1
TW_DEVICE void tw_arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) tw_arrive(barrier);
}
TW_DEVICE void tw_arrive_after_products(uint32_t barrier, int lane) {
  if (lane == 0) tw_arrive(barrier);
}
template <int kName, int kThreads>
TW_DEVICE void tw_meet() { meet(kName, kThreads); }
template <int kCount>
TW_DEVICE void tw_more_registers() {}
template <int kCount>
TW_DEVICE void tw_fewer_registers() {}

struct Tile { uint32_t start, lead, stride; };
TW_DEVICE uint64_t tw_tile(uint32_t address, uint32_t lead) {
  return (uint64_t)(address >> 4) | (uint64_t)(lead >> 4) << 16 | (uint64_t)64 << 32;
}
TW_DEVICE uint64_t tw_tile_at(uint64_t tile, uint32_t num_bytes) {
  return (tile & 0xFFFFFFFF00000000ull) | (uint32_t)((uint32_t)tile + (num_bytes >> 4));
}
static inline Tile tile_of(uint64_t t) {
  return {(uint32_t)(t & 0x3FFF) << 4, (uint32_t)(t >> 16 & 0x3FFF) << 4,
          (uint32_t)(t >> 32 & 0x3FFF) << 4};
}
static inline float swizzled(uint32_t address) {
  address ^= (address >> 7 & 7) << 4;
  uint16_t bits;
  memcpy(&bits, memory + address, 2);
  return of_bf16(bits);
}
// Row r of 64, k of 16: columns of a row lie together; or rows of k lie together.
static inline float by_rows(Tile t, int r, int k) {
  return swizzled(t.start + r / 8 * t.stride + r % 8 * 128 + k * 2);
}
static inline float by_columns(Tile t, int k, int n) {
  return swizzled(t.start + k / 8 * t.stride + k % 8 * 128 + n * 2);
}

static uint32_t of_threads[8][128][4];
static inline int row_of(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + (i >> 1 & 1) * 8; }
static inline int column_of(int thread, int i) { return (i >> 2) * 8 + thread % 4 * 2 + (i & 1); }

TW_DEVICE void tw_scores(float (&d)[32], uint64_t a, uint64_t b, int adds) {
  meet_group();
  const int thread = threadIdx.x % 128;
  for (int i = 0; i < 32; ++i) {
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      sum += by_rows(tile_of(a), row_of(thread, i), k) * by_rows(tile_of(b), column_of(thread, i), k);
    }
    d[i] = adds ? d[i] + sum : sum;
  }
  meet_group();
}
static inline float a_value(const uint32_t (*of)[4], int row, int k) {
  const uint32_t pair = of[row / 16 * 32 + row % 8 * 4 + k % 8 / 2][row / 8 % 2 + k / 8 * 2];
  return of_bf16(pair >> 16 * (k & 1) & 0xFFFF);
}
template <int kCount>
TW_DEVICE void tw_score_rows(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, int adds) {
  const int thread = threadIdx.x % 128, group = warp_id() / 4;
  memcpy(of_threads[group][thread], a, 16);
  meet_group();
  for (int i = 0; i < kCount; ++i) {
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      sum += a_value(of_threads[group], row_of(thread, i), k) *
             by_rows(tile_of(b), column_of(thread, i), k);
    }
    d[i] = adds ? d[i] + sum : sum;
  }
  meet_group();
}
template <int kCount>
TW_DEVICE void tw_mix(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, int adds) {
  const int thread = threadIdx.x % 128, group = warp_id() / 4;
  memcpy(of_threads[group][thread], a, 16);
  meet_group();
  for (int i = 0; i < kCount; ++i) {
    const int row = row_of(thread, i);
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      sum += a_value(of_threads[group], row, k) * by_columns(tile_of(b), k, column_of(thread, i));
    }
    d[i] = adds ? d[i] + sum : sum;
  }
  meet_group();
}
template <int kCount>
TW_DEVICE void tw_wide(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {
  tw_score_rows(d, a, b, 1);
}
template <int kLeft, int kCount>
TW_DEVICE void tw_unfinished(float (&)[kCount]) {}
template <int kLeft, int kParts>
TW_DEVICE void tw_products_but(uint32_t (&)[kParts][4]) {}
TW_DEVICE void tw_hold(uint32_t (&)[4]) {}
TW_DEVICE void tw_matrices(uint32_t (&x)[4], uint32_t address) {
  if (address % 16) abort();
  of_lanes[warp_id()][lane_id()] = address;
  meet_warp();
  for (int i = 0; i < 4; ++i) {
    memcpy(&x[i], memory + of_lanes[warp_id()][i * 8 + lane_id() / 4] + lane_id() % 4 * 4, 4);
  }
  meet_warp();
}
static uint32_t of_warp[32][32][6];
TW_DEVICE void tw_product(float (&d)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
  auto& of = of_warp[warp_id()];
  const int lane = lane_id();
  memcpy(of[lane], a, 16);
  of[lane][4] = low, of[lane][5] = high;
  meet_warp();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      const uint32_t left = of[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const uint32_t right = of[column * 4 + k % 8 / 2][4 + k / 8];
      sum += of_bf16(left >> 16 * (k & 1) & 0xFFFF) * of_bf16(right >> 16 * (k & 1) & 0xFFFF);
    }
    d[i] += sum;
  }
  meet_warp();
}
TW_DEVICE void tw_fence_registers() {}
TW_DEVICE void tw_commit() {}
template <int kCount>
TW_DEVICE void tw_finish(float (&)[kCount]) {}
TW_DEVICE void tw_publish() {}

TW_DEVICE uint32_t tw_pack(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
TW_DEVICE uint32_t tw_permute(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t both = (uint64_t)b << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = both >> 8 * (which >> 4 * i & 7) & 255;
    found |= (which >> 4 * i & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return found;
}
template <uint32_t kMask>
TW_DEVICE uint32_t tw_choose(uint32_t a, uint32_t b) { return (a & kMask) | (b & ~kMask); }
TW_DEVICE uint32_t tw_times(uint32_t a, uint32_t b) {
  return tw_pack(of_bf16(a & 0xFFFF) * of_bf16(b & 0xFFFF), of_bf16(a >> 16) * of_bf16(b >> 16));
}
TW_DEVICE float tw_max_or_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
TW_DEVICE void tw_store16(uint32_t address, uint4 x) { memcpy(memory + address, &x, 16); }
TW_DEVICE void tw_store8(uint32_t address, uint2 x) { memcpy(memory + address, &x, 8); }
TW_DEVICE void tw_store4(uint32_t address, uint32_t x) { memcpy(memory + address, &x, 4); }
TW_DEVICE uint4 tw_load16(uint32_t address) { uint4 x; memcpy(&x, memory + address, 16); return x; }
TW_DEVICE uint32_t tw_load4(uint32_t address) { uint32_t x; memcpy(&x, memory + address, 4); return x; }
TW_DEVICE uint32_t tw_load1(uint32_t address) { return memory[address]; }
TW_DEVICE void tw_copy_bytes(uint32_t to, const void* from, uint32_t count, uint32_t barrier) {
  memcpy(memory + to, from, count);
  tw_arrive(barrier);
}
TW_DEVICE void tw_copy16(uint32_t to, const void* from) { memcpy(memory + to, from, 16); }
TW_DEVICE void tw_copied() {}
TW_DEVICE void tw_prefetch(const void*) {}

// Runs a kernel: the blocks of a grid one after the other, a thread of this machine for each of theirs.
template <class Kernel>
static void run_grid(const int* grid, int threads, Kernel kernel) {
  blockDim = {threads, 1, 1};
  gridDim = {grid[0], grid[1], grid[2]};
  for (int z = 0; z < grid[2]; ++z)
    for (int y = 0; y < grid[1]; ++y)
      for (int x = 0; x < grid[0]; ++x) {
        meetings.clear();
        barriers_of_block.clear();
        memset(memory, 0xFF, sizeof memory);
        std::vector<std::thread> running;
        for (int i = 0; i < threads; ++i) {
          running.emplace_back([=] {
            threadIdx = {i, 0, 0};
            blockIdx = {x, y, z};
            kernel();
          });
        }
        for (auto& thread : running) thread.join();
      }
}
