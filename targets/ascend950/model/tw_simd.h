// SIMD register calls: registers of 256 bytes, masks with a bit per byte (an element looks at its
// first). Lanes that a mask leaves out become 0; sums are trees over adjacent lanes.
#pragma once
#include <math.h>

#include "tw_calls.h"

namespace tw {
template <class T>
struct Vec {
  static constexpr int kLanes = 256 / (int)sizeof(T);
  T lane[kLanes];
};
template <int kTag, int kValue> struct Tag {};
template <int kTag, int a, int b>
constexpr bool operator==(Tag<kTag, a>, Tag<kTag, b>) { return a == b; }
}  // namespace tw

struct vector_bool {
  uint8_t bit[256];
};
typedef tw::Vec<float> vector_f32, vector_float;
typedef tw::Vec<half> vector_f16, vector_half;
typedef tw::Vec<bfloat16_t> vector_bf16, vector_bfloat16_t;
typedef tw::Vec<float8_e4m3_t> vector_f8e4m3;
typedef tw::Vec<float8_e5m2_t> vector_f8e5m2;
typedef tw::Vec<float8_e8m0_t> vector_f8e8m0;
typedef tw::Vec<float4_e2m1x2_t> vector_f4e2m1x2;
typedef tw::Vec<float4_e1m2x2_t> vector_f4e1m2x2;
typedef tw::Vec<uint64_t> vector_u64;
typedef tw::Vec<int64_t> vector_s64;
typedef tw::Vec<uint32_t> vector_u32, vector_uint32_t;
typedef tw::Vec<int32_t> vector_s32, vector_int32_t;
typedef tw::Vec<uint16_t> vector_u16, vector_uint16_t;
typedef tw::Vec<int16_t> vector_s16, vector_int16_t;
typedef tw::Vec<uint8_t> vector_u8, vector_uint8_t;
typedef tw::Vec<int8_t> vector_s8, vector_int8_t;

constexpr tw::Tag<0, 0> MODE_ZEROING{};
constexpr tw::Tag<0, 1> MODE_MERGING{};
constexpr tw::Tag<1, 0> LOWER{};
constexpr tw::Tag<1, 1> HIGHER{};
constexpr tw::Tag<2, 0> POS_LOWEST{};
constexpr tw::Tag<2, 1> POS_HIGHEST{};
constexpr tw::Tag<3, 0> INC_ORDER{};
constexpr tw::Tag<3, 1> DEC_ORDER{};
constexpr tw::Tag<4, 0> Bin_N0{};
constexpr tw::Tag<4, 1> Bin_N1{};
constexpr tw::Tag<5, 0> POST_UPDATE{};
constexpr tw::Tag<6, 0> PART_EVEN{};
constexpr tw::Tag<6, 1> PART_ODD{};
constexpr tw::Tag<6, 0> PART_P0{};
constexpr tw::Tag<6, 1> PART_P1{};
constexpr tw::Tag<6, 2> PART_P2{};
constexpr tw::Tag<6, 3> PART_P3{};
constexpr tw::Tag<7, 0> ROUND_R{};
constexpr tw::Tag<7, 1> ROUND_A{};
constexpr tw::Tag<7, 2> ROUND_F{};
constexpr tw::Tag<7, 3> ROUND_C{};
constexpr tw::Tag<7, 4> ROUND_Z{};
constexpr tw::Tag<8, 0> RS_DISABLE{};
constexpr tw::Tag<8, 1> RS_ENABLE{};
// Patterns: how many first elements; the others every nth.
constexpr tw::Tag<9, 256> PAT_ALL{};
constexpr tw::Tag<9, 0> PAT_ALLF{};
constexpr tw::Tag<9, 1> PAT_VL1{};
constexpr tw::Tag<9, 2> PAT_VL2{};
constexpr tw::Tag<9, 3> PAT_VL3{};
constexpr tw::Tag<9, 4> PAT_VL4{};
constexpr tw::Tag<9, 8> PAT_VL8{};
constexpr tw::Tag<9, 16> PAT_VL16{};
constexpr tw::Tag<9, 32> PAT_VL32{};
constexpr tw::Tag<9, 64> PAT_VL64{};
constexpr tw::Tag<9, 128> PAT_VL128{};
constexpr tw::Tag<9, -3> PAT_M3{};
constexpr tw::Tag<9, -4> PAT_M4{};

