// Index scores on a group of four warps: keys are rows of 128 e2m1 codes (64 bytes, then a ue8m0 scale
// per 32), queries are bf16. Column 32 q + 4 s + {0, 1}, {2, 3} of a row is value 2 q, 8 + 2 q of step s
// of the product, so that a thread's quarter of a row is 16 bytes of codes and one scale.
#pragma once
#include "tw_coded.cuh"
#include "tw_select.cuh"

#define TW_STEPS 8
#define TW_KEY_ROW 68  // bytes of a key
#define TW_KEY_TILES 8  // of 16 keys that a warp has in flight
enum { TW_KEY_TILE = 16 * TW_KEY_ROW, TW_KEYS_OF_WARP = TW_KEY_TILES * (TW_KEY_TILE + 8 + 16) };

// Queries of all heads, in the order of the steps: two panels of 64 values of k.
template <int kHeads>
TW_DEVICE void tw_load_index_queries(const unsigned short* from, uint32_t queries) {
  const uint2* pieces = (const uint2*)from;  // of four columns
  for (int i = threadIdx.x; i < kHeads * 32; i += blockDim.x) {
    const int head = i / 32, quarter = i % 32 / 8, step = i % 8;
    const uint2 x = __ldg(pieces + i);
    const uint32_t line = queries + step / 4 * kHeads * 128 + head * 128;
    const int unit = step % 4 * 2;
    tw_store4(line + ((unit ^ (head & 7)) << 4) + quarter * 4, x.x);
    tw_store4(line + (((unit + 1) ^ (head & 7)) << 4) + quarter * 4, x.y);
  }
}

TW_DEVICE float tw_float(float x) { return x; }
TW_DEVICE float tw_float(unsigned short x) { return __int_as_float((int)x << 16); }

// Weights of the heads whose products a thread holds.
template <int kHeads, class Weight>
TW_DEVICE void tw_load_index_weights(float (&weights)[kHeads / 4], const Weight* from) {
#pragma unroll
  for (int i = 0; i < kHeads / 4; ++i) {
    weights[i] = tw_float(__ldg(from + i / 2 * 8 + (threadIdx.x & 3) * 2 + i % 2));
  }
}

// A quarter of two rows.
struct tw_quarter {
  uint32_t codes[2][4], scale[2];

  __device__ __forceinline__ void read(uint32_t tile) {
    const int quarter = threadIdx.x & 3, row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t from = tile + (row + 8 * h) * TW_KEY_ROW;
      scale[h] = tw_load1(from + 64 + quarter);
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[h][i] = tw_load4(from + quarter * 16 + i * 4);
    }
  }

  __device__ __forceinline__ void operands(uint32_t (&a)[TW_STEPS][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t pair = tw_scale_pair<false>(scale[h]);
#pragma unroll
      for (int step = 0; step < TW_STEPS; ++step) {
        const uint2 values = tw_e2m1_four(codes[h][step / 2] >> step % 2 * 16);
        a[step][h] = tw_times(values.x, pair), a[step][2 + h] = tw_times(values.y, pair);
      }
    }
  }
};

// The sum over heads of one entry: a thread's heads in order, then four threads as a tree.
template <int kHeads>
TW_DEVICE float tw_index_score(const float (&d)[kHeads / 2], const float (&weights)[kHeads / 4],
                               int h) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeads / 4; ++i) {
    const float dot = d[i / 2 * 4 + h * 2 + i % 2];
    sum = __fmaf_rn(dot < 0.0f ? 0.0f : dot, weights[i], sum);
  }
  sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 1));
  return __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 2));
}

// Keys on their way to a warp, 16 of each of its tiles, in segments of kSegment that lie together.
// Half of the tiles are sent for at once, a segment by a lane.
template <int kSegment, class Where>
struct tw_key_stream {
  static constexpr int kParts = 16 / kSegment, kHalf = TW_KEY_TILES / 2;
  static_assert(kHalf * kParts <= 32, "a lane for each segment");
  const unsigned char* state;
  const Where& where;
  uint32_t keys, came, entries;  // tiles, their barriers, where their segments begin
  int first, end, stride, lane;

