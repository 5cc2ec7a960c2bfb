// SIMD calls that TileLang's shipped templates name and none of our kernels prints: loads and stores
// that change widths or repeat elements, gathers, squeezes, carries, histograms. Part of tw_simd.h.
#pragma once

namespace tw {
template <class T>
constexpr int kPerBlock = 32 / (int)sizeof(T);
template <class T>
inline const char* element(const Vec<T>& v, int i) { return (const char*)&v + i * (int)sizeof(T); }
}  // namespace tw

// A load of `count` elements into `in`, then `expression` for lane i; and one that moves the address on.
#define TW_LOAD(call, count, expression)                                                       \
  template <class T>                                                                           \
  inline void call(tw::Vec<T>& dst, T* src, int64_t offset = 0) {                              \
    constexpr int n = tw::Vec<T>::kLanes;                                                      \
    T in[count];                                                                               \
    tw_simd_load(in, tw::at(src) + (uint64_t)offset * sizeof(T), (int)sizeof in, #call);       \
    for (int i = 0; i < n; ++i) dst.lane[i] = expression;                                      \
  }                                                                                            \
  template <class T>                                                                           \
  inline void call##_postupdate(tw::Vec<T>& dst, T*& src, int32_t offset) {                    \
    call(dst, src);                                                                            \
    src += offset;                                                                             \
  }
TW_LOAD(asc_loadalign_upsample, n / 2, in[i / 2])
TW_LOAD(asc_loadalign_downsample, 2 * n, in[2 * i])
TW_LOAD(asc_loadalign_unpack, n / 2, i % 2 ? T{} : in[i / 2])
TW_LOAD(asc_loadalign_unpack4, n / 4, i % 4 ? T{} : in[i / 4])
TW_LOAD(asc_loadalign_brc_datablock, tw::kPerBlock<T>, in[i % tw::kPerBlock<T>])
TW_LOAD(asc_loadalign_brc_elem2datablock, 8, in[i / tw::kPerBlock<T>])
#undef TW_LOAD
template <class T>
inline void asc_loadalign_brc_elem_postupdate(tw::Vec<T>& dst, T*& src, int32_t offset) {
  asc_loadalign_brc_elem(dst, src);
  src += offset;
}
template <class T>
inline void asc_loadalign_deintlv(tw::Vec<T>& even, tw::Vec<T>& odd, T* src, int64_t offset = 0) {
  T in[2 * tw::Vec<T>::kLanes];
  tw_simd_load(in, tw::at(src) + (uint64_t)offset * sizeof(T), 512, "asc_loadalign_deintlv");
  for (int i = 0; i < tw::Vec<T>::kLanes; ++i) even.lane[i] = in[2 * i], odd.lane[i] = in[2 * i + 1];
}

// Predicates: every bit twice, or every second bit.
inline void asc_loadalign_upsample(vector_bool& dst, uint32_t* src, int64_t offset = 0) {
  uint8_t bits[16];
  tw_simd_load(bits, tw::at(src) + (uint64_t)offset, 16, "asc_loadalign_upsample");
  for (int i = 0; i < 256; ++i) dst.bit[i] = bits[i / 16] >> (i / 2 % 8) & 1;
}
inline void asc_loadalign_downsample(vector_bool& dst, uint32_t* src, int64_t offset = 0) {
  uint8_t bits[64];
  tw_simd_load(bits, tw::at(src) + (uint64_t)offset, 64, "asc_loadalign_downsample");
  for (int i = 0; i < 256; ++i) dst.bit[i] = bits[i / 4] >> (2 * i % 8) & 1;
}
inline void asc_storealign_pack(uint32_t* dst, vector_bool src, int64_t offset = 0) {
  uint8_t bits[16] = {}, all[16];
  for (int i = 0; i < 128; ++i) bits[i / 8] |= (uint8_t)(src.bit[2 * i] << (i % 8));
  __builtin_memset(all, 1, sizeof all);
  tw_simd_store(tw::at(dst) + (uint64_t)offset, bits, all, 16, "asc_storealign_pack");
}

