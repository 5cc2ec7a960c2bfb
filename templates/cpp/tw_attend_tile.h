// The inner loops of paged attention: one unit (a chunk of positions) for a tile of rows.
//
// Order of every sum, which decides the bits and depends on nothing but the row itself:
//   score    fma along the width, one lane per position, from +0; then times the scale
//   maximum  exact, so any order
//   sum l    lane i adds the weights of positions i, i + 16, ... of the unit in order; then the tree of tw::sum
//   value o  fma along the positions of the unit in order, one lane per column, from +0
// A position that a row does not see takes part in none of them.
// `tw_exp` (the prelude of the translation unit) is declared before this file.
#pragma once
#include "tw_vec.h"

// A call costs nothing next to these loops, and all schedules of a translation unit share one copy.
#define TW_SHARED __attribute__((noinline, unused))

namespace tw {

constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }

static TW_INLINE v16 load_cache(const float* p) { return load(p); }
static TW_INLINE v16 load_cache(const uint16_t* p) { return load_bf16(p); }
static TW_INLINE float cache_f32(float x) { return x; }
static TW_INLINE float cache_f32(uint16_t x) { return f32_from_bf16(x); }

#if defined(__AVX2__)
// Four words of one row in the low half, of another in the high half.
static TW_INLINE __m256 load4x2(const void* low, const void* high) {
  const __m256 a = _mm256_castps128_ps256(_mm_loadu_ps((const float*)low));
  return _mm256_insertf128_ps(a, _mm_loadu_ps((const float*)high), 1);
}

// out[i][j] = word i of rows[j], for 4 words of 8 rows.
static TW_INLINE void transpose4(const float* const* rows, __m256* out) {
  __m256 a[4], b[4];
  TW_UNROLL(4)
  for (int j = 0; j < 4; ++j) a[j] = load4x2(rows[j], rows[j + 4]);
  b[0] = _mm256_unpacklo_ps(a[0], a[1]);
  b[1] = _mm256_unpackhi_ps(a[0], a[1]);
  b[2] = _mm256_unpacklo_ps(a[2], a[3]);
  b[3] = _mm256_unpackhi_ps(a[2], a[3]);
  out[0] = _mm256_shuffle_ps(b[0], b[2], 0x44);
  out[1] = _mm256_shuffle_ps(b[0], b[2], 0xee);
  out[2] = _mm256_shuffle_ps(b[1], b[3], 0x44);
  out[3] = _mm256_shuffle_ps(b[1], b[3], 0xee);
}

// out[i * stride + j] = rows[j][column + i] for i, j < 8. Pairs of bf16 are moved as words.
static TW_INLINE void transpose8(const float* const* rows, int column, float* out, int stride) {
  TW_UNROLL(2)
  for (int i = 0; i < 8; i += 4) {
    const float* from[8];
    __m256 words[4];
    for (int j = 0; j < 8; ++j) from[j] = rows[j] + column + i;
    transpose4(from, words);
    for (int k = 0; k < 4; ++k) _mm256_storeu_ps(out + (i + k) * stride, words[k]);
  }
}
static TW_INLINE void transpose8(const uint16_t* const* rows, int column, float* out, int stride) {
  const __m256 high = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000u));
  const float* from[8];
  __m256 words[4];
  for (int j = 0; j < 8; ++j) from[j] = (const float*)(rows[j] + column);
  transpose4(from, words);
  for (int k = 0; k < 4; ++k) {
    const __m256i even = _mm256_slli_epi32(_mm256_castps_si256(words[k]), 16);
    _mm256_storeu_ps(out + 2 * k * stride, _mm256_castsi256_ps(even));
    _mm256_storeu_ps(out + (2 * k + 1) * stride, _mm256_and_ps(words[k], high));
  }
}

// The trees of tw::sum and tw::max_lane in registers.
static TW_INLINE __m128 quarters(v16 a, bool add, __m128* other) {
#if defined(__AVX512F__)
  const __m256 x = _mm512_castps512_ps256(a.x), y = _mm512_extractf32x8_ps(a.x, 1);
#else
  const __m256 x = a.x, y = a.y;
#endif
  const __m256 half = add ? _mm256_add_ps(x, y) : _mm256_max_ps(x, y);
  *other = _mm256_extractf128_ps(half, 1);
  return _mm256_castps256_ps128(half);
}
static TW_INLINE float sum_lanes(v16 a) {
  __m128 high;
  __m128 x = quarters(a, true, &high);
  x = _mm_add_ps(x, high);
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static TW_INLINE float largest_lane(v16 a) {
  __m128 high;
  __m128 x = quarters(a, false, &high);
  x = _mm_max_ps(x, high);
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
#else
template <class Cache>
static TW_INLINE void transpose8(const Cache* const* rows, int column, float* out, int stride) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) out[i * stride + j] = cache_f32(rows[j][column + i]);
}
static TW_INLINE float sum_lanes(v16 a) { return sum(a); }
static TW_INLINE float largest_lane(v16 a) { return max_lane(a); }
#endif

