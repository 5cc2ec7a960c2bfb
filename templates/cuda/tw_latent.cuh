// Chunks of an attention row for 64 heads on groups of four warps: scores to weights, the one formula
// that joins chunks in order, and the products with values. A thread holds heads `row` and
// `row` + 8 of 16 and, of every eight columns, two.
#pragma once
#include "tw_coded.cuh"
#include "tw_math.cuh"

#define TW_CHUNK 64
#define TW_PLACED 24  // chunks whose rows are found at once
#define TW_MASKED 32  // chunks whose masks are kept
#define TW_EMPTY (-INFINITY)
#define TW_QUAD(x, operation)                                   \
  x = operation(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));         \
  x = operation(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2))

// Bytes of shared memory: queries, two tiles of rows, weights of a chunk (of two, where chunks are
// split), and what belongs to a chunk or a token.
enum {
  TW_QUERIES = 0,
  TW_ROWS = TW_TILE,
  TW_WEIGHTS = 3 * TW_TILE,
  TW_STATS = TW_WEIGHTS + 2 * 8192,     // largest score and sum of weights of each head
  TW_NUMBERS = TW_STATS + 2 * 512,      // of the rows of chunks that are placed
  TW_MASKS = TW_NUMBERS + TW_PLACED * 256,  // which places of a chunk hold an entry
  TW_BARRIERS = TW_MASKS + TW_MASKED * 8,
  TW_COUNTS = TW_BARRIERS + 80,         // chunks of a token
  TW_ACROSS = TW_COUNTS + 16,           // a number of each warp
  TW_SHARED = TW_ACROSS + 64,
};
// Barriers, two of each but the last. Of a slot: its rows are there, its rows are done with. Of a token:
// its chunks are counted, the count has been read. Weights are there.
enum { TW_FULL = 0, TW_FREE = 2, TW_COUNTED = 4, TW_TAKEN = 6, TW_WEIGHED = 8 };

TW_DEVICE float tw_add(float a, float b) { return __fadd_rn(a, b); }
// What scores are taken from: the largest, or 0 where there is none.
TW_DEVICE float tw_join_shift(float top) { return top == TW_EMPTY ? 0.0f : top; }
TW_DEVICE float tw_join_sum(float first, float first_scale, float next, float next_scale) {
  return __fmaf_rn(first, first_scale, __fmul_rn(next, next_scale));
}

// 2^x of what is not above 1, to 1.6e-7 of it: the power of two is added to the exponent of a
// polynomial on [-1/2, 1/2]. Below -125 the result stays 2^-125: a weight that adds nothing to 1.
TW_DEVICE float tw_exp2_of_negative(float x) {
  const float t = tw_max_or_nan(x, -125.0f), n = __fadd_rn(t, 0x1.8p+23f);
  const float r = __fsub_rn(t, __fsub_rn(n, 0x1.8p+23f));
  float y = __fmaf_rn(r, 0x1.5bba14p-10f, 0x1.3cea88p-7f);
  y = __fmaf_rn(y, r, 0x1.c6b752p-5f);
  y = __fmaf_rn(y, r, 0x1.ebf9bcp-3f);
  y = __fmaf_rn(y, r, 0x1.62e42ap-1f);
  y = __fmaf_rn(y, r, 1.0f);
  return __int_as_float((int)((uint32_t)__float_as_int(y) + ((uint32_t)__float_as_int(n) << 23)));
}

// A running maximum and sum, and the factors on the values so far and on those of the next chunk.
// Scores and maxima are in powers of two: products with log2(e).
struct tw_running {
  float top = TW_EMPTY, total = 0.0f, keep = 0.0f, take = 0.0f;  // keep: in the end, of all values

  __device__ __forceinline__ void join(float next_top, float next_total) {
    const float new_top = fmaxf(top, next_top), shift = tw_join_shift(new_top);
    keep = tw_exp2_of_negative(top - shift);
    take = tw_exp2_of_negative(next_top - shift);
    total = tw_join_sum(total, keep, next_total, take);
    top = new_top;
  }