namespace tw {
// The lowest `kept` bytes of each element, one after the other.
template <class T>
inline void store_low(T* dst, const Vec<T>& src, int64_t offset, const vector_bool& mask, int kept,
                      const char* name) {
  uint8_t out[256], bytes[256];
  for (int i = 0; i < Vec<T>::kLanes; ++i) {
    __builtin_memcpy(out + i * kept, element(src, i), (size_t)kept);
    __builtin_memset(bytes + i * kept, on<T>(mask, i), (size_t)kept);
  }
  tw_simd_store(at(dst) + (uint64_t)offset * sizeof(T), out, bytes, Vec<T>::kLanes * kept, name);
}
}  // namespace tw
template <class T>
inline void asc_storealign_pack(T* dst, tw::Vec<T> src, int64_t offset, vector_bool mask) {
  tw::store_low(dst, src, offset, mask, (int)sizeof(T) / 2, "asc_storealign_pack");
}
template <class T>
inline void asc_storealign_pack_quarter(T* dst, tw::Vec<T> src, int64_t offset, vector_bool mask) {
  static_assert(sizeof(T) == 4, "the lowest byte of each four");
  tw::store_low(dst, src, offset, mask, 1, "asc_storealign_pack_quarter");
}
template <class T>
inline void asc_storealign_intlv(T* dst, tw::Vec<T> even, tw::Vec<T> odd, int64_t offset = 0) {
  T out[2 * tw::Vec<T>::kLanes];
  uint8_t all[512];
  for (int i = 0; i < tw::Vec<T>::kLanes; ++i) out[2 * i] = even.lane[i], out[2 * i + 1] = odd.lane[i];
  __builtin_memset(all, 1, sizeof all);
  tw_simd_store(tw::at(dst) + (uint64_t)offset * sizeof(T), out, all, 512, "asc_storealign_intlv");
}
template <class T>  // with one register, as a template has it: no page documents what is stored
inline void asc_storealign_intlv(T*, tw::Vec<T>, int64_t, vector_bool) {
  tw::issue(tw::kIllegal, PIPE_V, "asc_storealign_intlv", "", 0, tw::at((const char*)TW_UNMODELLED));
}

// --- by an index --------------------------------------------------------------------------------

template <class D, class T, class I>
inline void asc_gather(tw::Vec<D>& dst, T* src, tw::Vec<I> index, vector_bool mask) {
  tw::Vec<D> result{};
  for (int i = 0; i < tw::Vec<D>::kLanes; ++i)  // a byte becomes the low one of two
    if (tw::on<D>(mask, i))
      tw_simd_load(&result.lane[i], tw::at(src) + (uint64_t)index.lane[i] * sizeof(T), sizeof(T), "asc_gather");
  dst = result;
}
template <class T, class I>
inline void asc_gather(tw::Vec<T>& dst, tw::Vec<T> src, tw::Vec<I> index) {
  tw::Vec<T> result;
  for (int i = 0; i < tw::Vec<T>::kLanes; ++i)
    result.lane[i] = src.lane[(uint64_t)index.lane[i] % (uint64_t)tw::Vec<T>::kLanes];
  dst = result;
}
template <class T>
inline void asc_gather_datablock(tw::Vec<T>& dst, T* src, vector_u32 index, vector_bool mask) {
  tw::Vec<T> in;
  for (int b = 0; b < 8; ++b)
    tw_simd_load((char*)&in + 32 * b, tw::at(src) + index.lane[b], 32, "asc_gather_datablock");
  tw::each(dst, mask, [&](int i) { return in.lane[i]; });
}
template <class T>
inline void asc_gather_datablock(tw::Vec<T>& dst, T* src, vector_u32 index) {
  asc_gather_datablock(dst, src, index, tw::first(256, 1));
}
template <class T, class I>
inline void asc_scatter(T* dst, tw::Vec<T> src, tw::Vec<I> index, vector_bool mask) {
  static_assert(sizeof(T) == sizeof(I), "which bytes of 256 have an index is not documented");
  uint8_t ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  for (int i = 0; i < tw::Vec<T>::kLanes; ++i)
    if (tw::on<T>(mask, i))
      tw_simd_store(tw::at(dst) + (uint64_t)index.lane[i] * sizeof(T), tw::element(src, i), ones,
                    sizeof(T), "asc_scatter");
}

// --- across lanes -------------------------------------------------------------------------------

