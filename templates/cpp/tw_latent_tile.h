// The inner loops of latent attention: one unit (a chunk of entries) for the heads of one token.
//
// Entries lie in panels of sixteen columns, keys[d / 16][entry][16]; queries, scores and weights in panels of
// sixteen heads, q[head / 16][d][16] and s[head / 16][entry][16]. An entry is decoded once for all heads, and both
// products read it as it is: scores with heads in the lanes, values with columns in the lanes.
//
// Order of every sum, which decides the bits and depends on nothing but the token:
//   score    fma along the width from +0; then times the scale
//   maximum  exact, so any order
//   sum l    the weights of the unit in the order of its entries
//   value o  fma along the entries of the unit in order, from +0
// `tw_exp` (the prelude of the translation unit) is declared before this file.
#pragma once
#include "tw_attend_tile.h"
#include "tw_packed_rows.h"
#include "tw_pages.h"

namespace tw {

// Decoded entries: `base` of entry 0, and floats from one panel of columns to the next.
struct key_panels {
  float* base;
  int64_t stride;
};

template <int V> struct static_size { static constexpr int value = V; };

constexpr int HEAD_LANES = 16;
constexpr int MOST_ROWS = 12;  // rows of a register tile, at most

// s[r] (+)= sum over columns of keys[r][d] * q[d], for R entries and sixteen heads.
template <int R>
static TW_INLINE void score_tile(const float* keys, int64_t stride, const float* q, int panels, bool first, float* s) {
  v16 acc[R];
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) acc[r] = first ? zero() : load(s + r * HEAD_LANES);
  for (int c = 0; c < panels; ++c, keys += stride, q += 16 * HEAD_LANES) {
    TW_UNROLL(4)
    for (int d = 0; d < 16; ++d) {
      const v16 heads = load(q + d * HEAD_LANES);
      TW_UNROLL(16)
      for (int r = 0; r < R; ++r) acc[r] = fma(set1(keys[r * 16 + d]), heads, acc[r]);
    }
  }
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) store(s + r * HEAD_LANES, acc[r]);
}

// Scores of `count` entries (computed up to a multiple of R; the rest means nothing) for sixteen heads. `block`
// panels of columns are walked for all entries before the next ones, so that those of q stay in the first cache.
template <int R, int PANELS>
static TW_SHARED void score_heads(key_panels keys, int count, const float* q, int block, float scale, float* s) {
  for (int c = 0; c < PANELS; c += block) {
    const int panels = PANELS - c < block ? PANELS - c : block;
    for (int e = 0; e < count; e += R)
      score_tile<R>(keys.base + c * keys.stride + e * 16, keys.stride, q + c * 16 * HEAD_LANES, panels, c == 0,
                    s + e * HEAD_LANES);
  }
  for (int e = 0; e < count; ++e) store(s + e * HEAD_LANES, mul(load(s + e * HEAD_LANES), set1(scale)));
}

// Scores of sixteen heads become weights in place; their maximum and sum.
static TW_SHARED void weigh_heads(float* s, int count, float* maximum, float* total) {
  v16 top = load(s);
  for (int e = 1; e < count; ++e) top = max(load(s + e * HEAD_LANES), top);
  float shift[HEAD_LANES];
  store(maximum, top);
  for (int h = 0; h < HEAD_LANES; ++h) shift[h] = finite_shift(maximum[h]);
  for (int e = 0; e < count; ++e) {
    float* row = s + e * HEAD_LANES;
    for (int h = 0; h < HEAD_LANES; ++h) row[h] = tw_exp(row[h] - shift[h]);
  }
  v16 sum = load(s);
  for (int e = 1; e < count; ++e) sum = add(sum, load(s + e * HEAD_LANES));
  store(total, sum);
}

// The fold of (m, l) of sixteen heads, and the factors that the fold of o uses.
static TW_SHARED void fold_heads(float* m, float* l, const float* unit_m, const float* unit_l, float* keep, float* gain) {
  for (int h = 0; h < HEAD_LANES; ++h) {
    const float a = m[h], b = unit_m[h], top = a > b ? a : b, shift = finite_shift(top);
    keep[h] = tw_exp(a - shift);
    gain[h] = tw_exp(b - shift);
    m[h] = top;
    l[h] = __builtin_fmaf(l[h], keep[h], unit_l[h] * gain[h]);
  }
}

template <int R, int C>
static TW_INLINE void latent_value_tile(const float* weights, key_panels keys, int count, const float* keep,
                                        const float* gain, bool first, float* out, int columns) {
  v16 acc[R][C];
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) acc[r][c] = zero();
  }
  const float* row = keys.base;
  for (int e = 0; e < count; ++e, row += 16, weights += HEAD_LANES) {
    v16 column[C];
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) column[c] = load(row + c * keys.stride);
    TW_UNROLL(16)
    for (int r = 0; r < R; ++r) {
      const v16 weight = set1(weights[r]);
      TW_UNROLL(4)
      for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, column[c], acc[r][c]);
    }
  }
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    TW_UNROLL(4)
    for (int c = 0; c < C; ++c) {
      float* to = out + r * columns + 16 * c;
      store(to, first ? acc[r][c] : fma(load(to), set1(keep[r]), mul(acc[r][c], set1(gain[r]))));
    }
  }
}

template <int R, int C>
static TW_INLINE void value_rest(int heads, const float* weights, key_panels keys, int count, const float* keep,
                                 const float* gain, bool first, float* out, int columns) {
  if constexpr (R > 0) {
    if (heads == R) return latent_value_tile<R, C>(weights, keys, count, keep, gain, first, out, columns);
    value_rest<R - 1, C>(heads, weights, keys, count, keep, gain, first, out, columns);
  }
}

// out[head] = o, or out * keep + o * gain, of up to sixteen heads and all columns.
template <int R, int PANELS>
static TW_SHARED void value_heads(const float* weights, key_panels keys, int count, int heads, const float* keep,
                                  const float* gain, bool first, float* out) {
  constexpr int C = tile_columns<R, float>(), COLUMNS = PANELS * 16;
  auto columns = [&](auto width, int c) {
    constexpr int W = decltype(width)::value;
    const key_panels part = {keys.base + c * keys.stride, keys.stride};
    int h = 0;
    for (; h + R <= heads; h += R)
      latent_value_tile<R, W>(weights + h, part, count, keep + h, gain + h, first, out + h * COLUMNS + c * 16, COLUMNS);
    value_rest<R - 1, W>(heads - h, weights + h, part, count, keep + h, gain + h, first, out + h * COLUMNS + c * 16,
                         COLUMNS);
  };
  int c = 0;
  for (; c + C <= PANELS; c += C) columns(static_size<C>{}, c);
  for (; c < PANELS; ++c) columns(static_size<1>{}, c);
}

}  // namespace tw
