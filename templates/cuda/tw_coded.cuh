// Packed rows of paged states as bf16 tiles for matrix products: 64 rows of 512 columns, eight
// panels of 64 columns, each row of a panel 128 swizzled bytes. A row is codes | bf16 tail | scales.
//
// A code moved into the fields of a bf16 is its value times a power of two, subnormals included; the
// product with that power is exact, the one with the scale rounds once. Codes that are NaN are not
// known here: a row that holds NaN has a scale that is NaN (tw_quant).
#pragma once
#include "tw_hopper.cuh"

#define TW_PANEL 8192
#define TW_TILE (8 * TW_PANEL)

// Bits of a code, columns of codes and of a scale; bytes of a row and where its scales begin.
template <int kBits, int kCoded, int kGroup, bool kE4m3, int kBytes>
struct tw_format {
  static constexpr int bytes = kBytes;
  static constexpr int scale_at = kCoded * kBits / 8 + 2 * (512 - kCoded);
  static_assert(kBytes % 8 == 0, "loads are of eight bytes");
};

TW_DEVICE uint32_t tw_e4m3_pair(uint32_t x) {  // codes in the high bytes of both halves
  return tw_times(((x >> 4) & 0x07F007F0u) | (x & 0x80008000u), 0x7B807B80u);  // 2^120
}

// Four codes, times 2^-120: the high bytes of all, the low bytes, then pairs of both.
TW_DEVICE uint2 tw_e4m3_four(uint32_t x) {
  const uint32_t high = ((x >> 4) & 0x07070707u) | (x & 0x80808080u), low = (x << 4) & 0xF0F0F0F0u;
  return make_uint2(tw_permute(low, high, 0x5140), tw_permute(low, high, 0x7362));
}

// Four codes in the low half of x, by tables of the bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a sign that
// is set selects the sign of a byte, eight times.
TW_DEVICE uint2 tw_e2m1_four(uint32_t x) {
  const uint32_t size = x & 0x7777u, signs = tw_permute(0x80808080u, 0x80808080u, x);
  const uint32_t low = tw_permute(0xC0800000u, 0xC0804000u, size);
  const uint32_t high =
      tw_permute(0x3F3F3F00u, 0x40404040u, size) | ((signs << 1) & 0x80808080u);
  return make_uint2(tw_permute(low, high, 0x5140), tw_permute(low, high, 0x7362));
}

TW_DEVICE uint4 tw_scaled(uint2 first, uint2 second, uint32_t scale) {
  return make_uint4(tw_times(first.x, scale), tw_times(first.y, scale), tw_times(second.x, scale),
                    tw_times(second.y, scale));
}

// A scale in both halves.
template <bool kE4m3>
TW_DEVICE uint32_t tw_scale_pair(uint32_t code) {
  uint32_t bits = code == 255 ? 0x7FC0u : code == 0 ? 0x0040u : code << 7;
  if (kE4m3) bits = (code & 127) == 127 ? 0x7FC0u : tw_e4m3_pair(code << 8) & 0xFFFFu;
  return bits * 0x10001u;
}

// A row: a lane has two words of eight columns, and their scales.
template <class Format>
struct tw_row;

// Codes of e4m3: words `lane` and 32 + `lane`. The last eight lanes have words of the tail, if a row
// has one, as their second ones.
template <int kCoded, int kGroup, int kBytes>
struct tw_row<tw_format<8, kCoded, kGroup, false, kBytes>> {
  typedef tw_format<8, kCoded, kGroup, false, kBytes> Format;
  static constexpr bool tailed = kCoded < 512;
  uint2 first, second, tail;
  uint32_t scale, next_scale;

  __device__ __forceinline__ static uint32_t place(int lane) {
    return (lane >> 3) * TW_PANEL + ((lane & 7) << 4);
  }

  __device__ __forceinline__ void clear() {
    first = second = tail = make_uint2(0, 0);
    scale = next_scale = 127;
  }

  __device__ __forceinline__ void load(const unsigned char* state, int row, int lane) {
    const unsigned char* from = state + (int64_t)row * kBytes;
    const bool in_tail = tailed && lane >= 24;
    first = __ldg((const uint2*)from + lane);
    second = __ldg((const uint2*)from + (in_tail ? 2 * lane + 8 : lane + 32));
    tail = tailed ? __ldg((const uint2*)from + (in_tail ? 2 * lane + 9 : lane)) : make_uint2(0, 0);
    scale = __ldg(from + Format::scale_at + lane * 8 / kGroup);
    next_scale = __ldg(from + Format::scale_at + (in_tail ? 0 : (256 + lane * 8) / kGroup));
  }

