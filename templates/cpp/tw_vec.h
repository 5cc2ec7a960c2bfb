// v16: sixteen float lanes, the one vector type of the CPU kernels.
//
// A v16 is 2 x __m256 (AVX2), 1 x __m512 (AVX-512) or 4 x float32x4_t (NEON). Every operation here is
// correctly rounded lane by lane, so code written with v16 gives the same bits on all three.
// Compile with -ffp-contract=off: a multiply-add is fused only where fma() is written.
//
//   load, store            16 floats, any alignment
//   load_n, store_n        the first n lanes; lanes not loaded are 0
//   set1, zero             one value in all lanes
//   add sub mul div fma    fma(a, b, c) = a * b + c, rounded once
//   max, min               a > b ? a : b and a < b ? a : b (so a NaN in a gives b)
//   load_f16, load_bf16    16 halves, exact;  store_f16, store_bf16 round to nearest even
//   load_i8, load_u8       16 bytes as floats
//   load_u32 -> u16        16 words for bit fields: bits_f32(x, m) is (x & m) as floats and
//                          top_f32(x, s) is (x >> s) as floats; both integers must be below 2^31
//   load_e8m0              16 bytes b as 2^(b - 127); b is not 255
//   load_e4m3<w>           byte w of 16 words, an e4m3, as value * E4M3_UNIT, exact; none is a NaN; calls for
//                          w and w + 2 share work
//   load_e2m1<w>           codes of k = 0 .. 3 of 16 columns in 32 bytes, k = w: see `fp4` in
//                          tw_contract_formats.h; calls for 0 and 1, 2 and 3 share work
//   sum, max_lane          over lanes by the fixed tree 8 + 8, 4 + 4, 2 + 2, 1 + 1
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#else
#error "tw_vec.h: no vector unit known: compile for x86-64-v3, x86-64-v4 or aarch64"
#endif

#define TW_INLINE inline __attribute__((always_inline))
#define TW_NOINLINE __attribute__((noinline))
#define TW_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TW_UNROLL(count) TW_PRAGMA(unroll count)
#else
#define TW_UNROLL(count) TW_PRAGMA(GCC unroll count)
#endif

namespace tw {

static TW_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

static TW_INLINE float f32_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static TW_INLINE uint32_t bits_from_f32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static TW_INLINE float f32_from_bf16(uint16_t half) { return f32_from_bits((uint32_t)half << 16); }

// 2^(byte - 127); 0 gives the subnormal 2^-127.
static TW_INLINE float f32_from_e8m0(uint8_t byte) {
  const uint32_t bits = (uint32_t)byte << 23;
  return f32_from_bits(bits ? bits : 1u << 22);
}

// As a float, an e4m3 shifted to the top has the exponent bias 127 instead of 7. NaN is not known.
static TW_INLINE float f32_from_e4m3(uint8_t byte) {
  const uint32_t bits = (uint32_t)(byte & 0x80) << 24 | (uint32_t)(byte & 0x7f) << 20;
  return f32_from_bits(bits) * 0x1p120f;
}

// 0 .5 1 1.5 2 3 4 6 and their negatives.
static TW_INLINE float f32_from_e2m1(uint8_t code) {
  const uint32_t bits = (uint32_t)(code & 8) << 28 | (uint32_t)(code & 7) << 22;
  return f32_from_bits(bits) * 0x1p126f;
}

// Round to nearest even; a NaN stays a (quiet) NaN.
static TW_INLINE uint16_t bf16_from_f32(float value) {
  const uint32_t bits = bits_from_f32(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)
// ---------------------------------------------------------------- AVX-512: one register
struct v16 { __m512 x; };
struct u16 { __m512i x; };

static TW_INLINE v16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static TW_INLINE void store(float* p, v16 a) { _mm512_storeu_ps(p, a.x); }
static TW_INLINE v16 set1(float a) { return {_mm512_set1_ps(a)}; }
static TW_INLINE v16 add(v16 a, v16 b) { return {_mm512_add_ps(a.x, b.x)}; }
static TW_INLINE v16 sub(v16 a, v16 b) { return {_mm512_sub_ps(a.x, b.x)}; }
static TW_INLINE v16 mul(v16 a, v16 b) { return {_mm512_mul_ps(a.x, b.x)}; }
static TW_INLINE v16 div(v16 a, v16 b) { return {_mm512_div_ps(a.x, b.x)}; }
static TW_INLINE v16 fma(v16 a, v16 b, v16 c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
static TW_INLINE v16 max(v16 a, v16 b) { return {_mm512_max_ps(a.x, b.x)}; }
static TW_INLINE v16 min(v16 a, v16 b) { return {_mm512_min_ps(a.x, b.x)}; }
static TW_INLINE v16 load_n(const float* p, int n) {
  return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p)};
}
static TW_INLINE void store_n(float* p, v16 a, int n) {
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), a.x);
}
static TW_INLINE v16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
static TW_INLINE void store_f16(uint16_t* p, v16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT));
}
static TW_INLINE v16 load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static TW_INLINE v16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
static TW_INLINE v16 load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
static TW_INLINE v16 load_e8m0(const uint8_t* p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m512i bits = _mm512_slli_epi32(wide, 23);
  return {_mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(1 << 22)))};
}
// An e4m3 in the place of a half's sign, exponent and mantissa: the exponent's bias is 15 instead of 7.
// Halves, because an fp32 subnormal costs Intel's cores a hundred cycles.
constexpr float E4M3_UNIT = 1.0f / 256.0f, E4M3_ROWS = 256.0f;
template <int W>
static TW_INLINE v16 load_e4m3(const uint8_t* p) {
  const __m512i words = _mm512_loadu_si512(p);
  const __m512i placed = W == 3 ? words : _mm512_slli_epi32(words, 24 - 8 * W);
  const __m512i half = _mm512_and_si512(_mm512_srai_epi32(placed, 17), _mm512_set1_epi32(0xbf80));
  return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(half))};
}
template <int W>
static TW_INLINE v16 load_e2m1(const uint8_t* p) {
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                      -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  const __m256i columns = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)p), 0xd8);
  const __m512i codes = _mm512_cvtepu16_epi32(columns);  // a lookup reads the lowest 4 bits alone
  return {_mm512_permutexvar_ps(W == 0 ? codes : _mm512_srli_epi32(codes, W % 2 * 8 + W / 2 * 4), table)};
}
static TW_INLINE u16 load_u32(const void* p) { return {_mm512_loadu_si512(p)}; }
static TW_INLINE v16 bits_f32(u16 a, uint32_t mask) {
  return {_mm512_cvtepi32_ps(_mm512_and_si512(a.x, _mm512_set1_epi32((int)mask)))};
}
static TW_INLINE u16 shift_right(u16 a, int count) {
  return {_mm512_srl_epi32(a.x, _mm_cvtsi32_si128(count))};
}
static TW_INLINE v16 top_f32(u16 a, int count) {
  return {_mm512_cvtepi32_ps(shift_right(a, count).x)};
}

