// SIMD loads, stores, conversions and index ramps. Part of tw_simd.h.
#pragma once

template <class T>
inline void asc_loadalign(tw::Vec<T>& dst, T* src, int64_t offset = 0) {
  tw_simd_load(&dst, tw::at(src) + (uint64_t)offset * sizeof(T), 256, "asc_loadalign");
}
template <class T>
inline void asc_loadalign_postupdate(tw::Vec<T>& dst, T*& src, int32_t offset) {
  asc_loadalign(dst, src);
  src += offset;
}
template <class T>
inline void asc_loadalign_brc_elem(tw::Vec<T>& dst, T* src, int64_t offset = 0) {
  T value;
  tw_simd_load(&value, tw::at(src) + (uint64_t)offset * sizeof(T), sizeof(T), "asc_loadalign_brc_elem");
  for (T& lane : dst.lane) lane = value;
}
inline void asc_loadalign(vector_bool& dst, uint32_t* src, int64_t offset = 0) {
  uint8_t bits[32];
  tw_simd_load(bits, tw::at(src) + (uint64_t)offset, 32, "asc_loadalign");
  for (int i = 0; i < 256; ++i) dst.bit[i] = bits[i / 8] >> (i % 8) & 1;
}
inline void asc_storealign(uint32_t* dst, vector_bool src, int64_t offset = 0) {
  uint8_t bits[32] = {}, all[32];
  for (int i = 0; i < 256; ++i) bits[i / 8] |= (uint8_t)(src.bit[i] << (i % 8));
  __builtin_memset(all, 1, sizeof all);
  tw_simd_store(tw::at(dst) + (uint64_t)offset, bits, all, 32, "asc_storealign");
}
namespace tw {
template <class T>
inline void byte_mask_of(const vector_bool& mask, uint8_t* bytes) {
  for (int i = 0; i < 256; ++i) bytes[i] = mask.bit[i / (int)sizeof(T) * (int)sizeof(T)];
}
}  // namespace tw
template <class T>
inline void asc_storealign(T* dst, tw::Vec<T> src, int64_t offset, vector_bool mask) {
  uint8_t bytes[256];
  tw::byte_mask_of<T>(mask, bytes);
  tw_simd_store(tw::at(dst) + (uint64_t)offset * sizeof(T), &src, bytes, 256, "asc_storealign");
}
template <class T>
inline void asc_storealign(T* dst, tw::Vec<T> src, vector_bool mask) { asc_storealign(dst, src, 0, mask); }
// Eight blocks of 32 bytes, `block_stride` blocks apart.
template <class T>
inline void asc_storealign(T* dst, tw::Vec<T> src, uint16_t block_stride, uint16_t, vector_bool mask) {
  uint8_t bytes[256];
  tw::byte_mask_of<T>(mask, bytes);
  for (int b = 0; b < 8; ++b)
    tw_simd_store(tw::at(dst) + (uint64_t)b * block_stride * 32, (const char*)&src + b * 32,
                  bytes + b * 32, 32, "asc_storealign");
}
template <class T>
inline void asc_storealign_postupdate(T*& dst, tw::Vec<T> src, uint16_t block_stride,
                                      uint16_t repeat_stride, vector_bool mask) {
  asc_storealign(dst, src, block_stride, repeat_stride, mask);
  dst += repeat_stride * 32 / sizeof(T);
}
template <class T>
inline void asc_storealign_1st(T* dst, tw::Vec<T> src, int64_t offset = 0) {
  uint8_t ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  tw_simd_store(tw::at(dst) + (uint64_t)offset * sizeof(T), &src, ones, sizeof(T), "asc_storealign_1st");
}
template <class D, class S>
inline void asc_pack_to_low(tw::Vec<D>& dst, tw::Vec<S> src) {
  tw::Vec<D> r{};
  for (int i = 0; i < tw::Vec<S>::kLanes; ++i) r.lane[i] = (D)src.lane[i];
  dst = r;
}
template <class D, class S>
inline void asc_pack_to_high(tw::Vec<D>& dst, tw::Vec<S> src) {
  tw::Vec<D> r{};
  for (int i = 0; i < tw::Vec<S>::kLanes; ++i) r.lane[i + tw::Vec<S>::kLanes] = (D)src.lane[i];
  dst = r;
}
template <class D, class S>
inline void asc_unpack_lower(tw::Vec<D>& dst, tw::Vec<S> src) {
  for (int i = 0; i < tw::Vec<D>::kLanes; ++i) dst.lane[i] = (D)src.lane[i];
}
template <class D, class S>
inline void asc_unpack_upper(tw::Vec<D>& dst, tw::Vec<S> src) {
  for (int i = 0; i < tw::Vec<D>::kLanes; ++i) dst.lane[i] = (D)src.lane[i + tw::Vec<D>::kLanes];
}
template <class T, class S>
inline void asc_arange(tw::Vec<T>& dst, S first) {
  for (int i = 0; i < tw::Vec<T>::kLanes; ++i) dst.lane[i] = (T)(first + (S)i);
}
template <class T, class S>
inline void asc_arange_descend(tw::Vec<T>& dst, S first) {
  for (int i = 0; i < tw::Vec<T>::kLanes; ++i) dst.lane[i] = (T)(first - (S)i);
}
template <class T>
inline void asc_mem_bar(T) {}

