// Register tiles of products of e4m3 rows with `fp4` weights whose blocks are summed exactly (tw_exact.h).
//
//   ORDER exact   per group s = the sum of its products, exact and then rounded to fp32;
//                 acc = fma(d, s, acc) for groups ascending, from acc = +0
//
// Rows are blocks, to K / 32 of which `row_tile::a` points: digit blocks in launches of few rows, word blocks in
// those of many.
#pragma once
#include "tw_contract_tile.h"
#include "tw_exact.h"

namespace tw {

template <class Block, int R>
struct exact_rows {
  const Block* block[R];
  TW_INLINE exact_rows(const row_tile<R>& rows, int64_t group) {
    for (int r = 0; r < R; ++r) block[r] = (const Block*)rows.a[r] + group;
  }
  TW_INLINE bool has_last() const {
    bool any = false;
    for (int r = 0; r < R; ++r) any |= block[r]->has_last();
    return any;
  }
};
template <int R> using digit_rows = exact_rows<digit_block, R>;
template <int R> using word_rows = exact_rows<word_block, R>;

template <int R, int P, int D>
struct tile_sums {
  digit_sums s[R][P][D];
  TW_INLINE void start(const digit_rows<R>& rows) {
    TW_UNROLL(6)
    for (int r = 0; r < R; ++r)
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p)
        TW_UNROLL(3)
        for (int d = 0; d < D; ++d) s[r][p][d] = start_sums(rows.block[r]->offset[d]);
  }
  TW_INLINE void add(const digit_rows<R>& rows, int p, byte_pairs weights, int pair) {
    TW_UNROLL(6)
    for (int r = 0; r < R; ++r)
      TW_UNROLL(3)
      for (int d = 0; d < D; ++d) s[r][p][d] = add_pair(s[r][p][d], weights, rows.block[r]->pair[d][pair]);
  }
  TW_INLINE v16 scaled(const digit_rows<R>& rows, int r, int p, v16 scale, v16 acc) const {
    return fma(scale, mul(whole_sums(s[r][p]), set1(rows.block[r]->unit)), acc);
  }
};

// One group of P panels, decoded in registers.
template <int R, int P, int D, int PREFETCH>
static TW_INLINE void exact_group(const uint8_t* const (&panel)[P], int64_t offset, int64_t later,
                                  const digit_rows<R>& rows, v16 (&acc)[R][P]) {
  tile_sums<R, P, D> sums;
  sums.start(rows);
  TW_UNROLL(8)
  for (int j = 0; j < 8; ++j)
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) {
      if (PREFETCH > 0 && j < ceil_div(fp4::GROUP_BYTES, 64)) prefetch(panel[p] + later + 64 * j);
      byte_pairs first, second;
      load_pairs(panel[p] + offset + 16 + 32 * j, first, second);
      sums.add(rows, p, first, 2 * j);
      sums.add(rows, p, second, 2 * j + 1);
    }
  TW_UNROLL(4)
  for (int p = 0; p < P; ++p) {
    const v16 scale = load_e8m0(panel[p] + offset);
    TW_UNROLL(6)
    for (int r = 0; r < R; ++r) acc[r][p] = sums.scaled(rows, r, p, scale, acc[r][p]);
  }
}

template <int R, int P, int PREFETCH>
static TW_INLINE void stream_group(const uint8_t* const (&panel)[P], int64_t offset, int64_t later,
                                   const digit_rows<R>& rows, v16 (&acc)[R][P]) {
  if (__builtin_expect(rows.has_last(), 0))
    exact_group<R, P, 3, PREFETCH>(panel, offset, later, rows, acc);
  else
    exact_group<R, P, 2, PREFETCH>(panel, offset, later, rows, acc);
}

// Blocks of few rows in a launch of many.
template <int R, int P, int PREFETCH>
static TW_INLINE void stream_group(const uint8_t* const (&panel)[P], int64_t offset, int64_t later,
                                   const word_rows<R>& rows, v16 (&acc)[R][P]) {
  for (int p = 0; p < P; ++p) {
    word_sums sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero_words();
    for (int i = 0; i < 16; i += 2) {
      byte_pairs first, second;
      load_pairs(panel[p] + offset + 16 + 16 * i, first, second);
      const word_pairs words[2] = {widen(first), widen(second)};
      for (int r = 0; r < R; ++r)
        for (int w = 0; w < (rows.block[r]->has_last() ? 2 : 1); ++w)
          for (int j = 0; j < 2; ++j) sums[r][w] = add_words(sums[r][w], words[j], rows.block[r]->pair[w][i + j]);
    }
    const v16 scale = load_e8m0(panel[p] + offset);
    for (int r = 0; r < R; ++r) {
      const v16 part = rows.block[r]->has_last() ? whole_words(sums[r][0], sums[r][1]) : whole_words(sums[r][0]);
      acc[r][p] = fma(scale, mul(part, set1(rows.block[r]->unit)), acc[r][p]);
    }
  }
}