#elif defined(__AVX2__)
// ---------------------------------------------------------------- AVX2: two registers
struct v16 { __m256 x, y; };
struct u16 { __m256i x, y; };

static TW_INLINE v16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static TW_INLINE void store(float* p, v16 a) {
  _mm256_storeu_ps(p, a.x);
  _mm256_storeu_ps(p + 8, a.y);
}
static TW_INLINE v16 set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
#define TW_LANEWISE(name, op) \
  static TW_INLINE v16 name(v16 a, v16 b) { return {op(a.x, b.x), op(a.y, b.y)}; }
TW_LANEWISE(add, _mm256_add_ps)
TW_LANEWISE(sub, _mm256_sub_ps)
TW_LANEWISE(mul, _mm256_mul_ps)
TW_LANEWISE(div, _mm256_div_ps)
TW_LANEWISE(max, _mm256_max_ps)
TW_LANEWISE(min, _mm256_min_ps)
#undef TW_LANEWISE
static TW_INLINE v16 fma(v16 a, v16 b, v16 c) {
  return {_mm256_fmadd_ps(a.x, b.x, c.x), _mm256_fmadd_ps(a.y, b.y, c.y)};
}
static TW_INLINE __m256i lane_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static TW_INLINE v16 load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, lane_mask(n)), _mm256_maskload_ps(p + 8, lane_mask(n - 8))};
}
static TW_INLINE void store_n(float* p, v16 a, int n) {
  _mm256_maskstore_ps(p, lane_mask(n), a.x);
  _mm256_maskstore_ps(p + 8, lane_mask(n - 8), a.y);
}
static TW_INLINE v16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static TW_INLINE void store_f16(uint16_t* p, v16 a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.y, _MM_FROUND_TO_NEAREST_INT));
}
static TW_INLINE __m256 widen_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static TW_INLINE v16 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
static TW_INLINE v16 load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static TW_INLINE v16 load_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static TW_INLINE __m256 widen_e8m0(const uint8_t* p) {
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
  return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(1 << 22)));
}
static TW_INLINE v16 load_e8m0(const uint8_t* p) { return {widen_e8m0(p), widen_e8m0(p + 8)}; }
// An e4m3 in the place of an fp32's sign, low exponent and mantissa: the exponent's bias is 127 instead of 7,
// and its subnormals are subnormal here too. As halves they would have to be converted, at half the speed.
constexpr float E4M3_UNIT = 0x1p-120f, E4M3_ROWS = 0x1p64f;
template <int W>
static TW_INLINE __m256 widen_e4m3(const uint8_t* p) {
  const __m256i words = _mm256_loadu_si256((const __m256i*)p);
  const __m256i pair = _mm256_srai_epi16(W % 2 ? words : _mm256_slli_epi16(words, 8), 4);
  const __m256i placed = W / 2 ? pair : _mm256_slli_epi32(pair, 16);
  return _mm256_castsi256_ps(_mm256_and_si256(placed, _mm256_set1_epi32((int)0x87f00000u)));
}
template <int W>
static TW_INLINE v16 load_e4m3(const uint8_t* p) { return {widen_e4m3<W>(p), widen_e4m3<W>(p + 32)}; }
// Byte tables give both bytes of a code as bf16; unpacked, one 32-bit lane holds two values.
template <int W>
static TW_INLINE v16 load_e2m1(const uint8_t* p) {
  const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64));
  const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
  const __m256i both = _mm256_loadu_si256((const __m256i*)p);
  const __m256i codes =
      _mm256_and_si256(W / 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
  const __m256i first = _mm256_shuffle_epi8(low, codes), second = _mm256_shuffle_epi8(high, codes);
  const __m256i x = _mm256_unpacklo_epi8(first, second), y = _mm256_unpackhi_epi8(first, second);
  const __m256i keep = _mm256_set1_epi32((int)0xffff0000u);
  return {_mm256_castsi256_ps(W % 2 == 0 ? _mm256_slli_epi32(x, 16) : _mm256_and_si256(x, keep)),
          _mm256_castsi256_ps(W % 2 == 0 ? _mm256_slli_epi32(y, 16) : _mm256_and_si256(y, keep))};
}
static TW_INLINE u16 load_u32(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
static TW_INLINE v16 bits_f32(u16 a, uint32_t mask) {
  const __m256i keep = _mm256_set1_epi32((int)mask);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(a.x, keep)),
          _mm256_cvtepi32_ps(_mm256_and_si256(a.y, keep))};
}
static TW_INLINE u16 shift_right(u16 a, int count) {
  return {_mm256_srli_epi32(a.x, count), _mm256_srli_epi32(a.y, count)};
}
static TW_INLINE v16 top_f32(u16 a, int count) {
  const u16 top = shift_right(a, count);
  return {_mm256_cvtepi32_ps(top.x), _mm256_cvtepi32_ps(top.y)};
}