namespace tw {
template <class C> struct PartOf { static constexpr int value = 0; };
template <int part> struct PartOf<Tag<6, part>> { static constexpr int value = part; };
template <class C> struct RoundOf { static constexpr int value = 0; };
template <int mode> struct RoundOf<Tag<7, mode>> { static constexpr int value = mode; };
inline double rounded(double x, int mode) {
  switch (mode) {
    case 1: return round(x);
    case 2: return floor(x);
    case 3: return ceil(x);
    case 4: return trunc(x);
    default: return nearbyint(x);
  }
}
template <class D, class S>
inline D convert(S value, int mode) {
  if constexpr (std::is_integral_v<D> && !std::is_integral_v<S>) return (D)rounded((float)value, mode);
  else if constexpr (std::is_integral_v<S> && std::is_integral_v<D>) return (D)value;
  else if constexpr (std::is_integral_v<S>) return D((float)value);
  else return D((float)value);
}
}  // namespace tw

// Between widths a part says which lanes of the narrower register take part: even or odd ones, or
// one of four.
template <class D, class S, class... C>
inline void vcvt(tw::Vec<D>& dst, tw::Vec<S> src, vector_bool mask, C...) {
  constexpr int part = (tw::PartOf<C>::value + ... + 0), mode = (tw::RoundOf<C>::value + ... + 0);
  constexpr int wide = sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S), lanes = 256 / wide;
  constexpr int in = wide / (int)sizeof(S), out = wide / (int)sizeof(D);
  tw::Vec<D> result{};
  for (int i = 0; i < lanes; ++i) {
    int from = i * in + (in > 1 ? part : 0), to = i * out + (out > 1 ? part : 0);
    if (tw::on<S>(mask, from)) result.lane[to] = tw::convert<D>(src.lane[from], mode);
  }
  dst = result;
}

// Predicates change width: an element of n bytes becomes one of n / 2 (pack) or 2 n (unpack).
inline void asc_pack_to_low(vector_bool& dst, vector_bool src) {
  for (int i = 0; i < 256; ++i) dst.bit[i] = i < 128 ? src.bit[2 * i] : 0;
}
inline void asc_pack_to_high(vector_bool& dst, vector_bool src) {
  for (int i = 0; i < 256; ++i) dst.bit[i] = i >= 128 ? src.bit[2 * (i - 128)] : 0;
}
inline void asc_unpack_lower(vector_bool& dst, vector_bool src) {
  for (int i = 0; i < 256; ++i) dst.bit[i] = i % 2 ? 0 : src.bit[i / 2];
}
inline void asc_unpack_upper(vector_bool& dst, vector_bool src) {
  for (int i = 0; i < 256; ++i) dst.bit[i] = i % 2 ? 0 : src.bit[128 + i / 2];
}
#define TW_INTERLEAVE(width, bytes)                                                          \
  inline void asc_intlv_##width(vector_bool& d0, vector_bool& d1, vector_bool x, vector_bool y) { \
    for (int i = 0; i < 256; ++i) {                                                          \
      int e = i / bytes, n = 256 / bytes;                                                    \
      for (int half = 0; half < 2; ++half) {                                                 \
        int source = half * n / 2 + e / 2;                                                   \
        (half ? d1 : d0).bit[i] = (e % 2 ? y : x).bit[source * bytes + i % bytes];           \
      }                                                                                      \
    }                                                                                        \
  }                                                                                          \
  inline void asc_deintlv_##width(vector_bool& d0, vector_bool& d1, vector_bool x, vector_bool y) { \
    for (int i = 0; i < 256; ++i) {                                                          \
      int e = i / bytes, n = 256 / bytes, from = 2 * e;                                      \
      vector_bool& s = from < n ? x : y;                                                     \
      d0.bit[i] = s.bit[from % n * bytes + i % bytes];                                       \
      d1.bit[i] = s.bit[(from + 1) % n * bytes + i % bytes];                                 \
    }                                                                                        \
  }
TW_INTERLEAVE(b8, 1)
TW_INTERLEAVE(b16, 2)
TW_INTERLEAVE(b32, 4)
#undef TW_INTERLEAVE
template <class T, class Mode>
inline void vmadd(tw::Vec<T>& dst, tw::Vec<T> x, tw::Vec<T> y, vector_bool mask, Mode) {
  asc_madd(dst, x, y, mask);
}
template <class T>
inline void asc_duplicate_highest(tw::Vec<T>& dst, tw::Vec<T> x, vector_bool mask) {
  tw::each(dst, mask, [&](int) { return x.lane[tw::Vec<T>::kLanes - 1]; });
}
