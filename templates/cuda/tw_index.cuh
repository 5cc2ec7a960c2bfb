// Index scores on a group of four warps: keys are rows of 128 e2m1 codes (64 bytes, then a ue8m0 scale
// per 32), queries are bf16. Column 32 q + 4 s + {0, 1}, {2, 3} of a row is value 2 q, 8 + 2 q of step s
// of the product, so that a thread's quarter of a row is 16 bytes of codes and one scale.
#pragma once
#include "tw_coded.cuh"
#include "tw_select.cuh"

#define TW_STEPS 8

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

// A quarter of the rows of places `row` and `row` + 8; -1 is no row.
struct tw_quarter {
  uint32_t codes[2][4], scale[2];
  bool there[2];

  __device__ __forceinline__ void load(const unsigned char* state, const int64_t (&at)[2]) {
    const int quarter = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[h] = 127;
      there[h] = at[h] >= 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[h][i] = 0;
      if (there[h]) {
        const unsigned char* from = state + at[h];
        scale[h] = __ldg(from + 64 + quarter);
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[h][i] = __ldg((const uint32_t*)from + quarter * 4 + i);
      }
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

// What a thread knows of later tiles: entries of its two places, then their pages, then rows.
template <class Where>
struct tw_coming {
  const Where& where;
  int end, entry[2], paged[2], page[2];

  __device__ __forceinline__ void find_entries(int place) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      entry[h] = place + 8 * h < end ? where.entry_of(place + 8 * h) : -1;
    }
  }
  __device__ __forceinline__ void find_pages() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      paged[h] = entry[h];
      page[h] = entry[h] < 0 ? -1 : where.page_of(entry[h]);
    }
  }
  __device__ __forceinline__ void load(tw_quarter& rows, const unsigned char* state) const {
    int64_t at[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) at[h] = paged[h] < 0 ? -1 : where.row_of(paged[h], page[h]);
    rows.load(state, at);
  }
};

// Keys of the scores of places begin .. end, 64 to a group of warps. Rows of the next tile, pages of the
// one after and entries of the one after that are on their way while a tile is scored.
template <int kHeads, class Where>
TW_DEVICE void tw_score_entries(const unsigned char* state, uint32_t queries,
                                const float (&weights)[kHeads / 4], int begin, int end,
                                const Where& where, int* keys) {
  const int stride = blockDim.x / 128 * 64;
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const uint64_t heads = tw_tile(queries, 16);
  tw_coming<Where> coming{where, end};
  tw_quarter even, odd;
  int tile = begin + __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0) * 64;
  const auto score = [&](const tw_quarter& now, tw_quarter& next) {
    coming.load(next, state);
    coming.find_pages();
    coming.find_entries(tile + 3 * stride + row);
    float d[kHeads / 2];
    uint32_t a[TW_STEPS][4];
    now.operands(a);
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
      const int place = tile + row + 8 * h;
      if ((threadIdx.x & 3) == 0 && place < end) {
        keys[place] = now.there[h] ? tw_order_key(found) : TW_NO_KEY;
      }
    }
    tile += stride;
  };
  coming.find_entries(tile + row);
  coming.find_pages();
  coming.load(even, state);
  coming.find_entries(tile + stride + row);
  coming.find_pages();
  coming.find_entries(tile + 2 * stride + row);
  while (tile < end) {
    score(even, odd);
    if (tile < end) score(odd, even);
  }
}