  __device__ __forceinline__ tw_key_stream(const unsigned char* state, const Where& where,
                                           uint32_t memory, int first, int end, int stride)
      : state(state), where(where), keys(memory), came(memory + TW_KEY_TILES * TW_KEY_TILE),
        entries(came + 8 * TW_KEY_TILES), first(first), end(end), stride(stride),
        lane(threadIdx.x & 31) {
    if (lane < TW_KEY_TILES) tw_barrier_init(came + 8 * lane, kParts);
    tw_barriers_ready();
    __syncwarp();
    send(0);
    send(kHalf);
  }

  __device__ __forceinline__ void send(int tile) const {
    const int part = lane % kParts, own = tile + lane / kParts, slot = own % TW_KEY_TILES;
    if (lane >= kHalf * kParts) return;
    const int place = first + own * stride + part * kSegment;
    if (place < end) {
      const int entry = where.entry_of(place);
      tw_store4(entries + (slot * kParts + part) * 4, (uint32_t)entry);
      tw_copy_bytes(keys + slot * TW_KEY_TILE + part * kSegment * TW_KEY_ROW,
                    state + where.row_of(entry, where.page_of(entry)), kSegment * TW_KEY_ROW,
                    came + 8 * slot);
    } else {
      tw_arrive(came + 8 * slot);
    }
  }

  // A tile; whether each of a thread's two rows is of a visible entry, where it is one of `end` places.
  __device__ __forceinline__ void read(int tile, tw_quarter& rows, bool (&there)[2]) const {
    const int slot = tile % TW_KEY_TILES;
    tw_wait(came + 8 * slot, tile / TW_KEY_TILES & 1);
    rows.read(keys + slot * TW_KEY_TILE);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h, segment = slot * kParts + row / kSegment;
      there[h] = where.shows((int)tw_load4(entries + segment * 4) + row % kSegment);
    }
    __syncwarp();
    if (tile % kHalf == kHalf - 1) send(tile + 1 + kHalf);
  }
};

// Keys of the scores of places begin .. end, 64 to a group of warps. `memory`: of all warps' streams.
template <int kHeads, int kSegment, class Where, class Weight>
TW_DEVICE void tw_score_entries(const unsigned char* state, const unsigned short* q,
                                const Weight* w, uint32_t queries, uint32_t memory, int begin,
                                int end, const Where& where, int* scores) {
  const int stride = blockDim.x / 128 * 64, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int row = threadIdx.x % 32 / 4, own = begin + warp * 16;
  const uint64_t heads = tw_tile(queries, 16);
  const tw_key_stream<kSegment, Where> stream(state, where, memory + warp * TW_KEYS_OF_WARP, own,
                                              end, stride);
  tw_load_index_queries<kHeads>(q, queries);
  float weights[kHeads / 4];
  tw_load_index_weights<kHeads>(weights, w);
  tw_publish();
  __syncthreads();
  for (int n = 0; begin + warp / 4 * 64 + n * stride < end; ++n) {
    tw_quarter rows;
    bool there[2];
    stream.read(n, rows, there);
    float d[kHeads / 2];
    uint32_t a[TW_STEPS][4];
    rows.operands(a);
    tw_fence_registers();
#pragma unroll
    for (int step = 0; step < TW_STEPS; ++step) {
      tw_score_rows(d, a[step], tw_tile_at(heads, step / 4 * kHeads * 128 + step % 4 * 32), step > 0);
    }
    tw_commit();
    tw_finish(d);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float found = tw_index_score<kHeads>(d, weights, h);
      const int place = own + n * stride + row + 8 * h;
      if ((threadIdx.x & 3) == 0 && place < end) {
        scores[place] = there[h] ? tw_order_key(found) : TW_NO_KEY;
      }
    }
  }
}
