// Scores of entries where queries and keys are both mxfp4 (e2m1 codes, a power of two per 32 columns): products of
// codes are added as integers, so the sum of a group is exact, and one fp32 fma per group adds it in order.
//
// Keys are staged as twice their codes + 12, unsigned; queries as signed multiples of the largest power of two that
// divides all values of their group. What + 12 added is taken off by group.
#pragma once
#include "tw_index_tile.h"

namespace tw {

constexpr int CODE_GROUP = 32, CODE_SHIFT = 12;

// Where the queries of a panel of sixteen heads lie: codes[d / 4][head][4], and per group and head the scale and
// CODE_SHIFT times the sum of codes.
struct query_codes {
  int8_t* codes;
  float* scales;
  int32_t* shifts;
};

template <int COLUMNS>
static TW_INLINE query_codes query_codes_in(float* panel) {
  return {(int8_t*)panel, panel + COLUMNS * 4, (int32_t*)(panel + COLUMNS * 4 + COLUMNS / CODE_GROUP * HEAD_LANES)};
}

// Values of one group of one head as multiples of *scale; with a value that is no number, the scale is NaN.
static inline void take_codes(const float* x, int* codes, float* scale) {
  float largest = 0.0f;
  bool finite = true;
  for (int i = 0; i < CODE_GROUP; ++i) {
    const float size = __builtin_fabsf(x[i]);
    finite &= size < __builtin_inff();
    largest = size > largest ? size : largest;
  }
  const float boost = largest < 0x1p-60f ? 0x1p60f : 1.0f;
  const float unit = f32_from_bits(bits_from_f32(largest * boost) & 0x7f800000u) * 0.125f;
  const bool empty = !finite || largest == 0.0f;
  *scale = !finite ? __builtin_nanf("") : empty ? 0.0f : unit / boost;
  for (int i = 0; i < CODE_GROUP; ++i) codes[i] = empty ? 0 : (int)(x[i] * boost / unit);
}

// Queries of sixteen heads, rows[head][COLUMNS], as codes.
template <int COLUMNS>
static TW_SHARED void turn_queries(const float* rows, query_codes q) {
  for (int h = 0; h < HEAD_LANES; ++h)
    for (int g = 0; g < COLUMNS / CODE_GROUP; ++g) {
      int codes[CODE_GROUP], sum = 0;
      take_codes(rows + h * COLUMNS + g * CODE_GROUP, codes, q.scales + g * HEAD_LANES + h);
      for (int i = 0; i < CODE_GROUP; ++i) {
        sum += codes[i];
        q.codes[((g * 8 + i / 4) * HEAD_LANES + h) * 4 + i % 4] = (int8_t)codes[i];
      }
      q.shifts[g * HEAD_LANES + h] = CODE_SHIFT * sum;
    }
}

// A packed row as bytes 2 * code + 12, and half of its scales.
template <int COLUMNS>
static TW_INLINE void take_key(const uint8_t* row, uint8_t* codes, float* scales) {
#if defined(__AVX2__)
  for (int d = 0; d < COLUMNS; d += 16)
    _mm_storeu_si128((__m128i*)(codes + d), _mm_add_epi8(twice_e2m1(row + d / 2), _mm_set1_epi8(CODE_SHIFT)));
#else
  for (int d = 0; d < COLUMNS; ++d)
    codes[d] = (uint8_t)(2.0f * e2m1_f32((uint8_t)(row[d / 2] >> (d % 2 * 4) & 15)) + (float)CODE_SHIFT);
#endif
  for (int g = 0; g < COLUMNS / CODE_GROUP; ++g) scales[g] = ue8m0_f32(row[COLUMNS / 2 + g]) * 0.5f;
}

// Sums of products of one group, of R keys with sixteen heads, as exact floats.
#if defined(__AVX2__)
template <int R>
static TW_INLINE void group_products(const uint8_t* keys, int stride, const int8_t* q, const int32_t* shifts, v16* out) {
  __m256i part[R][2];
  TW_UNROLL(8)
  for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = _mm256_setzero_si256();
  TW_UNROLL(8)
  for (int j = 0; j < CODE_GROUP / 4; ++j) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)(q + j * 64));
    const __m256i high = _mm256_loadu_si256((const __m256i*)(q + j * 64 + 32));
    TW_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      int four;
      memcpy(&four, keys + r * stride + j * 4, 4);
      const __m256i key = _mm256_set1_epi32(four);
      part[r][0] = _mm256_add_epi16(part[r][0], _mm256_maddubs_epi16(key, low));
      part[r][1] = _mm256_add_epi16(part[r][1], _mm256_maddubs_epi16(key, high));
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  TW_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    __m256 half[2];
    for (int i = 0; i < 2; ++i) {
      const __m256i shift = _mm256_loadu_si256((const __m256i*)(shifts + 8 * i));
      half[i] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_madd_epi16(part[r][i], ones), shift));
    }
    out[r] = join_halves(half[0], half[1]);
  }
}
#else
template <int R>
static TW_INLINE void group_products(const uint8_t* keys, int stride, const int8_t* q, const int32_t* shifts, v16* out) {
  for (int r = 0; r < R; ++r) {
    float lanes[HEAD_LANES];
    for (int h = 0; h < HEAD_LANES; ++h) {
      int32_t sum = -shifts[h];
      for (int d = 0; d < CODE_GROUP; ++d) sum += keys[r * stride + d] * q[(d / 4 * HEAD_LANES + h) * 4 + d % 4];
      lanes[h] = (float)sum;
    }
    out[r] = load(lanes);
  }
}
#endif

template <int R, int COLUMNS>
static TW_INLINE void code_tile(const uint8_t* keys, const float* scales, query_codes q, v16 w, int heads, bool first,
                                float* sums) {
  constexpr int GROUPS = COLUMNS / CODE_GROUP;
  v16 acc[R];
  for (int g = 0; g < GROUPS; ++g) {
    v16 products[R];
    group_products<R>(keys + g * CODE_GROUP, COLUMNS, q.codes + g * CODE_GROUP * HEAD_LANES, q.shifts + g * HEAD_LANES,
                      products);
    TW_UNROLL(8)
    for (int r = 0; r < R; ++r)
      acc[r] = fma(mul(products[r], set1(scales[r * GROUPS + g])), load(q.scales + g * HEAD_LANES),
                   g == 0 ? zero() : acc[r]);
  }
  TW_UNROLL(8)
  for (int r = 0; r < R; ++r) add_heads(acc[r], w, heads, first, sums + r * HEAD_LANES);
}

// Scores of `count` staged keys; places up to the next multiple of R mean nothing.
template <int R, int HEADS, int COLUMNS>
static TW_SHARED void code_scores(const uint8_t* keys, const float* scales, int count, float* q, const float* w,
                                  float* sums, float* scores) {
  for (int h = 0; h < HEADS; h += HEAD_LANES) {
    const int heads = HEADS - h < HEAD_LANES ? HEADS - h : HEAD_LANES;
    const query_codes panel = query_codes_in<COLUMNS>(q + h * COLUMNS);
    for (int e = 0; e < count; e += R)
      code_tile<R, COLUMNS>(keys + e * COLUMNS, scales + e * (COLUMNS / CODE_GROUP), panel, load(w + h), heads, h == 0,
                            sums + e * HEAD_LANES);
  }
  for (int e = 0; e < count; ++e) scores[e] = sum_lanes(load(sums + e * HEAD_LANES));
}

}  // namespace tw
