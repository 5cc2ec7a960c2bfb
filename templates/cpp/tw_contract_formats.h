// Weight formats of the contraction kernels: how a packed panel is laid out and decoded.
//
// A panel holds 16 output columns (rows n of the weight [N, K]) for all K; panel p holds columns
// 16 p .. 16 p + 15, absent columns are zero. Panels follow each other without gaps; inside a panel the
// groups of GROUP values of k follow each other. With p = n / 16 and c = n % 16, group g starts at
//     packed + (p * (K / GROUP) + g) * GROUP_BYTES
// and holds (offsets in bytes):
//     f32     1 k:  float[16]
//     f16     1 k:  half[16]                bf16 likewise
//     q4_1   32 k:  half d[16], half m[16], uint32 word[4][16]
//                   k = 4 j + w of column c is bits 4 j .. 4 j + 3 of word[w][c]
//     q8_0   32 k:  half d[16], uint32 word[8][16]
//                   k = 8 j + w of column c is byte j of word[w][c], stored as code + 128
//     q8s16  16 k:  float d[16], uint32 word[4][16], bytes as in q8_0 with k = 4 j + w
//     fp8    32 k:  ue8m0 d[16], uint32 word[8][16]
//                   k = 4 j + w of column c is the e4m3 in byte w of word[j][c]
//     fp4    32 k:  ue8m0 d[16], uint16 quad[8][16]
//                   k = 4 j + w of column c is an e2m1 in quad[j][place(c)], in nibble 0, 2, 1, 3 for w = 0 .. 3,
//                   where place swaps columns 4 .. 7 with 8 .. 11: as byte tables unpack them on AVX2
// Values: q4_1 is fma(d, code, m); q8_0 and q8s16 are fma(d, code + 128, -128 d), which equals d * code;
// fp8 and fp4 are d * code, d being 2^(byte - 127).
// Codes lie j-major so that a field is masked in place, converted, and rescaled by a power of two
// folded into d: exact, and one shift cheaper per lane than extracting it.
//
// Every format has: GROUP = SUBS * WORDS values of k, visited j-major; `open` reads the scales of a group,
// `next` moves them from sub j to j + 1, `weight` dequantises 16 values of one k, `code` gives
// code / (PART_SCALE * prescale(j)) exactly for the factored order.
#pragma once
#include "tw_vec.h"