namespace tw {
template <class T>
inline bool on(const vector_bool& mask, int lane) { return mask.bit[lane * (int)sizeof(T)]; }
inline vector_bool first(int count, int bytes) {
  vector_bool mask;
  for (int i = 0; i < 256; ++i)
    mask.bit[i] = i % bytes == 0 && (count >= 0 ? i / bytes < count : i / bytes % -count == 0);
  return mask;
}
inline vector_bool take(uint32_t& count, int bytes) {  // and count down by a register
  int lanes = 256 / bytes, now = count < (uint32_t)lanes ? (int)count : lanes;
  count -= (uint32_t)now;
  return first(now, bytes);
}
template <class T, class F>
inline void each(Vec<T>& dst, const vector_bool& mask, F f) {
  Vec<T> result;
  for (int i = 0; i < Vec<T>::kLanes; ++i) result.lane[i] = on<T>(mask, i) ? (T)f(i) : T(0);
  dst = result;
}
template <class T, class F>
inline T tree(const Vec<T>& v, const vector_bool& mask, T zero, int begin, int count, F f) {
  T values[256];
  for (int i = 0; i < count; ++i) values[i] = on<T>(mask, begin + i) ? v.lane[begin + i] : zero;
  for (int width = 1; width < count; width *= 2)
    for (int i = 0; i + width < count; i += 2 * width) values[i] = f(values[i], values[i + width]);
  return values[0];
}
}  // namespace tw

template <int n> inline vector_bool asc_create_mask_b8(tw::Tag<9, n>) { return tw::first(n, 1); }
template <int n> inline vector_bool asc_create_mask_b16(tw::Tag<9, n>) { return tw::first(n, 2); }
template <int n> inline vector_bool asc_create_mask_b32(tw::Tag<9, n>) { return tw::first(n, 4); }
inline vector_bool asc_update_mask_b8(uint32_t& count) { return tw::take(count, 1); }
inline vector_bool asc_update_mask_b16(uint32_t& count) { return tw::take(count, 2); }
inline vector_bool asc_update_mask_b32(uint32_t& count) { return tw::take(count, 4); }

#define TW_BINARY(call, expression)                                                          \
  template <class T>                                                                         \
  inline void call(tw::Vec<T>& dst, tw::Vec<T> x, tw::Vec<T> y, vector_bool mask) {          \
    tw::each(dst, mask, [&](int i) { T a = x.lane[i], b = y.lane[i]; return expression; });  \
  }
#define TW_SCALAR(call, expression)                                                          \
  template <class T, class S>                                                                \
  inline void call(tw::Vec<T>& dst, tw::Vec<T> x, S s, vector_bool mask) {                   \
    tw::each(dst, mask, [&](int i) { T a = x.lane[i], b = (T)s; return expression; });       \
  }
#define TW_UNARY(call, expression)                                                           \
  template <class T>                                                                         \
  inline void call(tw::Vec<T>& dst, tw::Vec<T> x, vector_bool mask) {                        \
    tw::each(dst, mask, [&](int i) { T a = x.lane[i]; return expression; });                 \
  }
