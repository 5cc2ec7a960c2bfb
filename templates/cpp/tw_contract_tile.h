// Register tiles of the contraction y[m, n] = sum_k a[m, k] * w[n, k].
//
// The invariant: every output element is one lane's chain of operations along k, the same whatever
// tile, panel count, row count or blocking it is computed with.
//   ORDER dequantise   w = value(code); acc = fma(a, w, acc) for k ascending, from acc = +0
//   ORDER factored     per group s = fma(a * prescale, code / prescale, s) from +0 for k ascending;
//                      acc = fma(d, s, acc); with a minimum also acc = fma(m, sum_a, acc)
//                      (a format may keep s / PART_SCALE in place of s)
// (prescale is a power of two; sum_a is the in-order sum of the group's activations, from +0).
#pragma once
#include "tw_contract_formats.h"

namespace tw {

enum order { DEQUANTISE = 0, FACTORED = 1, EXACTLY = 2 };  // the last: tw_contract_exact.h

template <class W>
static TW_INLINE v16 whole_part(v16 part) {
  return W::PART_SCALE == 1.0f ? part : mul(part, set1(W::PART_SCALE));
}

// Rows of one tile. `a` holds the activations (times prescale where the order is factored), `sums` the
// group sums of the plain activations (factored order of a format with a minimum only).
template <int R>
struct row_tile { const float* a[R]; const float* sums[R]; };

// Where the group lies that is read PREFETCH bytes later, in the order in which P panels at a time are walked.
template <class W, int P, int PREFETCH, int64_t K>
static TW_INLINE int64_t prefetch_offset(int64_t offset) {
  constexpr int64_t ahead = ceil_div(PREFETCH, P * W::GROUP_BYTES) * W::GROUP_BYTES;
  const int64_t target = offset + ahead;
  return target >= panel_bytes<W>(K) ? target + (P - 1) * panel_bytes<W>(K) : target;
}

// Touch the lines of a later group while sub j of the one at hand is decoded. Many touched at once would wait
// for each other, and the loads behind them; a few are best out of the way.
template <class W>
static TW_INLINE void prefetch_sub(const uint8_t* group, int j) {
  constexpr int LINES = ceil_div(W::GROUP_BYTES, 64), STEPS = LINES > 5 ? W::SUBS : 1;
  const int end = j + 1 < STEPS ? (j + 1) * LINES / STEPS : LINES;
  TW_UNROLL(5)
  for (int line = j * LINES / STEPS; line < end; ++line) prefetch(group + line * 64);
}

// One group of P panels, decoded in registers. The panels are interleaved per k, so that 2 P R chains of
// multiply-adds hide each other's latency.
template <class W, int R, int P, int PREFETCH>
static TW_INLINE void dequantise_group(const uint8_t* const (&panel)[P], int64_t offset, int64_t later,
                                       const row_tile<R>& rows, int64_t k, v16 (&acc)[R][P]) {
  scales s[P];
  TW_UNROLL(4)
  for (int p = 0; p < P; ++p) s[p] = W::open(panel[p] + offset);
  TW_UNROLL(16)
  for (int j = 0; j < W::SUBS; ++j) {
    if constexpr (PREFETCH > 0)
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p) prefetch_sub<W>(panel[p] + later, j);
    TW_UNROLL(8)
    for (int w = 0; w < W::WORDS; ++w) {
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p) {
        const v16 value = W::weight(panel[p] + offset, s[p], j, w);
        TW_UNROLL(6)
        for (int r = 0; r < R; ++r)
          acc[r][p] = fma(set1(rows.a[r][k + j * W::WORDS + w]), value, acc[r][p]);
      }
    }
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) W::next(s[p], j);
  }
}