  // Whether the power of two of codes and a scale are not one factor, which would be too large.
  __device__ __forceinline__ bool is_large() const { return max(scale, next_scale) > 134; }

  template <bool kLarge>
  __device__ __forceinline__ void store(uint32_t at, int lane) const {
    uint4 low = values<kLarge>(first, scale), high = values<kLarge>(second, next_scale);
    if (tailed && lane >= 24) high = make_uint4(second.x, second.y, tail.x, tail.y);
    tw_store16(at, low);
    tw_store16(at + 4 * TW_PANEL, high);
  }

  template <bool kLarge>
  __device__ __forceinline__ static uint4 values(uint2 x, uint32_t code) {
    const uint32_t factor = kLarge ? 0x7B807B80u : code * 0x00800080u + 0x3C003C00u;  // 2^120
    const uint4 found = tw_scaled(tw_e4m3_four(x.x), tw_e4m3_four(x.y), factor);
    if (!kLarge) return found;
    return tw_scaled(make_uint2(found.x, found.y), make_uint2(found.z, found.w),
                     tw_scale_pair<false>(code));
  }
};

// Codes of e2m1: words 2 `lane` and 2 `lane` + 1, every other four lanes the later one first, so that
// eight lanes store to all banks.
template <int kGroup, bool kE4m3, int kBytes>
struct tw_row<tw_format<4, 512, kGroup, kE4m3, kBytes>> {
  typedef tw_format<4, 512, kGroup, kE4m3, kBytes> Format;
  static_assert(kGroup % 16 == 0, "two words have one scale");
  uint2 codes;
  uint32_t scale;

  __device__ __forceinline__ static uint32_t place(int lane) {
    return (lane >> 2) * TW_PANEL + (((lane & 3) * 2 + ((lane >> 2) & 1)) << 4);
  }

  __device__ __forceinline__ void clear() {
    codes = make_uint2(0, 0);
    scale = kE4m3 ? 56 : 127;
  }

  __device__ __forceinline__ void load(const unsigned char* state, int row, int lane) {
    const unsigned char* from = state + (int64_t)row * kBytes;
    codes = __ldg((const uint2*)from + lane);
    scale = __ldg(from + Format::scale_at + lane * 16 / kGroup);
  }

  __device__ __forceinline__ bool is_large() const { return false; }

  template <bool kLarge>
  __device__ __forceinline__ void store(uint32_t at, int lane) const {
    const bool swapped = (lane >> 2) & 1;
    const uint32_t pair = tw_scale_pair<kE4m3>(scale);
    const uint32_t a = swapped ? codes.y : codes.x, b = swapped ? codes.x : codes.y;
    tw_store16(at, tw_scaled(tw_e2m1_four(a), tw_e2m1_four(a >> 16), pair));
    tw_store16(at ^ 16, tw_scaled(tw_e2m1_four(b), tw_e2m1_four(b >> 16), pair));
  }
};

// Where row `row` of a tile lies for a lane.
template <class Format>
TW_DEVICE uint32_t tw_row_place(uint32_t tile, int row, int lane) {
  return (tile + row * 128 + tw_row<Format>::place(lane)) ^ ((row & 7) << 4);
}

// Four rows that were loaded to a tile, rows of number -1 as zeros: all at once where that is enough.
template <class Format>
TW_DEVICE void tw_store_rows(tw_row<Format> (&rows)[4], const int (&numbers)[4], uint32_t tile,
                             int first, int lane) {
  bool simple = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) simple = simple && numbers[i] >= 0 && !rows[i].is_large();
  if (__any_sync(0xFFFFFFFFu, !simple)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (numbers[i] < 0) rows[i].clear();
      rows[i].template store<true>(tw_row_place<Format>(tile, first + i, lane), lane);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i].template store<false>(tw_row_place<Format>(tile, first + i, lane), lane);
    }
  }
}

// Rows `first` (a multiple of four) and after it of a tile by a warp, four at a time; the first four
// are sent for before the tile is free.
template <class Format, int kRows, class WhenFree>
TW_DEVICE void tw_fill_rows(const unsigned char* state, const int* numbers, uint32_t tile, int first,
                            int lane, const WhenFree& when_free) {
  tw_row<Format> rows[4];
  int number[4];
  const auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      number[i] = numbers[from + i];
      rows[i].load(state, max(number[i], 0), lane);
    }
  };
  load(first);
  when_free();
#pragma unroll
  for (int row = first; row < first + kRows; row += 4) {
    if (row > first) load(row);
    tw_store_rows(rows, number, tile, row, lane);
  }
}