  // The sink joins the sum of weights: `keep` is then the factor on the values.
  __device__ __forceinline__ void finish(float sink) {
    const float last = __fmul_rn(sink, 0x1.715476p+0f), shift = tw_join_shift(fmaxf(top, last));
    keep = tw_exp2_of_negative(top - shift);
    total = __fmaf_rn(total, keep, tw_exp2_of_negative(last - shift));
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

// Sends for the queries of 64 heads, by a thread of so many.
template <int kThreads>
TW_DEVICE void tw_load_queries(const void* queries, uint32_t base, int thread) {
  const uint4* from = (const uint4*)queries;
#pragma unroll 8
  for (int i = thread; i < 64 * 64; i += kThreads) {
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

// Scores d to weights as bf16 pairs p; the largest score and the sum of the weights of both heads,
// `scale` being that of scores as powers of two. Sums run over a thread's columns in order, then over
// the four threads of a head as a tree.
TW_DEVICE void tw_weigh(float (&d)[32], uint32_t (&p)[16], float (&most)[2], float (&sums)[2],
                        const uint32_t* mask, float scale, int lane) {
  const uint32_t low = mask[0], high = mask[1];
  if ((low & high) != 0xFFFFFFFFu) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int column = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
      if (!(((i < 16 ? low : high) >> (column & 31)) & 1)) d[i] = TW_EMPTY;
    }
  }
  float shift[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    most[h] = d[2 * h];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (((i >> 1) & 1) == h) most[h] = fmaxf(most[h], d[i]);
    }
    TW_QUAD(most[h], fmaxf);
    most[h] = __fmul_rn(most[h], scale);
    shift[h] = -tw_join_shift(most[h]);
    sums[h] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float a = tw_exp2_of_negative(__fmaf_rn(d[2 * i], scale, shift[i & 1]));
    const float b = tw_exp2_of_negative(__fmaf_rn(d[2 * i + 1], scale, shift[i & 1]));
    p[i] = tw_pack(a, b);
    sums[i & 1] = tw_add(sums[i & 1], tw_add(a, b));
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    TW_QUAD(sums[h], tw_add);
  }
}

// Weights and what belongs to them, where the other group reads them. A group that stores has read
// what the other stored before it, each thread from the same places.
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

TW_DEVICE void tw_load_weights(uint32_t (&p)[16], uint32_t weights, int thread) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 x = tw_load16(weights + (i * 128 + thread) * 16);
    p[4 * i] = x.x, p[4 * i + 1] = x.y, p[4 * i + 2] = x.z, p[4 * i + 3] = x.w;
  }
}

// Four words of four threads: a thread gives word i to the i-th of them and has theirs.
TW_DEVICE uint4 tw_transpose(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int lane) {
  const bool odd = lane & 1, later = lane & 2;
  const uint32_t x = __shfl_xor_sync(0xFFFFFFFFu, odd ? a : b, 1);
  const uint32_t y = __shfl_xor_sync(0xFFFFFFFFu, odd ? c : d, 1);
  if (odd) a = x, c = y;
  else b = x, d = y;
  const uint32_t z = __shfl_xor_sync(0xFFFFFFFFu, later ? a : c, 2);
  const uint32_t w = __shfl_xor_sync(0xFFFFFFFFu, later ? b : d, 2);
  return later ? make_uint4(z, w, c, d) : make_uint4(a, b, z, w);
}

// Sends for part [64, 64] or [64, 32] = weights times columns `column` and after of the rows.
template <int kCount>
TW_DEVICE void tw_mix_columns(float (&part)[kCount], const uint32_t (&p)[16], uint64_t rows,
                              int column) {
  const uint32_t at = column / 64 * TW_PANEL + column % 64 * 2;
  tw_fence_registers();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t of_k[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
    tw_mix(part, of_k, tw_tile_at(rows, at + k * 2048), k > 0);
  }
  tw_commit();
}