// G groups of P panels, one after the other along k. Sums of groups do not wait for each other, so that two groups of
// one panel hide each other's latency while memory is read as one stream.
template <class W, int R, int P, int G, int PREFETCH>
static TW_INLINE void factored_groups(const uint8_t* const (&panel)[P], int64_t offset, const int64_t (&later)[G],
                                      const row_tile<R>& rows, int64_t k, v16 (&acc)[R][P]) {
  v16 part[G][R][P];
  TW_UNROLL(2)
  for (int g = 0; g < G; ++g)
    TW_UNROLL(6)
    for (int r = 0; r < R; ++r)
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p) part[g][r][p] = zero();
  TW_UNROLL(16)
  for (int j = 0; j < W::SUBS; ++j) {
    if constexpr (PREFETCH > 0)
      TW_UNROLL(2)
      for (int g = 0; g < G; ++g)
        TW_UNROLL(4)
        for (int p = 0; p < P; ++p) prefetch_sub<W>(panel[p] + later[g], j);
    TW_UNROLL(8)
    for (int w = 0; w < W::WORDS; ++w)
      TW_UNROLL(2)
      for (int g = 0; g < G; ++g)
        TW_UNROLL(4)
        for (int p = 0; p < P; ++p) {
          const v16 value = W::code(panel[p] + offset + g * W::GROUP_BYTES, j, w);
          TW_UNROLL(6)
          for (int r = 0; r < R; ++r)
            part[g][r][p] = fma(set1(rows.a[r][k + g * W::GROUP + j * W::WORDS + w]), value, part[g][r][p]);
        }
  }
  TW_UNROLL(2)
  for (int g = 0; g < G; ++g)
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) {
      const scales s = W::open(panel[p] + offset + g * W::GROUP_BYTES);
      TW_UNROLL(6)
      for (int r = 0; r < R; ++r) {
        acc[r][p] = fma(s.d, whole_part<W>(part[g][r][p]), acc[r][p]);
        if (W::HAS_MIN) acc[r][p] = fma(s.m, set1(rows.sums[r][k / W::GROUP + g]), acc[r][p]);
      }
    }
}

// acc[r][p] += over k in [k0, k1), factored.
template <class W, int R, int P, int PREFETCH, int64_t K>
static TW_INLINE void factored_range(const uint8_t* const (&panel)[P], const row_tile<R>& rows, int64_t k0,
                                     int64_t k1, v16 (&acc)[R][P]) {
  constexpr int G = R * P == 1 ? 2 : 1;
  int64_t k = k0, offset = k0 / W::GROUP * W::GROUP_BYTES;
  for (; k + G * W::GROUP <= k1; k += G * W::GROUP, offset += G * W::GROUP_BYTES) {
    int64_t later[G];
    for (int g = 0; g < G; ++g) later[g] = prefetch_offset<W, P, PREFETCH, K>(offset + g * W::GROUP_BYTES);
    factored_groups<W, R, P, G, PREFETCH>(panel, offset, later, rows, k, acc);
  }
  if constexpr (G > 1)
    if (k < k1) factored_groups<W, R, P, 1, 0>(panel, offset, {0}, rows, k, acc);
}

// acc[r][p] += over k in [k0, k1).
template <class W, int R, int P, int PREFETCH, int ORDER, int64_t K>
static TW_INLINE void stream_range(const uint8_t* const (&panel)[P], const row_tile<R>& rows, int64_t k0,
                                   int64_t k1, v16 (&acc)[R][P]) {
  if constexpr (ORDER == FACTORED && W::HAS_SCALE)
    return factored_range<W, R, P, PREFETCH, K>(panel, rows, k0, k1, acc);
  constexpr int STEP = W::GROUP == 1 ? 8 : 1;  // groups per iteration
  int64_t k = k0, offset = k0 / W::GROUP * W::GROUP_BYTES;
  for (; k + STEP * W::GROUP <= k1; k += STEP * W::GROUP) {
    TW_UNROLL(8)
    for (int i = 0; i < STEP; ++i, offset += W::GROUP_BYTES) {
      const int64_t later = prefetch_offset<W, P, PREFETCH, K>(offset);
      dequantise_group<W, R, P, PREFETCH>(panel, offset, later, rows, k + i, acc);
    }
  }
  if constexpr (STEP > 1)
    for (; k < k1; ++k, offset += W::GROUP_BYTES) dequantise_group<W, R, P, 0>(panel, offset, 0, rows, k, acc);
}

// The GEMV form: out[(r * P + p) * 16 ..] for all of K, in SEGMENTS equal parts added in order.
template <class W, int R, int P, int PREFETCH, int ORDER, int64_t K, int SEGMENTS>
static TW_NOINLINE void stream_tile(const uint8_t* first_panel, const row_tile<R>& rows, float* out) {
  const uint8_t* panel[P];
  for (int p = 0; p < P; ++p) panel[p] = first_panel + p * panel_bytes<W>(K);
  for (int segment = 0; segment < SEGMENTS; ++segment) {
    constexpr int64_t length = K / SEGMENTS;
    v16 acc[R][P];
    TW_UNROLL(6)
    for (int r = 0; r < R; ++r)
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p) acc[r][p] = zero();
    stream_range<W, R, P, PREFETCH, ORDER, K>(panel, rows, segment * length, (segment + 1) * length, acc);
    TW_UNROLL(6)
    for (int r = 0; r < R; ++r)
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p) {
        float* total = out + (r * P + p) * 16;
        store(total, segment == 0 ? acc[r][p] : add(load(total), acc[r][p]));
      }
  }
}

