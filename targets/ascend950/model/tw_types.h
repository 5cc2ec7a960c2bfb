// Number types as they lie in memory, conversions, and short vectors.
#pragma once
#include <math.h>
#include <stdint.h>

#include <type_traits>

#include "tw_keywords.h"

// The two sides of the library are compiled with different flags: their inline functions must not
// be merged.
#ifndef TW_SIDE
#define TW_SIDE kernel_side
#endif

namespace tw {
inline namespace TW_SIDE {
template <class To, class From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "equal sizes");
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}

inline uint16_t bf16_bits(float x) {  // to nearest even; NaN stays NaN
  uint32_t u = bits_as<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline float bf16_value(uint16_t bits) { return bits_as<float>((uint32_t)bits << 16); }

// Rounds to `mantissa` bits with smallest exponent `low` (of the value 1.x), to nearest even, and
// saturates at `largest`. Exact for every format narrower than fp32.
inline double round_to(double x, int mantissa, int low) {
  if (x == 0 || !isfinite(x)) return x;
  int exponent;
  frexp(x, &exponent);
  int step = (exponent - 1 < low ? low : exponent - 1) - mantissa;
  return ldexp(nearbyint(ldexp(x, -step)), step);
}

inline uint16_t f16_bits(float x) {
  uint16_t sign = (uint16_t)(bits_as<uint32_t>(x) >> 16 & 0x8000);
  if (x != x) return sign | 0x7e00;
  double a = fabs(round_to((double)x, 10, -14));
  if (a >= 65520) return sign | 0x7c00;
  if (a < ldexp(1.0, -14)) return sign | (uint16_t)ldexp(a, 24);
  int exponent;
  double fraction = frexp(a, &exponent);
  return sign | (uint16_t)((exponent + 14) << 10) | (uint16_t)((fraction * 2 - 1) * 1024);
}

inline float f16_value(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double a = exponent == 31 ? (mantissa ? NAN : INFINITY)
             : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                            : ldexp(mantissa, -24);
  return (float)(bits & 0x8000 ? -a : a);
}

// An 8-bit float: e4m3 has no infinity and saturates at 448, e5m2 at 57344.
inline uint8_t fp8_bits(float x, int mantissa_bits) {
  int bias = mantissa_bits == 3 ? 7 : 15, low = 1 - bias;
  uint8_t sign = (uint8_t)(bits_as<uint32_t>(x) >> 24 & 0x80);
  if (x != x) return sign | 0x7f;
  double largest = mantissa_bits == 3 ? 448 : 57344;
  double a = fmin(fabs(round_to((double)x, mantissa_bits, low)), largest);
  if (a < ldexp(1.0, low)) return sign | (uint8_t)ldexp(a, mantissa_bits - low);
  int exponent;
  double fraction = frexp(a, &exponent);
  double mantissa = (fraction * 2 - 1) * (1 << mantissa_bits);
  return sign | (uint8_t)((exponent - 1 + bias) << mantissa_bits) | (uint8_t)mantissa;
}

inline float fp8_value(uint8_t bits, int mantissa_bits) {
  int bias = mantissa_bits == 3 ? 7 : 15, mask = (1 << mantissa_bits) - 1;
  int exponent = (bits & 0x7f) >> mantissa_bits, mantissa = bits & mask;
  double a = exponent ? ldexp(mask + 1 + mantissa, exponent - bias - mantissa_bits)
                      : ldexp(mantissa, 1 - bias - mantissa_bits);
  if (mantissa_bits == 3 && (bits & 0x7f) == 0x7f) a = NAN;
  if (mantissa_bits == 2 && exponent == 31) a = mantissa ? NAN : INFINITY;
  return (float)(bits & 0x80 ? -a : a);
}

// A 4-bit float, of which 0 and the first step have no exponent: e2m1 reaches 6, e1m2 1.75.
inline float fp4_value(uint8_t bits, int mantissa_bits) {
  static const float wide[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  float size = mantissa_bits == 1 ? wide[bits & 7] : (float)(bits & 7) * 0.25f;
  return bits & 8 ? -size : size;
}

// A power of two: 2^-127 to 2^127, and NaN.
inline float e8m0_value(uint8_t bits) { return bits == 255 ? NAN : ldexpf(1.0f, (int)bits - 127); }
}  // namespace TW_SIDE
}  // namespace tw

