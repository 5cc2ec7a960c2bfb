// Dynamic quantisation of one row: a scale for each group of G values, then codes. What `quantise` means
// for values, and how a row of N of them lies packed: codes, TAIL values as bf16, scales (rows with a tail
// pad their scales with zeros to 8 bytes). A last group may be cut short.
//
//   tw_quantise<F, N, G, TAIL>(x, y)     y = what the format can store of x, as fp32
//   tw_pack<F, N, G, TAIL>(x, row)       the packed row of x, whose values are y
//   tw_pack_values<F, N, G, TAIL>(y, row)   a packed row whose values are exactly y
//
// F is tw::mxfp8 (e4m3 codes, scale a power of two), tw::mxfp4 (e2m1 codes, likewise) or tw::nvfp4 (e2m1 codes,
// scale e4m3). A group that holds NaN becomes NaN; so does one with an infinity where scales are powers of two.
#pragma once
#include "tw_vec.h"

namespace tw {

static TW_INLINE float within(float x, float limit) {
  x = x < -limit ? -limit : x;
  return x > limit ? limit : x;  // NaN stays
}

// Round |x| <= 448 to e4m3, ties to even. Below 2^-6 the step is 2^-9, the last bit of 1.5 * 2^14.
static TW_INLINE float round_e4m3(float x) {
  const uint32_t bits = bits_from_f32(x), size = bits & 0x7fffffffu;
  const uint32_t normal = (size + 0x7ffffu + (size >> 20 & 1u)) & 0xfff00000u;
  const uint32_t tiny = bits_from_f32((f32_from_bits(size) + 24576.0f) - 24576.0f);
  const uint32_t rounded = size < 0x3c800000u ? tiny : normal;
  return f32_from_bits((size > 0x7f800000u ? size : rounded) | (bits & 0x80000000u));
}

// The code of an e4m3 number.
static TW_INLINE uint32_t code_e4m3(float x) {
  const uint32_t bits = bits_from_f32(x), size = bits & 0x7fffffffu;
  const uint32_t tiny = bits_from_f32(f32_from_bits(size) + 16384.0f) & 0x7fu;
  const uint32_t code = size < 0x3c800000u ? tiny : (size >> 20) - 960u;
  return (size > 0x7f800000u ? 0x7fu : code) | (bits >> 24 & 0x80u);
}

// Round |x| <= 6 to 0 .5 1 1.5 2 3 4 6, ties to the even code; the sign stays.
static TW_INLINE float round_e2m1(float x) {
  const uint32_t bits = bits_from_f32(x);
  const float size = f32_from_bits(bits & 0x7fffffffu);
  const float half = (size + 6291456.0f) - 6291456.0f;    // steps of 1/2, 1 and 2: the last bits
  const float one = (size + 12582912.0f) - 12582912.0f;   // of 1.5 * 2^22, 2^23, 2^24
  const float two = (size + 25165824.0f) - 25165824.0f;
  const float rounded = size < 2.0f ? half : size < 4.0f ? one : two;
  return f32_from_bits(bits_from_f32(rounded) | (bits & 0x80000000u));
}

// The code of an e2m1 number: its exponent and upper mantissa bit, counted from 1/2.
static TW_INLINE uint32_t code_e2m1(float x) {
  const uint32_t bits = bits_from_f32(x), size = bits & 0x7fffffffu;
  const uint32_t code = size < 0x3f800000u ? (uint32_t)(size >= 0x3f000000u) : (size >> 22) - 252u;
  return (code & 7u) | (bits >> 28 & 8u);
}

// 2^ceil(log2 x) of a positive x; infinity for infinity and NaN.
static TW_INLINE float power_of_two_at_least(float x) {
  const uint32_t exponent = (bits_from_f32(x) + 0x7fffffu) >> 23;
  return f32_from_bits((exponent < 255u ? exponent : 255u) << 23);
}

struct mxfp8 {
  static constexpr int BITS = 8;
  static constexpr bool SEARCH = false;
  static TW_INLINE float scale(float most) {
    return power_of_two_at_least((most < 1e-4f ? 1e-4f : most) * (float)(1.0 / 448.0));
  }
  static TW_INLINE float divisor(float scale) { return 1.0f / scale; }  // exact
  static TW_INLINE float code_value(float x, float divisor) {
    return round_e4m3(within(x * divisor, 448.0f));
  }
  static TW_INLINE uint32_t code(float value) { return code_e4m3(value); }
  static TW_INLINE uint8_t scale_code(float scale) { return (uint8_t)(bits_from_f32(scale) >> 23); }
};

struct mxfp4 {
  static constexpr int BITS = 4;
  static constexpr bool SEARCH = false;
  static TW_INLINE float scale(float most) {
    const float floor = 6.0f * 1.17549435e-38f;
    return power_of_two_at_least((most < floor ? floor : most) * (float)(1.0 / 6.0));
  }
  static TW_INLINE float divisor(float scale) { return 1.0f / scale; }
  static TW_INLINE float code_value(float x, float divisor) {
    return round_e2m1(within(x * divisor, 6.0f));
  }
  static TW_INLINE uint32_t code(float value) { return code_e2m1(value); }
  static TW_INLINE uint8_t scale_code(float scale) { return (uint8_t)(bits_from_f32(scale) >> 23); }
};

struct nvfp4 {
  static constexpr int BITS = 4;
  static constexpr bool SEARCH = true;
  static TW_INLINE float scale(float most) {
    const float least = 0.001953125f, wanted = (most < 6.0f * least ? 6.0f * least : most) / 6.0f;
    const float above = wanted < least ? least : wanted;
    return round_e4m3(above > 448.0f ? 448.0f : above);
  }
  static TW_INLINE float divisor(float scale) { return scale; }
  static TW_INLINE float code_value(float x, float divisor) {
    return round_e2m1(within(x / divisor, 6.0f));
  }
  static TW_INLINE uint32_t code(float value) { return code_e2m1(value); }
  static TW_INLINE uint8_t scale_code(float scale) { return (uint8_t)code_e4m3(scale); }
};

// The largest magnitude, by bits: NaN is above infinity.
template <int G>
static TW_INLINE float largest_of(const float* x, int n) {
  int32_t most = 0;
  if (n == G) {
    for (int j = 0; j < G; ++j) {
      const int32_t size = (int32_t)(bits_from_f32(x[j]) & 0x7fffffffu);
      most = size > most ? size : most;
    }
  } else {
    for (int j = 0; j < n; ++j) {
      const int32_t size = (int32_t)(bits_from_f32(x[j]) & 0x7fffffffu);
      most = size > most ? size : most;
    }
  }
  return f32_from_bits((uint32_t)most);
}

// Calls body(group, first, count) for each group.
template <int C, int G, class Body>
static TW_INLINE void each_group(Body body) {
  for (int g = 0; g < C / G; ++g) body(g, g * G, G);
  if (C % G) body(C / G, C / G * G, C % G);
}

template <class F, int G>
static TW_INLINE void code_values(const float* x, float scale, int n, float* values) {
  const float divisor = F::divisor(scale);
  if (n == G)
    for (int j = 0; j < G; ++j) values[j] = F::code_value(x[j], divisor);
  else
    for (int j = 0; j < n; ++j) values[j] = F::code_value(x[j], divisor);
}

template <class F>
static TW_INLINE void store_codes(const float* values, int n, uint8_t* codes) {
  if (F::BITS == 8)
    for (int j = 0; j < n; ++j) codes[j] = (uint8_t)F::code(values[j]);
  else
    for (int j = 0; j < n; j += 2)
      codes[j / 2] = (uint8_t)(F::code(values[j]) | (j + 1 < n ? F::code(values[j + 1]) << 4 : 0u));
}

// The scale under which every value of a group is a code: the derived one, or the next that fits.
template <class F, int G>
static TW_INLINE float fitting_scale(const float* y, int n, float* values) {
  float scale = F::scale(largest_of<G>(y, n));
  while (F::SEARCH) {
    code_values<F, G>(y, scale, n, values);
    bool fits = true;
    for (int j = 0; j < n; ++j) fits &= values[j] * scale == y[j] || y[j] != y[j];
    if (fits || !(scale < 448.0f)) break;
    scale = round_e4m3(scale < 0.015625f ? scale + 0.001953125f : scale * 1.0626f);
  }
  return scale;
}

template <class F, int N, int G, int TAIL, bool VALUES>
static inline void pack_row(const float* x, uint8_t* row) {
  constexpr int C = N - TAIL, CODES = (C * F::BITS + 7) / 8, GROUPS = (C + G - 1) / G;
  static_assert(F::BITS == 8 || G % 2 == 0, "two codes share a byte of one group");
  uint8_t* scales = row + CODES + 2 * TAIL;
  each_group<C, G>([&](int g, int first, int n) {
    alignas(64) float values[G];
    const float scale = VALUES ? fitting_scale<F, G>(x + first, n, values)
                               : F::scale(largest_of<G>(x + first, n));
    code_values<F, G>(x + first, scale, n, values);
    store_codes<F>(values, n, row + first * F::BITS / 8);
    scales[g] = F::scale_code(scale);
  });
  for (int j = 0; j < TAIL; ++j) {
    const uint16_t half = bf16_from_f32(x[C + j]);
    memcpy(row + CODES + 2 * j, &half, 2);
  }
  if (TAIL)
    for (int g = GROUPS; g < (GROUPS + 7) / 8 * 8; ++g) scales[g] = 0;
}

}  // namespace tw

