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
static TW_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
static TW_INLINE __m256 load8(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

// out[i * stride + j] = rows[j][i] for i, j < 8.
template <class Cache>
static TW_INLINE void transpose8(const Cache* const* rows, int column, float* out, int stride) {
  __m256 a[8], b[8];
  TW_UNROLL(8)
  for (int j = 0; j < 8; ++j) a[j] = load8(rows[j] + column);
  TW_UNROLL(4)
  for (int j = 0; j < 8; j += 2) {
    b[j] = _mm256_unpacklo_ps(a[j], a[j + 1]);
    b[j + 1] = _mm256_unpackhi_ps(a[j], a[j + 1]);
  }
  TW_UNROLL(2)
  for (int j = 0; j < 8; j += 4) {
    a[j] = _mm256_shuffle_ps(b[j], b[j + 2], 0x44);
    a[j + 1] = _mm256_shuffle_ps(b[j], b[j + 2], 0xee);
    a[j + 2] = _mm256_shuffle_ps(b[j + 1], b[j + 3], 0x44);
    a[j + 3] = _mm256_shuffle_ps(b[j + 1], b[j + 3], 0xee);
  }
  TW_UNROLL(4)
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_ps(out + j * stride, _mm256_permute2f128_ps(a[j], a[j + 4], 0x20));
    _mm256_storeu_ps(out + (j + 4) * stride, _mm256_permute2f128_ps(a[j], a[j + 4], 0x31));
  }
}
#else
template <class Cache>
static TW_INLINE void transpose8(const Cache* const* rows, int column, float* out, int stride) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) out[i * stride + j] = cache_f32(rows[j][column + i]);
}
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
    for (int d = 0; d < WIDTH; d += 8) {
      if (values && d % LINE == 0)
        for (int i = 0; i < 8; ++i) prefetch(values + offset[j + i] + d);
      transpose8(rows, d, keys + d * STRIDE + j, STRIDE);
    }
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

// Vectors of 16 columns that R rows can keep in registers.
template <int R>
constexpr int tile_columns() {
#if defined(__AVX512F__)
  constexpr int ACCUMULATORS = 24;
#else
  constexpr int ACCUMULATORS = 6;
#endif
  return ACCUMULATORS / R >= 4 ? 4 : ACCUMULATORS / R >= 2 ? 2 : 1;
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
  for (int d = 0; d < WIDTH; ++d) {
    v16 key[C];
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) key[c] = load(keys + d * STRIDE + c * 16);
    TW_UNROLL(16)
    for (int r = 0; r < R; ++r) {
      const v16 x = set1(q[r * WIDTH + d]);
      TW_UNROLL(4)
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, key[c], acc[r][c]);
    }
  }
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) store(scores + r * STRIDE + c * 16, mul(acc[r][c], set1(scale)));
  }
}

template <int R, int WIDTH, int STRIDE>
static TW_SHARED void score_rows(const float* q, const float* keys, int count, float scale, float* scores) {
  constexpr int C = tile_columns<R>();
  int j = 0;
  for (; j + 16 * C <= count; j += 16 * C)
    score_block<R, C, WIDTH, STRIDE>(q, keys + j, scale, scores + j);
  if constexpr (C > 1)
    for (; j < count; j += 16) score_block<R, 1, WIDTH, STRIDE>(q, keys + j, scale, scores + j);
}

// A row that has seen only -inf so far has maximum -inf; its weights are exp(-inf - 0) = 0, not exp(NaN).
static TW_INLINE float finite_shift(float maximum) { return maximum == -__builtin_inff() ? 0.0f : maximum; }

// Scores of a row become weights in place; positions from `visible` to the next multiple of 16 weigh 0.
static TW_SHARED void weigh_row(float* scores, int visible, float* maximum, float* total) {
  const int padded = round_up(visible, 16);
  for (int j = visible; j < padded; ++j) scores[j] = -__builtin_inff();
  v16 top = load(scores);
  for (int j = 16; j < padded; j += 16) top = max(load(scores + j), top);
  *maximum = max_lane(top);
  const float shift = finite_shift(*maximum);
  for (int j = 0; j < padded; ++j) scores[j] = tw_exp(scores[j] - shift);
  for (int j = visible; j < padded; ++j) scores[j] = 0.0f;
  v16 lanes = load(scores);
  for (int j = 16; j < padded; j += 16) lanes = add(lanes, load(scores + j));
  *total = sum(lanes);
}

// Where the values of a unit are: staged fp32 rows, or the rows of the cache itself.
template <int STRIDE>
struct staged_rows {
  const float* base;
  TW_INLINE v16 at(int j, int d) const { return load(base + j * STRIDE + d); }
};
template <class Cache>
struct cache_rows {
  const Cache* base;
  const int64_t* offset;
  TW_INLINE v16 at(int j, int d) const { return load_cache(base + offset[j] + d); }
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
  for (int j = 0; j < common; ++j) {
    v16 value[C];
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) value[c] = rows.at(j, d + 16 * c);
    TW_UNROLL(16)
    for (int r = 0; r < R; ++r) {
      const v16 weight = set1(weights[r * STRIDE + j]);
      TW_UNROLL(4)
      for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    if (visible[r] <= 0) continue;
    for (int j = common; j < visible[r]; ++j) {
      const v16 weight = set1(weights[r * STRIDE + j]);
      TW_UNROLL(4)
      for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, rows.at(j, d + 16 * c), acc[r][c]);
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
  constexpr int C = tile_columns<R>();
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
