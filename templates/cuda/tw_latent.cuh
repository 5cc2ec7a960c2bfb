// Chunks of an attention row for 64 heads on one group of four warps: scores to weights, the one
// formula that joins chunks in order, and the products with values. A thread holds heads `row` and
// `row` + 8 of 16 and, of every eight columns, two.
#pragma once
#include "tw_coded.cuh"
#include "tw_math.cuh"

#define TW_CHUNK 64
#define TW_PLACED 24  // chunks whose rows are found at once
#define TW_EMPTY (-INFINITY)
#define TW_QUAD(x, operation)                                   \
  x = operation(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));         \
  x = operation(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2))

// Bytes of shared memory: queries, two tiles of rows, two of weights, and what belongs to a chunk.
enum {
  TW_QUERIES = 0,
  TW_ROWS = TW_TILE,
  TW_WEIGHTS = 3 * TW_TILE,
  TW_STATS = TW_WEIGHTS + 2 * 8192,     // largest score and sum of weights of each head
  TW_OFFSETS = TW_STATS + 2 * 512,      // of the rows of chunks that are placed
  TW_MASKS = TW_OFFSETS + TW_PLACED * 512,  // which places of a chunk hold an entry
  TW_BARRIERS = TW_MASKS + TW_PLACED * 8,
  TW_ACROSS = TW_BARRIERS + 64,         // a number of each warp
  TW_SHARED = TW_ACROSS + 64,
};
// Barriers of a slot: its rows are there, its rows are done with, its weights likewise.
enum { TW_FULL = 0, TW_FREE = 2, TW_WEIGHED = 4, TW_READ = 6 };

TW_DEVICE float tw_add(float a, float b) { return __fadd_rn(a, b); }
// What scores are taken from: the largest, or 0 where there is none.
TW_DEVICE float tw_join_shift(float top) { return top == TW_EMPTY ? 0.0f : top; }
TW_DEVICE float tw_join_sum(float first, float first_scale, float next, float next_scale) {
  return __fmaf_rn(first, first_scale, __fmul_rn(next, next_scale));
}

// tw_exp of what is not positive, with its bits down to -87, where results are normal still: the power
// of two is added to the exponent. Below, the result stays at exp(-87).
TW_DEVICE float tw_exp_of_negative(float x) {
  const float t = tw_max_or_nan(x, -87.0f), n = __fmaf_rn(t, 0x1.715476p+0f, 0x1.8p+23f);
  const float m = __fsub_rn(n, 0x1.8p+23f);
  const float r = __fmaf_rn(m, 0x1.05c61p-29f, __fmaf_rn(m, -0x1.62e43p-1f, t));
  float y = __fmaf_rn(r, 0x1.64102cp-10f, 0x1.1233aep-7f);
  y = __fmaf_rn(__fmaf_rn(y, r, 0x1.55611p-5f), r, 0x1.55549cp-3f);
  y = __fmaf_rn(__fmul_rn(r, r), __fmaf_rn(y, r, 0x1.fffff2p-2f), r);
  y = __fadd_rn(y, 1.0f);
  return __int_as_float((int)((uint32_t)__float_as_int(y) + ((uint32_t)__float_as_int(n) << 23)));
}

// A running maximum and sum, and the factors on the values so far and on those of the next chunk.
struct tw_running {
  float top = TW_EMPTY, total = 0.0f, keep = 0.0f, take = 0.0f;  // keep: in the end, of all values

  __device__ __forceinline__ void join(float next_top, float next_total) {
    const float new_top = fmaxf(top, next_top), shift = tw_join_shift(new_top);
    keep = tw_exp_of_negative(top - shift);
    take = tw_exp_of_negative(next_top - shift);
    total = tw_join_sum(total, keep, next_total, take);
    top = new_top;
  }

  // The sink joins the sum of weights: `keep` is then the factor on the values.
  __device__ __forceinline__ void finish(float sink) {
    const float shift = tw_join_shift(fmaxf(top, sink));
    keep = tw_exp(top - shift);
    total = __fmaf_rn(total, keep, tw_exp(sink - shift));
    keep = __fdiv_rn(keep, total);
  }
};