TW_BINARY(asc_add, a + b)
TW_BINARY(asc_sub, a - b)
TW_BINARY(asc_mul, a * b)
TW_BINARY(asc_div, a / b)
TW_BINARY(asc_max, a > b ? a : b)
TW_BINARY(asc_min, a < b ? a : b)
TW_BINARY(asc_and, a & b)
TW_BINARY(asc_or, a | b)
TW_BINARY(asc_xor, a ^ b)
TW_BINARY(asc_shiftleft, a << b)
TW_BINARY(asc_shiftright, a >> b)
TW_BINARY(asc_abs_sub, a > b ? a - b : b - a)
TW_BINARY(asc_prelu, a > T(0) ? a : a * b)
TW_BINARY(asc_exp_sub, expf((float)a - (float)b))
TW_SCALAR(asc_add_scalar, a + b)
TW_SCALAR(asc_mul_scalar, a * b)
TW_SCALAR(asc_max_scalar, a > b ? a : b)
TW_SCALAR(asc_min_scalar, a < b ? a : b)
TW_SCALAR(asc_shiftleft_scalar, a << b)
TW_SCALAR(asc_shiftright_scalar, a >> b)
TW_SCALAR(asc_leakyrelu, a > T(0) ? a : a * b)
TW_UNARY(asc_abs, a < T(0) ? T(-a) : a)
TW_UNARY(asc_neg, -a)
TW_UNARY(asc_relu, a > T(0) ? a : T(0))
TW_UNARY(asc_not, ~a)
TW_UNARY(asc_exp, expf((float)a))
TW_UNARY(asc_ln, logf((float)a))
TW_UNARY(asc_sqrt, sqrtf((float)a))
#undef TW_BINARY
#undef TW_SCALAR
#undef TW_UNARY

#define TW_COMPARE(name, op)                                                                 \
  template <class T>                                                                         \
  inline void asc_##name(vector_bool& dst, tw::Vec<T> x, tw::Vec<T> y, vector_bool mask) {   \
    vector_bool r{};                                                                         \
    for (int i = 0; i < tw::Vec<T>::kLanes; ++i)                                             \
      r.bit[i * (int)sizeof(T)] = tw::on<T>(mask, i) && x.lane[i] op y.lane[i];              \
    dst = r;                                                                                 \
  }                                                                                          \
  template <class T, class S>                                                                \
  inline void asc_##name##_scalar(vector_bool& dst, tw::Vec<T> x, S s, vector_bool mask) {   \
    vector_bool r{};                                                                         \
    for (int i = 0; i < tw::Vec<T>::kLanes; ++i)                                             \
      r.bit[i * (int)sizeof(T)] = tw::on<T>(mask, i) && x.lane[i] op (T)s;                   \
    dst = r;                                                                                 \
  }
TW_COMPARE(eq, ==)
TW_COMPARE(ne, !=)
TW_COMPARE(gt, >)
TW_COMPARE(ge, >=)
TW_COMPARE(lt, <)
TW_COMPARE(le, <=)
#undef TW_COMPARE

#define TW_PREDICATE(call, expression)                                                     \
  inline void call(vector_bool& dst, vector_bool x, vector_bool y, vector_bool mask) {     \
    for (int i = 0; i < 256; ++i) {                                                        \
      uint8_t a = x.bit[i], b = y.bit[i];                                                  \
      dst.bit[i] = mask.bit[i] && (expression);                                            \
    }                                                                                      \
  }
TW_PREDICATE(asc_and, a && b)
TW_PREDICATE(asc_or, a || b)
TW_PREDICATE(asc_xor, a != b)
#undef TW_PREDICATE
inline void asc_not(vector_bool& dst, vector_bool x, vector_bool mask) {
  for (int i = 0; i < 256; ++i) dst.bit[i] = mask.bit[i] && !x.bit[i];
}
inline void asc_select(vector_bool& dst, vector_bool x, vector_bool y, vector_bool mask) {
  for (int i = 0; i < 256; ++i) dst.bit[i] = mask.bit[i] ? x.bit[i] : y.bit[i];
}
template <class T>
inline void asc_select(tw::Vec<T>& dst, tw::Vec<T> x, tw::Vec<T> y, vector_bool mask) {
  for (int i = 0; i < tw::Vec<T>::kLanes; ++i) dst.lane[i] = tw::on<T>(mask, i) ? x.lane[i] : y.lane[i];
}
template <class T, class S>
inline void asc_duplicate_scalar(tw::Vec<T>& dst, S value, vector_bool mask) {
  tw::each(dst, mask, [&](int) { return (T)value; });
}
template <class T>
inline void asc_duplicate(tw::Vec<T>& dst, tw::Vec<T> x, vector_bool mask) {
  tw::each(dst, mask, [&](int) { return x.lane[0]; });
}
template <class T>
inline void asc_madd(tw::Vec<T>& dst, tw::Vec<T> x, tw::Vec<T> y, vector_bool mask) {
  tw::Vec<T> old = dst;  // dst = dst * x + y
  tw::each(dst, mask, [&](int i) { return fmaf(old.lane[i], x.lane[i], y.lane[i]); });
}
template <class T, class Mode>
inline void vmula(tw::Vec<T>& dst, tw::Vec<T> x, tw::Vec<T> y, vector_bool mask, Mode) {
  tw::Vec<T> old = dst;  // dst = dst + x * y
  tw::each(dst, mask, [&](int i) { return fmaf(x.lane[i], y.lane[i], old.lane[i]); });
}
template <class T, class S>
inline void asc_axpy(tw::Vec<T>& dst, tw::Vec<T> x, S s, vector_bool mask) {
  tw::Vec<T> old = dst;
  tw::each(dst, mask, [&](int i) { return fmaf(x.lane[i], (float)s, old.lane[i]); });
}

