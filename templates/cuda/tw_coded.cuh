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

// Bits of a code, columns of codes and of a scale; where the scales of a row begin.
template <int kBits, int kCoded, int kGroup, bool kE4m3>
struct tw_format {
  static constexpr int bits = kBits, coded = kCoded, group = kGroup;
  static constexpr bool e4m3_scales = kE4m3;
  static constexpr int scale_at = kCoded * kBits / 8 + 2 * (512 - kCoded);
};

TW_DEVICE uint32_t tw_e4m3_pair(uint32_t x) {  // codes in the high bytes of both halves
  return tw_times(((x >> 4) & 0x07F007F0u) | (x & 0x80008000u), 0x7B807B80u);  // 2^120
}

TW_DEVICE uint32_t tw_e2m1_pair(uint32_t byte) {
  const uint32_t size = (byte * 0x00040040u) & 0x01C001C0u;
  return tw_times(size | ((byte * 0x01001000u) & 0x80008000u), 0x7E807E80u);  // 2^126
}

TW_DEVICE uint4 tw_e4m3_columns(uint2 x, uint32_t scale) {
  return make_uint4(tw_times(tw_e4m3_pair(__byte_perm(x.x, 0, 0x1404)), scale),
                    tw_times(tw_e4m3_pair(__byte_perm(x.x, 0, 0x3424)), scale),
                    tw_times(tw_e4m3_pair(__byte_perm(x.y, 0, 0x1404)), scale),
                    tw_times(tw_e4m3_pair(__byte_perm(x.y, 0, 0x3424)), scale));
}

TW_DEVICE uint4 tw_e2m1_columns(uint32_t x, uint32_t scale) {
  return make_uint4(tw_times(tw_e2m1_pair(x & 255), scale),
                    tw_times(tw_e2m1_pair((x >> 8) & 255), scale),
                    tw_times(tw_e2m1_pair((x >> 16) & 255), scale),
                    tw_times(tw_e2m1_pair(x >> 24), scale));
}

// A scale in both halves.
template <bool kE4m3>
TW_DEVICE uint32_t tw_scale_pair(uint32_t code) {
  uint32_t bits = code == 255 ? 0x7FC0u : code == 0 ? 0x0040u : code << 7;
  if (kE4m3) bits = (code & 127) == 127 ? 0x7FC0u : tw_e4m3_pair(code << 8) & 0xFFFFu;
  return bits * 0x10001u;
}

// One row in flight: words `lane` and 32 + `lane` of eight columns of codes, then the tail's second
// half on eight lanes, and a scale, of which a lane holds that of its number.
template <class Format>
struct tw_row {
  uint2 low, high, tail;
  uint32_t scale;

  // A row that is not there, at offset -1, is zeros.
  __device__ __forceinline__ void load(const unsigned char* state, int64_t at, int lane) {
    low = high = tail = make_uint2(0, 0);
    scale = Format::e4m3_scales ? 56 : 127;
    if (at < 0) return;
    const unsigned char* from = state + at;
    if (Format::bits == 8) {
      low = __ldg((const uint2*)from + lane);
      high = __ldg((const uint2*)from + 32 + lane);
    } else {
      low.x = __ldg((const uint32_t*)from + lane);
      high.x = __ldg((const uint32_t*)from + 32 + lane);
    }
    if (lane < Format::coded / Format::group) scale = __ldg(from + Format::scale_at + lane);
    if (Format::coded < 512 && lane < 8) tail = __ldg((const uint2*)from + 64 + lane);
  }

  __device__ __forceinline__ static uint4 columns(uint2 codes, uint32_t pair) {
    return Format::bits == 8 ? tw_e4m3_columns(codes, pair) : tw_e2m1_columns(codes.x, pair);
  }

  __device__ __forceinline__ static void store_tail(uint32_t line, int row, int word, uint2 x) {
    tw_store8(line + 7 * TW_PANEL + (((word >> 1) ^ (row & 7)) << 4) + (word & 1) * 8, x);
  }

  __device__ __forceinline__ void store(uint32_t tile, int row, int lane) const {
    const uint32_t line = tile + row * 128;
    const uint32_t at = line + (lane >> 3) * TW_PANEL + (((lane & 7) ^ (row & 7)) << 4);
    const uint32_t pair = tw_scale_pair<Format::e4m3_scales>(scale);
    const uint32_t first = __shfl_sync(0xFFFFFFFFu, pair, lane * 8 / Format::group);
    const uint32_t second = __shfl_sync(0xFFFFFFFFu, pair, (256 + lane * 8) / Format::group);
    tw_store16(at, columns(low, first));
    if (Format::coded == 512 || lane < 24) {
      tw_store16(at + 4 * TW_PANEL, columns(high, second));
    } else {
      store_tail(line, row, lane - 24, high);
    }
    if (Format::coded < 512 && lane < 8) store_tail(line, row, 8 + lane, tail);
  }
};

// Rows of a tile by eight warps, eight each, the next ones on their way while one is decoded. The
// first are sent for before the tile is free.
template <class Format, int kAhead, class WhenFree>
TW_DEVICE void tw_fill_tile(const unsigned char* state, const int64_t* offsets, uint32_t tile,
                            int warp, int lane, const WhenFree& when_free) {
  tw_row<Format> ahead[kAhead];
  const int first = warp * 8;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i].load(state, offsets[first + i], lane);
  when_free();
#pragma unroll 1
  for (int row = first; row < first + 8; row += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ahead[i].store(tile, row + i, lane);
      if (row + i + kAhead < first + 8) ahead[i].load(state, offsets[row + i + kAhead], lane);
    }
  }
}