// The largest number of a block's threads; `across` has room for one a warp.
TW_DEVICE int tw_block_max(int x, int* across) {
  x = __reduce_max_sync(0xFFFFFFFFu, x);
  if ((threadIdx.x & 31) == 0) across[threadIdx.x >> 5] = x;
  __syncthreads();
  for (int i = 0; i < (int)blockDim.x / 32; ++i) x = max(x, across[i]);
  return x;
}

// Sends for the queries of 64 heads, by 512 threads.
TW_DEVICE void tw_load_queries(const void* queries, uint32_t base) {
  const uint4* from = (const uint4*)queries;
#pragma unroll
  for (int i = threadIdx.x; i < 64 * 64; i += 512) {
    const int row = i >> 6, piece = i & 63;
    tw_copy16(base + (piece >> 3) * TW_PANEL + row * 128 + (((piece & 7) ^ (row & 7)) << 4),
              from + i);
  }
}

TW_DEVICE void tw_score_chunk(float (&d)[32], uint32_t queries, uint32_t rows) {
  const uint64_t a = tw_tile(queries, 16), b = tw_tile(rows, 16);
  tw_fence_registers();
#pragma unroll
  for (int k = 0; k < 32; ++k) {
    const uint32_t at = (k >> 2) * TW_PANEL + (k & 3) * 32;
    tw_scores(d, tw_tile_at(a, at), tw_tile_at(b, at), k > 0);
  }
  tw_commit();
  tw_finish(d);
}

// Scores d to weights as bf16 pairs p; the largest score and the sum of the weights of both heads.
// Sums run over a thread's columns in order, then over the four threads of a head as a tree.
TW_DEVICE void tw_weigh(float (&d)[32], uint32_t (&p)[16], float (&most)[2], float (&sums)[2],
                        const uint32_t* mask, float scale, int lane) {
  const uint32_t low = mask[0], high = mask[1];
#pragma unroll
  for (int h = 0; h < 2; ++h) most[h] = TW_EMPTY, sums[h] = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int column = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), h = (i >> 1) & 1;
    const bool seen = ((i < 16 ? low : high) >> (column & 31)) & 1;
    d[i] = seen ? __fmul_rn(d[i], scale) : TW_EMPTY;
    most[h] = fmaxf(most[h], d[i]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    TW_QUAD(most[h], fmaxf);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float shift = tw_join_shift(most[i & 1]), a = d[2 * i], b = d[2 * i + 1];
    // Both are taken before they are chosen: a branch around each would let none run beside another.
    const float of_a = tw_exp_of_negative(a - shift), of_b = tw_exp_of_negative(b - shift);
    const float first = a == TW_EMPTY ? 0.0f : of_a, second = b == TW_EMPTY ? 0.0f : of_b;
    p[i] = tw_pack(first, second);
    sums[i & 1] = tw_add(sums[i & 1], tw_add(first, second));
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    TW_QUAD(sums[h], tw_add);
  }
}

// Weights and what belongs to them, where both groups read them.
TW_DEVICE void tw_store_weights(const uint32_t (&p)[16], const float (&most)[2],
                                const float (&sums)[2], uint32_t weights, float* stats, int thread,
                                int row) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    tw_store16(weights + (i * 128 + thread) * 16,
               make_uint4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]));
  }
  if ((thread & 3) == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      stats[row + 8 * h] = most[h];
      stats[64 + row + 8 * h] = sums[h];
    }
  }
}

TW_DEVICE void tw_load_weights(uint32_t (&p)[4][4], uint32_t weights, int thread) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 x = tw_load16(weights + (i * 128 + thread) * 16);
    p[i][0] = x.x, p[i][1] = x.y, p[i][2] = x.z, p[i][3] = x.w;
  }
}

// Sends for part [64, 32] = weights times 32 columns of the rows.
TW_DEVICE void tw_mix_columns(float (&part)[16], const uint32_t (&p)[4][4], uint64_t rows, int j) {
  const uint32_t columns = j / 2 * TW_PANEL + j % 2 * 64;
  tw_fence_registers();
#pragma unroll
  for (int k = 0; k < 4; ++k) tw_mix(part, p[k], tw_tile_at(rows, columns + k * 2048), k > 0);
  tw_commit();
}