namespace tw {

struct scales { v16 d, m; };

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static TW_INLINE float f32_from_f16(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  __fp16 value;
  memcpy(&value, &half, 2);
  return (float)value;
#endif
}

template <int BYTES>
struct plain_format {
  static constexpr int GROUP = 1, SUBS = 1, WORDS = 1, GROUP_BYTES = BYTES * 16;
  static constexpr bool HAS_MIN = false, HAS_SCALE = false;
  static constexpr float PART_SCALE = 1.0f;
  static TW_INLINE scales open(const uint8_t*) { return {zero(), zero()}; }
  static TW_INLINE void next(scales&, int) {}
  static TW_INLINE float prescale(int) { return 1.0f; }
};

struct f32 : plain_format<4> {
  static TW_INLINE v16 weight(const uint8_t* group, const scales&, int, int) {
    return load((const float*)group);
  }
  static TW_INLINE v16 code(const uint8_t* group, int j, int w) { return weight(group, open(group), j, w); }
};

struct f16 : plain_format<2> {
  static TW_INLINE v16 weight(const uint8_t* group, const scales&, int, int) {
    return load_f16((const uint16_t*)group);
  }
  static TW_INLINE v16 code(const uint8_t* group, int j, int w) { return weight(group, open(group), j, w); }
};

struct bf16 : plain_format<2> {
  static TW_INLINE v16 weight(const uint8_t* group, const scales&, int, int) {
    return load_bf16((const uint16_t*)group);
  }
  static TW_INLINE v16 code(const uint8_t* group, int j, int w) { return weight(group, open(group), j, w); }
};

struct q4_1 {
  static constexpr int GROUP = 32, SUBS = 8, WORDS = 4, GROUP_BYTES = 320;
  static constexpr bool HAS_MIN = true, HAS_SCALE = true;
  static constexpr float PART_SCALE = 1.0f;
  static TW_INLINE scales open(const uint8_t* group) {
    return {load_f16((const uint16_t*)group), load_f16((const uint16_t*)group + 16)};
  }
  // The top field is shifted down (a float conversion of it in place would see a sign bit).
  static TW_INLINE void next(scales& s, int j) {
    if (j < 7) s.d = mul(s.d, set1(j == 6 ? 16777216.0f : 0.0625f));
  }
  static TW_INLINE float prescale(int j) { return j == 7 ? 1.0f : 1.0f / (float)(1u << 4 * j); }
  static TW_INLINE v16 code(const uint8_t* group, int j, int w) {
    const u16 words = load_u32(group + 64 + 64 * w);
    return j == 7 ? top_f32(words, 28) : bits_f32(words, 15u << 4 * j);
  }
  static TW_INLINE v16 weight(const uint8_t* group, const scales& s, int j, int w) {
    return fma(s.d, code(group, j, w), s.m);
  }
};

template <int WORDS_, int SCALE_BYTES>
struct byte_format {
  static constexpr int GROUP = 4 * WORDS_, SUBS = 4, WORDS = WORDS_;
  static constexpr int GROUP_BYTES = 16 * SCALE_BYTES + 64 * WORDS;
  static constexpr bool HAS_MIN = false, HAS_SCALE = true;
  static constexpr float PART_SCALE = 1.0f;
  static TW_INLINE scales open(const uint8_t* group) {
    const v16 d = SCALE_BYTES == 2 ? load_f16((const uint16_t*)group) : load((const float*)group);
    return {d, mul(d, set1(-128.0f))};
  }
  static TW_INLINE void next(scales& s, int j) {
    if (j < 3) s.d = mul(s.d, set1(j == 2 ? 65536.0f : 0.00390625f));
  }
  static TW_INLINE float prescale(int j) { return j == 3 ? 1.0f : 1.0f / (float)(1u << 8 * j); }
  static TW_INLINE v16 field(const uint8_t* group, int j, int w) {
    const u16 words = load_u32(group + 16 * SCALE_BYTES + 64 * w);
    return j == 3 ? top_f32(words, 24) : bits_f32(words, 255u << 8 * j);
  }
  static TW_INLINE v16 code(const uint8_t* group, int j, int w) {
    return sub(field(group, j, w), set1(j == 3 ? 128.0f : 128.0f * (float)(1u << 8 * j)));
  }
  static TW_INLINE v16 weight(const uint8_t* group, const scales& s, int j, int w) {
    return fma(s.d, field(group, j, w), s.m);
  }
};

struct q8_0 : byte_format<8, 2> {};
struct q8s16 : byte_format<4, 4> {};

// Codes are exact multiples of E4M3_UNIT, which the rows make up for in part: rows in full would overflow.
// Exact for activations of 2^-61 to 2^63; scales are powers of two.
struct fp8 {
  static constexpr int GROUP = 32, SUBS = 8, WORDS = 4, GROUP_BYTES = 528;
  static constexpr bool HAS_MIN = false, HAS_SCALE = true;
  static constexpr float PART_SCALE = 1.0f / E4M3_UNIT / E4M3_ROWS;
  static TW_INLINE scales open(const uint8_t* group) { return {load_e8m0(group), zero()}; }
  static TW_INLINE void next(scales&, int) {}
  static TW_INLINE float prescale(int) { return E4M3_ROWS; }
  static TW_INLINE v16 code(const uint8_t* group, int j, int w) {
    const uint8_t* words = group + 16 + 64 * j;
    if (w % 2 == 0) return w == 0 ? load_e4m3<0>(words) : load_e4m3<2>(words);
    return w == 1 ? load_e4m3<1>(words) : load_e4m3<3>(words);
  }
  static TW_INLINE v16 weight(const uint8_t* group, const scales& s, int j, int w) {
    return mul(mul(code(group, j, w), set1(1.0f / E4M3_UNIT)), s.d);
  }
};

struct fp4 {
  static constexpr int GROUP = 32, SUBS = 16, WORDS = 2, GROUP_BYTES = 272;
  static constexpr bool HAS_MIN = false, HAS_SCALE = true;
  static constexpr float PART_SCALE = 1.0f;
  static TW_INLINE scales open(const uint8_t* group) { return {load_e8m0(group), zero()}; }
  static TW_INLINE void next(scales&, int) {}
  static TW_INLINE float prescale(int) { return 1.0f; }
  static TW_INLINE v16 code(const uint8_t* group, int j, int w) {
    const uint8_t* quads = group + 16 + 32 * (j / 2);
    if (j % 2 == 0) return w == 0 ? load_e2m1<0>(quads) : load_e2m1<1>(quads);
    return w == 0 ? load_e2m1<2>(quads) : load_e2m1<3>(quads);
  }
  static TW_INLINE v16 weight(const uint8_t* group, const scales& s, int j, int w) {
    return mul(code(group, j, w), s.d);
  }
};

template <class W>
constexpr int64_t panel_bytes(int64_t k) { return k / W::GROUP * W::GROUP_BYTES; }

// ---------------------------------------------------------------- single rows (embedding lookup)
// tw_row_<format>: dequantise row n of a packed weight [N, K] into out[K]; the values are those that the
// contraction multiplies with.

template <class W>
static TW_INLINE const uint8_t* row_group(const uint8_t* packed, int64_t n, int64_t k, int64_t g) {
  return packed + n / 16 * panel_bytes<W>(k) + g * W::GROUP_BYTES;
}

template <class T>
static TW_INLINE T element(const uint8_t* p, int64_t index) {
  T value;
  memcpy(&value, p + index * (int64_t)sizeof(T), sizeof(T));
  return value;
}

template <class W>
static inline void byte_row(const uint8_t* packed, int64_t n, int64_t k, float* out) {
  constexpr int scale_bytes = (W::GROUP_BYTES - 64 * W::WORDS) / 16;
  const int64_t c = n % 16;
  for (int64_t g = 0; g < k / W::GROUP; ++g) {
    const uint8_t* group = row_group<W>(packed, n, k, g);
    const float d = scale_bytes == 2 ? f32_from_f16(element<uint16_t>(group, c)) : element<float>(group, c);
    for (int i = 0; i < W::GROUP; ++i) {
      const int j = i / W::WORDS, w = i % W::WORDS;
      const float field = (float)group[16 * scale_bytes + 64 * w + 4 * c + j];
      out[g * W::GROUP + i] = __builtin_fmaf(d, field, d * -128.0f);
    }
  }
}

}  // namespace tw