// The keys of `count` positions (a multiple of 16) as keys[width][stride]; the values of the same
// positions are asked from memory meanwhile, if given.
template <class Cache, int WIDTH, int STRIDE>
static TW_SHARED void transpose_keys(const Cache* cache, const Cache* values, const int64_t* offset, int count,
                                     float* keys) {
  constexpr int LINE = 64 / (int)sizeof(Cache);
  for (int j = 0; j < count; j += 8) {
    const Cache* rows[8];
    for (int i = 0; i < 8; ++i) rows[i] = cache + offset[j + i];
    if (values)
      for (int i = 0; i < 8; ++i)
        for (int d = 0; d < WIDTH; d += LINE) prefetch(values + offset[j + i] + d);
    for (int d = 0; d < WIDTH; d += 8) transpose8(rows, d, keys + d * STRIDE + j, STRIDE);
  }
}

// The values of `count` positions in fp32 as staged[count][stride]; columns beyond the width are 0.
template <class Cache, int WIDTH, int STRIDE>
static TW_SHARED void stage_values(const Cache* cache, const int64_t* offset, int count, float* staged) {
  for (int j = 0; j < count; ++j) {
    const Cache* row = cache + offset[j];
    float* out = staged + j * STRIDE;
    int d = 0;
    for (; d + 16 <= WIDTH; d += 16) store(out + d, load_cache(row + d));
    for (; d < WIDTH; ++d) out[d] = cache_f32(row[d]);
    for (; d < STRIDE; ++d) out[d] = 0.0f;
  }
}

// Vectors of 16 columns that R rows can keep in registers; converting bf16 needs some of them.
template <int R, class T>
constexpr int tile_columns() {
#if defined(__AVX512F__)
  constexpr int ACCUMULATORS = 24;
#else
  constexpr int ACCUMULATORS = sizeof(T) == 2 ? 5 : 6;
#endif
  return ACCUMULATORS / R >= 4 ? 4 : ACCUMULATORS / R >= 2 ? 2 : 1;
}

// acc[r][c] += x[r] * y[c]. With few rows their factors stay in registers, with many the columns do: either
// way the tile fits into 16 registers of AVX2.
template <int R, int C, int X_STRIDE, class T>
static TW_INLINE void multiply_add(const float* x, const T* y, v16 (&acc)[R][C]) {
  if constexpr (C > 1) {
    v16 factor[R];
    TW_UNROLL(16)
    for (int r = 0; r < R; ++r) factor[r] = set1(x[r * X_STRIDE]);
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) {
      const v16 column = load_cache(y + 16 * c);
      TW_UNROLL(16)
      for (int r = 0; r < R; ++r) acc[r][c] = fma(factor[r], column, acc[r][c]);
    }
  } else {
    const v16 column = load_cache(y);
    TW_UNROLL(16)
    for (int r = 0; r < R; ++r) acc[r][0] = fma(set1(x[r * X_STRIDE]), column, acc[r][0]);
  }
}

// scores[r][j] = scale * sum over d of q[r][d] * keys[d][j], for 16 * C positions.
template <int R, int C, int WIDTH, int STRIDE>
static TW_INLINE void score_block(const float* q, const float* keys, float scale, float* scores) {
  v16 acc[R][C];
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) acc[r][c] = zero();
  }
  for (int d = 0; d < WIDTH; ++d) multiply_add<R, C, WIDTH>(q + d, keys + d * STRIDE, acc);
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) store(scores + r * STRIDE + c * 16, mul(acc[r][c], set1(scale)));
  }
}

template <int R, int WIDTH, int STRIDE>
static TW_SHARED void score_rows(const float* q, const float* keys, int count, float scale, float* scores) {
  constexpr int C = tile_columns<R, float>();
  int j = 0;
  for (; j + 16 * C <= count; j += 16 * C)
    score_block<R, C, WIDTH, STRIDE>(q, keys + j, scale, scores + j);
  if constexpr (C > 1)
    for (; j < count; j += 16) score_block<R, 1, WIDTH, STRIDE>(q, keys + j, scale, scores + j);
}

// A row that has seen only -inf so far has maximum -inf; its weights are exp(-inf - 0) = 0, not exp(NaN).
static TW_INLINE float finite_shift(float maximum) { return maximum == -__builtin_inff() ? 0.0f : maximum; }