struct half {
  uint16_t bits;
  half() = default;
  half(float x) : bits(tw::f16_bits(x)) {}
  operator float() const { return tw::f16_value(bits); }
};

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float x) : bits(tw::bf16_bits(x)) {}
  operator float() const { return tw::bf16_value(bits); }
};

template <int kMantissa>
struct tw_fp8 {
  uint8_t bits;
  tw_fp8() = default;
  tw_fp8(float x) : bits(tw::fp8_bits(x, kMantissa)) {}
  operator float() const { return tw::fp8_value(bits, kMantissa); }
};
typedef tw_fp8<3> float8_e4m3_t;
typedef tw_fp8<2> float8_e5m2_t;
typedef float8_e4m3_t fp8_e4m3fn_t;
typedef float8_e5m2_t fp8_e5m2_t;
struct float8_e8m0_t { uint8_t bits; };
typedef float8_e8m0_t fp8_e8m0_t;
struct float4_e2m1x2_t { uint8_t bits; };
struct float4_e1m2x2_t { uint8_t bits; };
typedef float4_e2m1x2_t fp4x2_e2m1_t;
typedef float4_e1m2x2_t fp4x2_e1m2_t;
struct int4b_t { uint8_t bits; };

#define TW_SHORT_VECTORS(T, N)                    \
  struct alignas(sizeof(T)) N##1 { T x; };        \
  struct alignas(2 * sizeof(T)) N##2 { T x, y; }; \
  struct N##3 { T x, y, z; };                     \
  struct alignas(4 * sizeof(T)) N##4 { T x, y, z, w; };
TW_SHORT_VECTORS(float, float)
TW_SHORT_VECTORS(int32_t, int)
TW_SHORT_VECTORS(uint32_t, uint)
TW_SHORT_VECTORS(int16_t, short)
TW_SHORT_VECTORS(uint16_t, ushort)
TW_SHORT_VECTORS(int8_t, char)
TW_SHORT_VECTORS(uint8_t, uchar)
TW_SHORT_VECTORS(int64_t, longlong)
#undef TW_SHORT_VECTORS
struct alignas(4) half2 { half x, y; };
struct alignas(4) bfloat16x2_t { bfloat16_t x, y; };
struct alignas(2) float8_e4m3x2_t { float8_e4m3_t x, y; };
struct alignas(2) float8_e5m2x2_t { float8_e5m2_t x, y; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int32_t x, int32_t y) { return {x, y}; }
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
#define TW_PAIRWISE(V, op)                                          \
  inline V##2 operator op(V##2 a, V##2 b) { return {a.x op b.x, a.y op b.y}; } \
  inline V##4 operator op(V##4 a, V##4 b) {                         \
    return {a.x op b.x, a.y op b.y, a.z op b.z, a.w op b.w};        \
  }
TW_PAIRWISE(float, +)
TW_PAIRWISE(float, -)
TW_PAIRWISE(float, *)
TW_PAIRWISE(float, /)
TW_PAIRWISE(int, +)
TW_PAIRWISE(int, -)
TW_PAIRWISE(int, *)
#undef TW_PAIRWISE

inline float2 __bfloat1622float2(bfloat16x2_t v) { return {(float)v.x, (float)v.y}; }
inline bfloat16x2_t __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline float2 __half22float2(half2 v) { return {(float)v.x, (float)v.y}; }
inline half2 __float22half2_rn(float2 v) { return {half(v.x), half(v.y)}; }
inline float2 __e4m3x22float2(float8_e4m3x2_t v) { return {(float)v.x, (float)v.y}; }
inline float2 __e5m2x22float2(float8_e5m2x2_t v) { return {(float)v.x, (float)v.y}; }
inline float __bfloat162float(bfloat16_t v) { return v; }
inline bfloat16_t __float2bfloat16_rn(float v) { return v; }
inline float __half2float(half v) { return v; }
inline half __float2half_rn(float v) { return v; }

enum tw_saturation { __ASC_NOSAT, __ASC_SATFINITE };
enum tw_fp8_format { __ASC_E4M3, __ASC_E5M2 };
typedef uint16_t __asc_fp8x2_storage_t;
inline uint16_t __asc_cvt_float2_to_fp8x2(float2 v, tw_saturation, tw_fp8_format format) {
  int mantissa = format == __ASC_E4M3 ? 3 : 2;
  return (uint16_t)(tw::fp8_bits(v.x, mantissa) | tw::fp8_bits(v.y, mantissa) << 8);
}

template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