static inline void tw_row_f32(const uint8_t* packed, int64_t n, int64_t K, float* out) {
  for (int64_t k = 0; k < K; ++k)
    out[k] = tw::element<float>(tw::row_group<tw::f32>(packed, n, K, k), n % 16);
}

static inline void tw_row_f16(const uint8_t* packed, int64_t n, int64_t K, float* out) {
  for (int64_t k = 0; k < K; ++k)
    out[k] = tw::f32_from_f16(tw::element<uint16_t>(tw::row_group<tw::f16>(packed, n, K, k), n % 16));
}

static inline void tw_row_bf16(const uint8_t* packed, int64_t n, int64_t K, float* out) {
  for (int64_t k = 0; k < K; ++k)
    out[k] = tw::f32_from_bf16(tw::element<uint16_t>(tw::row_group<tw::bf16>(packed, n, K, k), n % 16));
}

static inline void tw_row_q4_1(const uint8_t* packed, int64_t n, int64_t K, float* out) {
  const int64_t c = n % 16;
  for (int64_t g = 0; g < K / 32; ++g) {
    const uint8_t* group = tw::row_group<tw::q4_1>(packed, n, K, g);
    const float d = tw::f32_from_f16(tw::element<uint16_t>(group, c));
    const float m = tw::f32_from_f16(tw::element<uint16_t>(group, 16 + c));
    for (int i = 0; i < 32; ++i) {
      const uint32_t word = tw::element<uint32_t>(group + 64, i % 4 * 16 + c);
      out[g * 32 + i] = __builtin_fmaf(d, (float)(word >> (i / 4 * 4) & 15u), m);
    }
  }
}

static inline void tw_row_q8_0(const uint8_t* packed, int64_t n, int64_t K, float* out) {
  tw::byte_row<tw::q8_0>(packed, n, K, out);
}

static inline void tw_row_q8s16(const uint8_t* packed, int64_t n, int64_t K, float* out) {
  tw::byte_row<tw::q8s16>(packed, n, K, out);
}

static inline void tw_row_fp8(const uint8_t* packed, int64_t n, int64_t K, float* out) {
  for (int64_t k = 0; k < K; ++k) {
    const uint8_t* group = tw::row_group<tw::fp8>(packed, n, K, k / 32);
    out[k] = tw::f32_from_e4m3(group[16 + k % 32 / 4 * 64 + n % 16 * 4 + k % 4]) * tw::f32_from_e8m0(group[n % 16]);
  }
}

static inline void tw_row_fp4(const uint8_t* packed, int64_t n, int64_t K, float* out) {
  const int64_t c = n % 16, place = c / 4 == 1 ? c + 4 : c / 4 == 2 ? c - 4 : c;
  for (int64_t k = 0; k < K; ++k) {
    const uint8_t* group = tw::row_group<tw::fp4>(packed, n, K, k / 32);
    const uint16_t quad = tw::element<uint16_t>(group + 16, k % 32 / 4 * 16 + place);
    out[k] = tw::f32_from_e2m1(quad >> (k % 2 * 8 + k / 2 % 2 * 4) & 15) * tw::f32_from_e8m0(group[c]);
  }
}

// Tables that are only gathered from lie as rows of codes[K], then a ue8m0 scale for every group of k.
template <int GROUP>
static inline void tw_row_of_fp8(const uint8_t* table, int64_t n, int64_t K, float* out) {
  const uint8_t *codes = table + n * (K + (K + GROUP - 1) / GROUP), *scales = codes + K;
  for (int64_t k = 0; k < K; ++k) out[k] = tw::f32_from_e4m3(codes[k]) * tw::f32_from_e8m0(scales[k / GROUP]);
}

static inline void tw_row_fp8_rows128(const uint8_t* table, int64_t n, int64_t K, float* out) {
  tw_row_of_fp8<128>(table, n, K, out);
}

static inline void tw_row_fp8_rows64(const uint8_t* table, int64_t n, int64_t K, float* out) {
  tw_row_of_fp8<64>(table, n, K, out);
}

static inline void tw_row_fp8_rows32(const uint8_t* table, int64_t n, int64_t K, float* out) {
  tw_row_of_fp8<32>(table, n, K, out);
}