// The GEMM form works on a slab: K_BLOCK values of k of P panels, decoded once to fp32 as
// value[p][k][16]; in the factored order it holds codes, and scale[p][group][2][16] holds d and m.
template <class W, int ORDER, int P, int64_t K_BLOCK>
static TW_NOINLINE void fill_slab(const uint8_t* first_panel, int64_t stride, int64_t k0, int64_t k1, float* value,
                             float* scale) {
  for (int p = 0; p < P; ++p) {
    const uint8_t* group = first_panel + p * stride + k0 / W::GROUP * W::GROUP_BYTES;
    float* out = value + p * K_BLOCK * 16;
    float* out_scale = scale + p * (K_BLOCK / W::GROUP) * 32;
    for (int64_t k = k0; k < k1; k += W::GROUP, group += W::GROUP_BYTES) {
      scales s = W::open(group);
      if (ORDER == FACTORED && W::HAS_SCALE) {
        store(out_scale, s.d);
        store(out_scale + 16, s.m);
        out_scale += 32;
      }
      TW_UNROLL(16)
      for (int j = 0; j < W::SUBS; ++j) {
        constexpr int CHUNK = W::WORDS < 4 ? W::WORDS : 4;  // decoded before the stores, which share work
        for (int w0 = 0; w0 < W::WORDS; w0 += CHUNK, out += CHUNK * 16) {
          v16 values[CHUNK];
          TW_UNROLL(4)
          for (int w = 0; w < CHUNK; ++w)
            values[w] = ORDER == FACTORED && W::HAS_SCALE ? W::code(group, j, w0 + w) : W::weight(group, s, j, w0 + w);
          TW_UNROLL(4)
          for (int w = 0; w < CHUNK; ++w) store(out + w * 16, values[w]);
        }
        W::next(s, j);
      }
    }
  }
}

// acc[(r * P + p) * 16 ..] continues over one slab of `count` values of k; `first` starts it at +0.
template <int R, int P, int64_t K_BLOCK>
static TW_NOINLINE void slab_dequantise(const float* value, const row_tile<R>& rows, int64_t k0, int64_t count,
                                      bool first, float* acc) {
  v16 total[R][P];
  const float* a[R];
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    a[r] = rows.a[r] + k0;
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) total[r][p] = first ? zero() : load(acc + (r * P + p) * 16);
  }
  TW_UNROLL(4)
  for (int64_t k = 0; k < count; ++k) {
    v16 w[P];
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) w[p] = load(value + (p * K_BLOCK + k) * 16);
    TW_UNROLL(16)
    for (int r = 0; r < R; ++r) {
      const v16 x = set1(a[r][k]);
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p) total[r][p] = fma(x, w[p], total[r][p]);
    }
  }
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r)
    TW_UNROLL(4)
    for (int p = 0; p < P; ++p) store(acc + (r * P + p) * 16, total[r][p]);
}

// The sums of a group stay in registers; a row's total is in memory between groups.
template <class W, int R, int P, int64_t K_BLOCK>
static TW_NOINLINE void slab_factored(const float* value, const float* scale, const row_tile<R>& rows,
                                      int64_t k0, int64_t count, bool first, float* acc) {
  const float* a[R];
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) a[r] = rows.a[r] + k0;
  for (int64_t g = 0; g < count / W::GROUP; ++g) {
    v16 part[R][P];
    TW_UNROLL(16)
    for (int r = 0; r < R; ++r)
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p) part[r][p] = zero();
    TW_UNROLL(4)
    for (int k = g * W::GROUP; k < (g + 1) * W::GROUP; ++k) {
      v16 w[P];
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p) w[p] = load(value + (p * K_BLOCK + k) * 16);
      TW_UNROLL(16)
      for (int r = 0; r < R; ++r) {
        const v16 x = set1(a[r][k]);
        TW_UNROLL(4)
        for (int p = 0; p < P; ++p) part[r][p] = fma(x, w[p], part[r][p]);
      }
    }
    TW_UNROLL(16)
    for (int r = 0; r < R; ++r)
      TW_UNROLL(4)
      for (int p = 0; p < P; ++p) {
        const float* s = scale + (p * (K_BLOCK / W::GROUP) + g) * 32;
        float* out = acc + (r * P + p) * 16;
        v16 total = first && g == 0 ? zero() : load(out);
        total = fma(load(s), whole_part<W>(part[r][p]), total);
        if (W::HAS_MIN) total = fma(load(s + 16), set1(rows.sums[r][k0 / W::GROUP + g]), total);
        store(out, total);
      }
  }
}

}  // namespace tw