template <class F, int N, int G, int TAIL>
static inline void tw_quantise(const float* x, float* y) {
  constexpr int C = N - TAIL;
  tw::each_group<C, G>([&](int, int first, int n) {
    const float scale = F::scale(tw::largest_of<G>(x + first, n));
    tw::code_values<F, G>(x + first, scale, n, y + first);
    for (int j = 0; j < n; ++j) y[first + j] *= scale;
  });
  for (int j = C; j < N; ++j) y[j] = tw::f32_from_bf16(tw::bf16_from_f32(x[j]));
}

template <class F, int N, int G, int TAIL>
static inline void tw_pack(const float* x, uint8_t* row) {
  tw::pack_row<F, N, G, TAIL, false>(x, row);
}

template <class F, int N, int G, int TAIL>
static inline void tw_pack_values(const float* y, uint8_t* row) {
  tw::pack_row<F, N, G, TAIL, true>(y, row);
}

// Walsh-Hadamard transform in natural order: butterflies of strides 1, 2, 4, .., then a factor.
template <int N>
static inline void tw_hadamard(const float* x, float factor, float* y) {
  if (x != y) memcpy(y, x, N * sizeof(float));
  for (int stride = 1; stride < N; stride *= 2)
    for (int i = 0; i < N; i += 2 * stride)
      for (int j = i; j < i + stride; ++j) {
        const float a = y[j], b = y[j + stride];
        y[j] = a + b;
        y[j + stride] = a - b;
      }
  for (int j = 0; j < N; ++j) y[j] *= factor;
}