template <class T>
inline void asc_squeeze(tw::Vec<T>& dst, tw::Vec<T> src, vector_bool mask) {
  tw::Vec<T> result{};
  int to = 0;
  for (int i = 0; i < tw::Vec<T>::kLanes; ++i)
    if (tw::on<T>(mask, i)) result.lane[to++] = src.lane[i];
  dst = result;
}
template <class T>
inline void asc_unsqueeze(tw::Vec<T>& dst, vector_bool mask) {
  int before = 0;
  for (int i = 0; i < tw::Vec<T>::kLanes; ++i) {
    dst.lane[i] = (T)before;
    before += tw::on<T>(mask, i);
  }
}
#define TW_EXTREME(name, op)                                                               \
  template <class T>                                                                       \
  inline void asc_reduce_##name##_datablock(tw::Vec<T>& dst, tw::Vec<T> x, vector_bool mask) { \
    tw::Vec<T> r{};                                                                        \
    for (int b = 0; b < 8; ++b) {                                                          \
      bool any = false;                                                                    \
      for (int i = b * tw::kPerBlock<T>; i < (b + 1) * tw::kPerBlock<T>; ++i)              \
        if (tw::on<T>(mask, i) && (!any || x.lane[i] op r.lane[b])) any = true, r.lane[b] = x.lane[i]; \
    }                                                                                      \
    dst = r;                                                                               \
  }
TW_EXTREME(max, >)
TW_EXTREME(min, <)
#undef TW_EXTREME

// dst counts on: how many bytes of src have, or have at most, each of 128 values from `least` on.
#define TW_HISTOGRAM(call, least, counted)                                                  \
  inline void call(vector_u16& dst, vector_u8 src, vector_bool mask) {                      \
    for (int n = least; n < least + 128; ++n)                                               \
      for (int i = 0; i < 256; ++i)                                                         \
        dst.lane[n - least] = (uint16_t)(dst.lane[n - least] + (mask.bit[i] && (counted))); \
  }
TW_HISTOGRAM(asc_frequency_histogram_bin0, 0, src.lane[i] == n)
TW_HISTOGRAM(asc_frequency_histogram_bin1, 128, src.lane[i] == n)
TW_HISTOGRAM(asc_cumulative_histogram_bin0, 0, src.lane[i] <= n)
TW_HISTOGRAM(asc_cumulative_histogram_bin1, 128, src.lane[i] <= n)
#undef TW_HISTOGRAM

// --- numbers of several words -------------------------------------------------------------------

template <class T>
inline void asc_addc(vector_bool& carry, tw::Vec<T>& dst, tw::Vec<T> x, tw::Vec<T> y, vector_bool given,
                     vector_bool mask) {
  vector_bool out{};
  tw::each(dst, mask, [&](int i) {
    uint64_t sum = (uint64_t)(uint32_t)x.lane[i] + (uint32_t)y.lane[i] + tw::on<T>(given, i);
    out.bit[4 * i] = sum >> 32 != 0;
    return (T)(uint32_t)sum;
  });
  carry = out;
}
template <class T>  // the result's bit is 0 where it borrows
inline void asc_subc(vector_bool& carry, tw::Vec<T>& dst, tw::Vec<T> x, tw::Vec<T> y, vector_bool given,
                     vector_bool mask) {
  vector_bool out{};
  tw::each(dst, mask, [&](int i) {
    uint64_t rest = (uint64_t)(uint32_t)x.lane[i] - (uint32_t)y.lane[i] - tw::on<T>(given, i);
    out.bit[4 * i] = rest >> 32 == 0;
    return (T)(uint32_t)rest;
  });
  carry = out;
}
template <class T>
inline void asc_mull(tw::Vec<T>& low, tw::Vec<T>& high, tw::Vec<T> x, tw::Vec<T> y, vector_bool mask) {
  auto product = [&](int i) { return (uint64_t)(int64_t)x.lane[i] * (uint64_t)(int64_t)y.lane[i]; };
  tw::Vec<T> above;
  tw::each(above, mask, [&](int i) { return (T)(uint32_t)(product(i) >> 32); });
  tw::each(low, mask, [&](int i) { return (T)(uint32_t)product(i); });
  high = above;
}