// The GEMV form: out[(r * P + p) * 16 ..] for all of K.
template <class Block, int R, int P, int PREFETCH, int64_t K>
static TW_NOINLINE void exact_tile(const uint8_t* first_panel, const row_tile<R>& rows, float* out) {
  const uint8_t* panel[P];
  for (int p = 0; p < P; ++p) panel[p] = first_panel + p * panel_bytes<fp4>(K);
  v16 acc[R][P];
  TW_UNROLL(6)
  for (int r = 0; r < R; ++r)
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) acc[r][p] = zero();
  int64_t offset = 0;
  for (int64_t group = 0; group < K / 32; ++group, offset += fp4::GROUP_BYTES)
    stream_group<R, P, PREFETCH>(panel, offset, prefetch_offset<fp4, P, PREFETCH, K>(offset),
                                 exact_rows<Block, R>(rows, group), acc);
  TW_UNROLL(6)
  for (int r = 0; r < R; ++r)
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) store(out + (r * P + p) * 16, acc[r][p]);
}

// The GEMM form works on a slab of K_BLOCK values of k of P panels, decoded once: word_pairs[p][K_BLOCK / 2] and
// floats scale[p][group][16].
template <int P, int64_t K_BLOCK>
static TW_NOINLINE void fill_exact_slab(const uint8_t* first_panel, int64_t stride, int64_t k0, int64_t k1,
                                        word_pairs* words, float* scale) {
  for (int p = 0; p < P; ++p) {
    const uint8_t* group = first_panel + p * stride + k0 / 32 * fp4::GROUP_BYTES;
    word_pairs* out = words + p * (K_BLOCK / 2);
    float* out_scale = scale + p * (K_BLOCK / 32) * 16;
    for (int64_t k = k0; k < k1; k += 32, group += fp4::GROUP_BYTES, out_scale += 16) {
      store(out_scale, load_e8m0(group));
      TW_UNROLL(8)
      for (int j = 0; j < 8; ++j, out += 2) {
        byte_pairs first, second;
        load_pairs(group + 16 + 32 * j, first, second);
        out[0] = widen(first);
        out[1] = widen(second);
      }
    }
  }
}

// Sums of second words, of one row: few blocks have them.
static TW_NOINLINE word_sums second_words(const word_pairs* words, const word_block& row) {
  word_sums sums = zero_words();
  TW_UNROLL(4)
  for (int i = 0; i < 16; ++i) sums = add_words(sums, words[i], row.pair[1][i]);
  return sums;
}

template <int R, int P, int64_t K_BLOCK>
static TW_INLINE void exact_slab_group(const word_pairs* words, const float* scale, const word_rows<R>& rows,
                                       bool first, float* acc) {
  word_sums sums[R][P];
  TW_UNROLL(6)
  for (int r = 0; r < R; ++r)
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) sums[r][p] = zero_words();
  TW_UNROLL(2)
  for (int i = 0; i < 16; ++i)
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) {
      const word_pairs pairs = words[p * (K_BLOCK / 2) + i];
      TW_UNROLL(6)
      for (int r = 0; r < R; ++r) sums[r][p] = add_words(sums[r][p], pairs, rows.block[r]->pair[0][i]);
    }
  TW_UNROLL(6)
  for (int r = 0; r < R; ++r)
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) {
      const word_block& row = *rows.block[r];
      v16 part = whole_words(sums[r][p]);
      if (__builtin_expect(row.has_last(), 0))
        part = whole_words(sums[r][p], second_words(words + p * (K_BLOCK / 2), row));
      float* out = acc + (r * P + p) * 16;
      const v16 d = load(scale + p * (K_BLOCK / 32) * 16);
      store(out, fma(d, mul(part, set1(row.unit)), first ? zero() : load(out)));
    }
}

// acc[(r * P + p) * 16 ..] continues over one slab of `count` values of k; `first` starts it at +0.
template <int R, int P, int64_t K_BLOCK>
static TW_NOINLINE void slab_exact(const word_pairs* words, const float* scale, const row_tile<R>& rows, int64_t k0,
                                   int64_t count, bool first, float* acc) {
  for (int64_t g = 0; g < count / 32; ++g, words += 16, scale += 16)
    exact_slab_group<R, P, K_BLOCK>(words, scale, word_rows<R>(rows, k0 / 32 + g), first && g == 0, acc);
}

}  // namespace tw