#else
// ---------------------------------------------------------------- NEON: four registers
struct v16 { float32x4_t x[4]; };
struct u16 { uint32x4_t x[4]; };

#define TW_EACH(type, expression) \
  type out;                       \
  TW_UNROLL(4)                    \
  for (int i = 0; i < 4; ++i) out.x[i] = (expression); \
  return out;
static TW_INLINE v16 load(const float* p) { TW_EACH(v16, vld1q_f32(p + 4 * i)) }
static TW_INLINE void store(float* p, v16 a) {
  TW_UNROLL(4)
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.x[i]);
}
static TW_INLINE v16 set1(float a) { TW_EACH(v16, vdupq_n_f32(a)) }
static TW_INLINE v16 add(v16 a, v16 b) { TW_EACH(v16, vaddq_f32(a.x[i], b.x[i])) }
static TW_INLINE v16 sub(v16 a, v16 b) { TW_EACH(v16, vsubq_f32(a.x[i], b.x[i])) }
static TW_INLINE v16 mul(v16 a, v16 b) { TW_EACH(v16, vmulq_f32(a.x[i], b.x[i])) }
static TW_INLINE v16 div(v16 a, v16 b) { TW_EACH(v16, vdivq_f32(a.x[i], b.x[i])) }
static TW_INLINE v16 fma(v16 a, v16 b, v16 c) { TW_EACH(v16, vfmaq_f32(c.x[i], a.x[i], b.x[i])) }
// The x86 rule, also for NaN and for zeros of two signs: a > b ? a : b.
static TW_INLINE v16 max(v16 a, v16 b) {
  TW_EACH(v16, vbslq_f32(vcgtq_f32(a.x[i], b.x[i]), a.x[i], b.x[i]))
}
static TW_INLINE v16 min(v16 a, v16 b) {
  TW_EACH(v16, vbslq_f32(vcltq_f32(a.x[i], b.x[i]), a.x[i], b.x[i]))
}
static TW_INLINE v16 load_n(const float* p, int n) {
  float lanes[16] = {0};
  for (int i = 0; i < n && i < 16; ++i) lanes[i] = p[i];
  return load(lanes);
}
static TW_INLINE void store_n(float* p, v16 a, int n) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < n && i < 16; ++i) p[i] = lanes[i];
}
static TW_INLINE v16 load_f16(const uint16_t* p) {
  TW_EACH(v16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))))
}
static TW_INLINE void store_f16(uint16_t* p, v16 a) {
  TW_UNROLL(4)
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.x[i])));
}
static TW_INLINE v16 load_bf16(const uint16_t* p) {
  TW_EACH(v16, vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16)))
}
static TW_INLINE v16 load_i8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t half[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
  TW_EACH(v16, vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(half[i / 2])
                                            : vget_low_s16(half[i / 2]))))
}
static TW_INLINE v16 load_u8(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t half[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))};
  TW_EACH(v16, vcvtq_f32_u32(vmovl_u16(i % 2 ? vget_high_u16(half[i / 2])
                                            : vget_low_u16(half[i / 2]))))
}
static TW_INLINE v16 load_e8m0(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t half[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))};
  TW_EACH(v16, vreinterpretq_f32_u32(vmaxq_u32(
      vshlq_n_u32(vmovl_u16(i % 2 ? vget_high_u16(half[i / 2]) : vget_low_u16(half[i / 2])), 23),
      vdupq_n_u32(1u << 22))))
}
// An e4m3 in the place of a half's sign, exponent and mantissa: the exponent's bias is 15 instead of 7.
constexpr float E4M3_UNIT = 1.0f / 256.0f, E4M3_ROWS = 256.0f;
template <int W>
static TW_INLINE float32x4_t widen_e4m3(const uint8_t* p) {
  const int32x4_t words = vreinterpretq_s32_u8(vld1q_u8(p));
  const int32x4_t placed = vshlq_s32(words, vdupq_n_s32(24 - 8 * W));
  const uint16x4_t half = vand_u16(vreinterpret_u16_s16(vshrn_n_s32(vshrq_n_s32(placed, 1), 16)), vdup_n_u16(0xbf80));
  return vcvt_f32_f16(vreinterpret_f16_u16(half));
}
template <int W>
static TW_INLINE v16 load_e4m3(const uint8_t* p) { TW_EACH(v16, widen_e4m3<W>(p + 16 * i)) }
// Byte tables give both bytes of a code as bf16; zipped, one 32-bit lane holds two values.
template <int W>
static TW_INLINE v16 load_e2m1(const uint8_t* p) {
  static const uint8_t tables[2][16] = {
      {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0},
      {0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0}};
  const uint8x16_t low = vld1q_u8(tables[0]), high = vld1q_u8(tables[1]);
  uint32x4_t pair[4];  // columns 0 .. 3, 4 .. 7, 8 .. 11, 12 .. 15
  TW_UNROLL(2)
  for (int lane = 0; lane < 2; ++lane) {
    const uint8x16_t both = vld1q_u8(p + 16 * lane);
    const uint8x16_t codes = W / 2 ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    const uint8x16_t first = vqtbl1q_u8(low, codes), second = vqtbl1q_u8(high, codes);
    pair[lane] = vreinterpretq_u32_u8(vzip1q_u8(first, second));
    pair[lane + 2] = vreinterpretq_u32_u8(vzip2q_u8(first, second));
  }
  TW_EACH(v16, vreinterpretq_f32_u32(W % 2 == 0 ? vshlq_n_u32(pair[i], 16)
                                                : vandq_u32(pair[i], vdupq_n_u32(0xffff0000u))))
}
static TW_INLINE u16 load_u32(const void* p) {
  TW_EACH(u16, vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)p + 16 * i)))
}
static TW_INLINE v16 bits_f32(u16 a, uint32_t mask) {
  TW_EACH(v16, vcvtq_f32_u32(vandq_u32(a.x[i], vdupq_n_u32(mask))))
}
static TW_INLINE u16 shift_right(u16 a, int count) {
  TW_EACH(u16, vshlq_u32(a.x[i], vdupq_n_s32(-count)))
}
static TW_INLINE v16 top_f32(u16 a, int count) {
  const u16 top = shift_right(a, count);
  TW_EACH(v16, vcvtq_f32_u32(top.x[i]))
}
#undef TW_EACH
#endif

// ---------------------------------------------------------------- common to all three
static TW_INLINE v16 zero() { return set1(0.0f); }

static TW_INLINE float sum(v16 a) {
  float lanes[16];
  store(lanes, a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  return lanes[0];
}

static TW_INLINE float max_lane(v16 a) {
  float lanes[16];
  store(lanes, a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

static TW_INLINE void store_bf16(uint16_t* p, v16 a) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) p[i] = bf16_from_f32(lanes[i]);
}

}  // namespace tw