template <class D, class T>
inline void asc_reduce_sum(tw::Vec<D>& dst, tw::Vec<T> x, vector_bool mask) {
  dst = tw::Vec<D>{};
  dst.lane[0] = (D)tw::tree(x, mask, T(0), 0, tw::Vec<T>::kLanes, [](T a, T b) { return T(a + b); });
}
template <class T>
inline void asc_reduce_sum_datablock(tw::Vec<T>& dst, tw::Vec<T> x, vector_bool mask) {
  dst = tw::Vec<T>{};
  for (int i = 0, n = 32 / (int)sizeof(T); i < 8; ++i)
    dst.lane[i] = tw::tree(x, mask, T(0), i * n, n, [](T a, T b) { return T(a + b); });
}
template <class T>
inline void asc_pair_reduce_sum(tw::Vec<T>& dst, tw::Vec<T> x, vector_bool mask) {
  tw::Vec<T> r{};
  for (int i = 0; i < tw::Vec<T>::kLanes / 2; ++i)
    r.lane[i] = tw::tree(x, mask, T(0), 2 * i, 2, [](T a, T b) { return T(a + b); });
  dst = r;
}
#define TW_EXTREME(name, op)                                                               \
  template <class T>                                                                       \
  inline void asc_reduce_##name(tw::Vec<T>& dst, tw::Vec<T> x, vector_bool mask) {         \
    tw::Vec<T> r{};                                                                        \
    int best = -1;                                                                         \
    for (int i = 0; i < tw::Vec<T>::kLanes; ++i)                                           \
      if (tw::on<T>(mask, i) && (best < 0 || x.lane[i] op x.lane[best])) best = i;         \
    if (best >= 0) {                                                                       \
      r.lane[0] = x.lane[best];                                                            \
      uint32_t at = (uint32_t)best;                                                        \
      __builtin_memcpy(&r.lane[1], &at, sizeof(T) < 4 ? sizeof(T) : 4);                    \
    }                                                                                      \
    dst = r;                                                                               \
  }
TW_EXTREME(max, >)
TW_EXTREME(min, <)
#undef TW_EXTREME

template <class T>
inline void asc_intlv(tw::Vec<T>& d0, tw::Vec<T>& d1, tw::Vec<T> x, tw::Vec<T> y) {
  constexpr int n = tw::Vec<T>::kLanes;
  for (int i = 0; i < n; ++i) {
    tw::Vec<T>& d = i < n / 2 ? d0 : d1;
    d.lane[2 * i % n] = x.lane[i], d.lane[2 * i % n + 1] = y.lane[i];
  }
}
template <class T>
inline void asc_deintlv(tw::Vec<T>& d0, tw::Vec<T>& d1, tw::Vec<T> x, tw::Vec<T> y) {
  constexpr int n = tw::Vec<T>::kLanes;
  for (int i = 0; i < n; ++i) {
    d0.lane[i] = 2 * i < n ? x.lane[2 * i] : y.lane[2 * i - n];
    d1.lane[i] = 2 * i < n ? x.lane[2 * i + 1] : y.lane[2 * i - n + 1];
  }
}
#include "tw_simd_memory.h"
#include "tw_simd_more.h"
