// What CUDA that TileLang prints for SM90 calls, on threads of this machine: with the barriers,
// groups and swizzled tiles of tw_hopper.cuh.
#pragma once
#include "tw_hopper.cuh"

#undef __shared__
#define __shared__ static
#define __grid_constant__
#define __restrict__

typedef unsigned char uchar;
typedef unsigned int uint;
struct uint1 { uint32_t x; };
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float x) : bits((uint16_t)to_bf16(x)) {}
  operator float() const { return of_bf16(bits); }
};
struct __nv_bfloat162 { bfloat16_t x, y; };
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }

static inline uint32_t __pack_half2(bfloat16_t low, bfloat16_t high) {
  return low.bits | (uint32_t)high.bits << 16;
}

// A matrix of bf16 whose tiles of box_rows x 64 are brought, zeros outside.
struct CUtensorMap {
  const uint16_t* data;
  int64_t rows, cols;
  int box_rows;
};

struct TileBarrier {
  uint64_t unused;
  uint32_t name() const { return (uint32_t)(uintptr_t)this; }
  void init(uint32_t count) { tw_barrier_init(name(), count); }
  void wait(uint32_t parity) { tw_wait(name(), parity); }
  void arrive() { tw_arrive(name()); }
  void add(int64_t num_bytes, uint32_t arrivals) {
    auto& b = barrier_of(name());
    std::lock_guard<std::mutex> hold(b.lock);
    b.num_bytes += num_bytes;
    b.waiting -= arrivals;
    if (num_bytes < 0 || arrivals) b.end_phase();
  }
  void expect_transaction(uint32_t num_bytes) { add(num_bytes, 0); }
  void arrive_and_expect_tx(uint32_t num_bytes) { add(num_bytes, 1); }
};
#define Barrier TileBarrier

namespace tl {
enum class DataType { kBFloat16, kFloat32 };
struct GmmaDescriptor {
  uint64_t bits = 0;
  uint64_t operator+(int units) const { return (bits & ~0x3FFFull) | ((bits + units) & 0x3FFF); }
};
template <int kSwizzle, int kLead, int kStride, class T>
void initialize_wgmma_descriptor(GmmaDescriptor& d, T* start) {
  static_assert(kSwizzle == 1, "128 bytes");
  d.bits = (uint64_t)(tw_shared(start) >> 4) | (uint64_t)kLead << 16 | (uint64_t)kStride << 32;
}
template <class T>
void increase_descriptor_offset(GmmaDescriptor& d, T num_bytes) { d.bits = d + (int)(num_bytes >> 4); }

template <DataType, DataType, DataType, int kM, int kN, int kK, bool kTurnA, bool kTurnB, int, int>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, int adds) {
  static_assert(kM == 64 && kK == 16 && !kTurnA && !kTurnB, "rows of both operands");
  meet_group();
  const int thread = threadIdx.x % 128;
  float* d = (float*)c;
  for (int i = 0; i < kN / 2; ++i) {
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      sum += by_rows(tile_of(a), row_of(thread, i), k) * by_rows(tile_of(b), column_of(thread, i), k);
    }
    d[i] = adds ? d[i] + sum : sum;
  }
  meet_group();
}
inline void tma_load(const CUtensorMap& map, TileBarrier& barrier, void* to, int k, int row) {
  unsigned char* start = (unsigned char*)to;
  for (int r = 0; r < map.box_rows; ++r)
    for (int i = 0; i < 64; ++i) {
      const bool here = row + r >= 0 && row + r < map.rows && k + i >= 0 && k + i < map.cols;
      const uint16_t value = here ? map.data[(row + r) * map.cols + k + i] : 0;
      uint32_t at = tw_shared(start) + r * 128 + i * 2;
      at ^= (at >> 7 & 7) << 4;
      memcpy(memory + at, &value, 2);
    }
  barrier.add(-(int64_t)map.box_rows * 128, 0);
}
inline void tma_store(const CUtensorMap& map, void* from, int column, int row) {
  uint16_t* data = const_cast<uint16_t*>(map.data);
  for (int r = 0; r < map.box_rows; ++r)
    for (int i = 0; i < 64; ++i) {
      if (row + r >= map.rows || column + i >= map.cols) continue;
      uint32_t at = tw_shared(from) + r * 128 + i * 2;
      at ^= (at >> 7 & 7) << 4;
      memcpy(&data[(row + r) * map.cols + column + i], memory + at, 2);
    }
}
inline void tma_store_arrive() {}
template <int, bool> void tma_store_wait() {}
inline void fence_proxy_async() {}
inline void __sync_thread_partial(int name, int threads) { meet(300 + name, threads); }
// Four matrices of 8 x 8: lane i gives the address of row i % 8 of matrix i / 8.
inline void ptx_stmatrix_m8n8_x4(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  of_lanes[warp_id()][lane_id()] = tw_shared(to);
  meet_warp();
  const uint32_t values[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    memcpy(memory + of_lanes[warp_id()][i * 8 + lane_id() / 4] + lane_id() % 4 * 4, &values[i], 4);
  }
  meet_warp();
}
template <int kThreads>
bool tl_shuffle_elect() { return threadIdx.x % (kThreads ? kThreads : 1 << 30) == 0; }
inline void prefetch_tma_descriptor(const CUtensorMap&) {}
inline void fence_barrier_init() {}
template <int> void warpgroup_reg_alloc() {}
template <int> void warpgroup_reg_dealloc() {}
inline void warpgroup_fence_operand(float*, int) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
template <int> void warpgroup_wait() {}
template <int> void wait_wgmma() {}
}  // namespace tl
