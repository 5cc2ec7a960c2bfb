// Rows of a paged state as fp32, sixteen columns at a time: plain floats, or packed codes.
//
// A packed row is codes | bf16 tail | scales. A value is code * scale, rounded once to fp32: the product is exact
// unless it leaves the range of fp32. Codes are e4m3 bytes, or e2m1 nibbles (an even column in the low one);
// scales are ue8m0 (2^(x - 127), 255 is NaN) or e4m3, one for GROUP columns.
//
//   plain_rows<T, WIDTH>                                          T is float or uint16_t (bf16)
//   packed_rows<BITS, GROUP, SCALE_IS_E4M3, WIDTH, TAIL>          bytes
// Both have: type `cell`, ROW (cells of a row), BYTES, and decode(row, out, stride): columns 16 c .. 16 c + 15 go
// to out + c * stride, and zeros follow the last column up to a multiple of 16.
#pragma once
#include "tw_vec.h"

namespace tw {

static TW_INLINE v16 sixteen(const float* p) { return load(p); }
static TW_INLINE v16 sixteen(const uint16_t* p) { return load_bf16(p); }
static TW_INLINE float row_f32(float x) { return x; }
static TW_INLINE float row_f32(uint16_t x) { return f32_from_bf16(x); }

static TW_INLINE float e4m3_f32(uint8_t code) {
  const uint32_t sign = (uint32_t)(code & 0x80u) << 24, size = code & 0x7fu;
  const float normal = f32_from_bits((size << 20) + (120u << 23)), small = (float)(int)size * 0x1p-9f;
  const uint32_t bits = size == 0x7fu ? 0x7fc00000u : bits_from_f32(size < 8 ? small : normal);
  return f32_from_bits(bits | sign);
}

static TW_INLINE float ue8m0_f32(uint8_t code) {
  const uint32_t bits = (uint32_t)code << 23;
  return f32_from_bits(code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : bits);
}

static TW_INLINE float e2m1_f32(uint8_t code) {
  const int size = code & 7, twice = size < 4 ? size : size == 4 ? 4 : size == 5 ? 6 : size == 6 ? 8 : 12;
  return (float)(code & 8 ? -twice : twice) * 0.5f;
}

#if defined(__AVX2__)
#if defined(__AVX512F__)
static TW_INLINE v16 join_halves(__m256 low, __m256 high) {
  return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
}
#else
static TW_INLINE v16 join_halves(__m256 low, __m256 high) { return {low, high}; }
#endif

// An e4m3 code moved into the fields of fp16 is the value times 2^-8, subnormals included.
static TW_INLINE v16 sixteen_e4m3(const uint8_t* p) {
  const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i size = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
  const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7c00));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(size, 7), sign), nan);
  const v16 small = join_halves(_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
                                _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)));
  return mul(small, set1(256.0f));
}

// Twice the values of 16 e2m1 codes, as bytes.
static TW_INLINE __m128i twice_e2m1(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p), low = _mm_set1_epi8(0x0f);
  const __m128i even = _mm_and_si128(bytes, low), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
  const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  return _mm_shuffle_epi8(table, _mm_unpacklo_epi8(even, odd));
}
static TW_INLINE v16 sixteen_e2m1(const uint8_t* p) {
  const __m128i twice = twice_e2m1(p);
  const v16 value = join_halves(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(twice)),
                                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(twice, 8))));
  return mul(value, set1(0.5f));
}
#else
static TW_INLINE v16 sixteen_e4m3(const uint8_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = e4m3_f32(p[i]);
  return load(lanes);
}
static TW_INLINE v16 sixteen_e2m1(const uint8_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = e2m1_f32((uint8_t)(p[i / 2] >> (i % 2 * 4) & 15));
  return load(lanes);
}
#endif

template <class T, int WIDTH>
struct plain_rows {
  using cell = T;
  static constexpr int ROW = WIDTH, BYTES = WIDTH * (int)sizeof(T);
  static TW_INLINE void decode(const T* row, float* out, int64_t stride) {
    constexpr int WHOLE = WIDTH / 16;
    for (int c = 0; c < WHOLE; ++c) store(out + c * stride, sixteen(row + 16 * c));
    if constexpr (WIDTH % 16 != 0)
      for (int d = 0; d < 16; ++d)
        out[WHOLE * stride + d] = 16 * WHOLE + d < WIDTH ? row_f32(row[16 * WHOLE + d]) : 0.0f;
  }
};

template <int BITS, int GROUP, bool SCALE_IS_E4M3, int WIDTH, int TAIL>
struct packed_rows {
  static_assert(BITS == 8 || BITS == 4, "codes of 8 or 4 bits");
  static_assert(GROUP % 16 == 0 && WIDTH % 8 == 0 && TAIL % 8 == 0 && TAIL < WIDTH, "eight columns share a scale");
  using cell = uint8_t;
  static constexpr int CODED = WIDTH - TAIL, SCALES = (CODED + GROUP - 1) / GROUP;
  static constexpr int CODE_BYTES = CODED * BITS / 8, SCALE_AT = CODE_BYTES + 2 * TAIL;
  static constexpr int ROW = SCALE_AT + (TAIL ? (SCALES + 7) / 8 * 8 : SCALES), BYTES = ROW;

  static TW_INLINE void decode_scales(const uint8_t* row, float* scales) {
    const uint8_t* p = row + SCALE_AT;
    int i = 0;
    if constexpr (SCALE_IS_E4M3)
      for (; i + 16 <= SCALES; i += 16) store(scales + i, sixteen_e4m3(p + i));
    for (; i < SCALES; ++i) scales[i] = SCALE_IS_E4M3 ? e4m3_f32(p[i]) : ue8m0_f32(p[i]);
  }

  // One column, for the places where sixteen do not fit.
  static TW_INLINE float column(const uint8_t* row, const float* scales, int d) {
    if (d >= WIDTH) return 0.0f;
    if (d >= CODED) {
      uint16_t half;
      memcpy(&half, row + CODE_BYTES + 2 * (d - CODED), 2);
      return f32_from_bf16(half);
    }
    const float code = BITS == 8 ? e4m3_f32(row[d]) : e2m1_f32((uint8_t)(row[d / 2] >> (d % 2 * 4) & 15));
    return code * scales[d / GROUP];
  }

  static TW_INLINE void decode(const uint8_t* row, float* out, int64_t stride) {
    float scales[SCALES];
    decode_scales(row, scales);
    constexpr int CODED16 = CODED / 16, ALL16 = (WIDTH + 15) / 16;
    for (int c = 0; c < CODED16; ++c) {
      const v16 code = BITS == 8 ? sixteen_e4m3(row + 16 * c) : sixteen_e2m1(row + 8 * c);
      store(out + c * stride, mul(code, set1(scales[16 * c / GROUP])));
    }
    for (int c = CODED16; c < ALL16; ++c) {
      if (16 * c >= CODED && 16 * c + 16 <= WIDTH)
        store(out + c * stride, load_bf16((const uint16_t*)(row + CODE_BYTES + 2 * (16 * c - CODED))));
      else
        for (int d = 0; d < 16; ++d) out[c * stride + d] = column(row, scales, 16 * c + d);
    }
  }
};

}  // namespace tw
