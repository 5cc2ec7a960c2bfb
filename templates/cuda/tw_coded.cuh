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
#define TW_AT_ONCE 2  // rows a warp has in flight

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

// Eight columns of codes in flight: word `lane` and word 32 + `lane` of each row, and their scales.
template <class Format>
struct tw_words {
  uint2 low[TW_AT_ONCE], high[TW_AT_ONCE], tail;
  uint32_t low_scale[TW_AT_ONCE], high_scale[TW_AT_ONCE];

  // Rows that are not there, at offset -1, are zeros.
  __device__ __forceinline__ void load(const unsigned char* state, const int64_t* offsets, int row,
                                       int lane) {
#pragma unroll
    for (int k = 0; k < TW_AT_ONCE; ++k) {
      const int64_t at = offsets[row + k];
      const unsigned char* from = state + at;
      low[k] = high[k] = make_uint2(0, 0);
      low_scale[k] = high_scale[k] = Format::e4m3_scales ? 56 : 127;
      if (at >= 0) {
        const unsigned char* scales = from + Format::scale_at;
        if (Format::bits == 8) {
          low[k] = __ldg((const uint2*)(from + lane * 8));
          high[k] = __ldg((const uint2*)(from + 256 + lane * 8));
        } else {
          low[k].x = __ldg((const uint32_t*)(from + lane * 4));
          high[k].x = __ldg((const uint32_t*)(from + 128 + lane * 4));
        }
        low_scale[k] = __ldg(scales + lane * 8 / Format::group);
        high_scale[k] = __ldg(scales + (256 + lane * 8) / Format::group);
      }
    }
    if (Format::coded < 512) {  // a tail of 64 columns: its second half, eight lanes to a row
      const int64_t at = lane < 8 * TW_AT_ONCE ? offsets[row + lane / 8] : -1;
      tail = make_uint2(0, 0);
      if (at >= 0) tail = __ldg((const uint2*)(state + at + 512 + (lane & 7) * 8));
    }
  }

  __device__ __forceinline__ static uint4 columns(uint2 codes, uint32_t scale) {
    const uint32_t both = tw_scale_pair<Format::e4m3_scales>(scale);
    return Format::bits == 8 ? tw_e4m3_columns(codes, both) : tw_e2m1_columns(codes.x, both);
  }

  __device__ __forceinline__ static void store_tail(uint32_t tile, int row, int word, uint2 x) {
    tw_store8(tile + row * 128 + 7 * TW_PANEL + (((word >> 1) ^ (row & 7)) << 4) + (word & 1) * 8,
              x);
  }

  __device__ __forceinline__ void store(uint32_t tile, int row, int lane) const {
#pragma unroll
    for (int k = 0; k < TW_AT_ONCE; ++k) {
      const uint32_t at = tile + (row + k) * 128 + (lane >> 3) * TW_PANEL +
                          (((lane & 7) ^ ((row + k) & 7)) << 4);
      tw_store16(at, columns(low[k], low_scale[k]));
      if (Format::coded == 512 || lane < 24) {
        tw_store16(at + 4 * TW_PANEL, columns(high[k], high_scale[k]));
      } else {
        store_tail(tile, row + k, lane - 24, high[k]);
      }
    }
    if (Format::coded < 512 && lane < 8 * TW_AT_ONCE) {
      store_tail(tile, row + (lane >> 3), 8 + (lane & 7), tail);
    }
  }
};

// Rows of a tile by four warps, sixteen each, the next ones on their way while some are decoded.
template <class Format>
TW_DEVICE void tw_fill_tile(const unsigned char* state, const int64_t* offsets, uint32_t tile,
                            int warp, int lane) {
  const int first = warp * 16;
  tw_words<Format> now, next;
  now.load(state, offsets, first, lane);
#pragma unroll 1
  for (int row = 0; row < 16; row += TW_AT_ONCE) {
    if (row + TW_AT_ONCE < 16) next.load(state, offsets, first + row + TW_AT_ONCE, lane);
    now.store(tile, first + row, lane);
    now = next;
  }
}