// Scores become weights in place; positions from `visible` to the next multiple of 16 weigh 0, and rows that
// see nothing are left alone. Three passes over the rows: in one, each step would wait for the one before.
template <int STRIDE>
static TW_SHARED void weigh_rows(float* scores, const int* visible, int rows, float* maximum, float* total) {
  for (int r = 0; r < rows; ++r) {
    float* row = scores + r * STRIDE;
    const int padded = round_up(visible[r], 16);
    if (padded == 0) continue;
    for (int j = visible[r]; j < padded; ++j) row[j] = -__builtin_inff();
    v16 top = load(row);
    for (int j = 16; j < padded; j += 16) top = max(load(row + j), top);
    maximum[r] = largest_lane(top);
  }
  for (int r = 0; r < rows; ++r) {
    float* row = scores + r * STRIDE;
    const int padded = round_up(visible[r], 16);
    const float shift = finite_shift(maximum[r]);
    for (int j = 0; j < padded; ++j) row[j] = tw_exp(row[j] - shift);
    for (int j = visible[r]; j < padded; ++j) row[j] = 0.0f;
  }
  for (int r = 0; r < rows; ++r) {
    const float* row = scores + r * STRIDE;
    const int padded = round_up(visible[r], 16);
    if (padded == 0) continue;
    v16 lanes = load(row);
    for (int j = 16; j < padded; j += 16) lanes = add(lanes, load(row + j));
    total[r] = sum_lanes(lanes);
  }
}

// Where the values of a unit are: staged fp32 rows, or the rows of the cache itself, which lie side by side
// within a block. run(j) is the position after the last one of j's block.
template <int STRIDE>
struct staged_rows {
  using type = float;
  static constexpr int STEP = STRIDE;
  const float* base;
  TW_INLINE const float* at(int j) const { return base + j * STRIDE; }
  TW_INLINE int run(int) const { return 1 << 30; }
};
template <class Cache, int WIDTH, int CHUNK, int BLOCK_SIZE>
struct cache_rows {
  using type = Cache;
  static constexpr int STEP = WIDTH;
  const Cache* base;
  const int64_t* offset;
  int first_entry;  // entry, in its block, of the unit's first position
  TW_INLINE const Cache* at(int j) const { return base + offset[j]; }
  TW_INLINE int run(int j) const {
    const int entry = CHUNK % BLOCK_SIZE == 0 ? j % BLOCK_SIZE : (first_entry + j) % BLOCK_SIZE;
    return j + BLOCK_SIZE - entry;
  }
};

// What happens to the weighted values of a unit: out = o, or out = out * keep + o * gain.
struct fold_factors {
  const float* keep;
  const float* gain;
  bool first;
};

struct target {
  float* base;
  int stride;
};

template <int R, int C, int STRIDE, class Rows>
static TW_INLINE void value_block(const float* weights, Rows rows, const int* visible, int common, int d,
                                  fold_factors fold, target out) {
  v16 acc[R][C];
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) acc[r][c] = zero();
  }
  for (int j = 0; j < common;) {
    const auto* row = rows.at(j) + d;
    const int run = rows.run(j), end = run < common ? run : common;
    for (; j < end; ++j, row += Rows::STEP) multiply_add<R, C, STRIDE>(weights + j, row, acc);
  }
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    if (visible[r] <= 0) continue;
    for (int j = common; j < visible[r]; ++j) {
      const v16 weight = set1(weights[r * STRIDE + j]);
      TW_UNROLL(4)
      for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, load_cache(rows.at(j) + d + 16 * c), acc[r][c]);
    }
    float* row = out.base + r * out.stride + d;
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) {
      if (fold.first)
        store(row + 16 * c, acc[r][c]);
      else
        store(row + 16 * c, fma(load(row + 16 * c), set1(fold.keep[r]), mul(acc[r][c], set1(fold.gain[r]))));
    }
  }
}

// Rows see different numbers of positions; those that all of them see go through the register tile, the
// rest row by row in the same order: a masked product would not do, 0 * NaN is NaN and -0 + 0 is +0.
template <int R, int WIDTH, int STRIDE, class Rows>
static TW_SHARED void value_rows(const float* weights, Rows rows, const int* visible, fold_factors fold, target out) {
  constexpr int C = tile_columns<R, typename Rows::type>();
  int common = 1 << 30;
  for (int r = 0; r < R; ++r)
    if (visible[r] > 0 && visible[r] < common) common = visible[r];
  int d = 0;
  for (; d + 16 * C <= WIDTH; d += 16 * C)
    value_block<R, C, STRIDE>(weights, rows, visible, common, d, fold, out);
  if constexpr (WIDTH % (16 * C) != 0)
    for (; d < WIDTH; d += 16) value_block<R, 1, STRIDE>(weights, rows, visible, common, d, fold, out);
}

}  // namespace tw
