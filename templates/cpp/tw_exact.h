// Exact sums of products of e4m3 rows with e2m1 weights, in integers.
//
// Twice an e2m1 plus 12 is an integer 0 .. 24. A block of 32 e4m3 values has a common power of two as its unit,
// of which each is an integer below 2^20: three signed digits of base 128. A byte of a weight and one of a digit
// are multiplied and added in pairs. A sum of 32 products less the 12s fits 16 bits, where wrapping on the way
// does not matter. Blocks whose values lie within ten binades, most of them, need no last digit.
//
// Where a decoded weight serves many rows, 16-bit words are fewer instructions: one sum of 32 bits holds twelve
// binades. Both ways are exact, so they agree.
//
//   digit_block, word_block   32 values of one row, one way or the other; make_block fills it
//   byte_pairs      weights of k and k + 1 of 16 columns: load_pairs reads those of four k of a group of `fp4`
//   digit_sums      sums of 16 columns, of one digit: start_sums, then add_pair for each two k
//   whole_sums      sums of all digits joined, as fp32: the block's sum in units of `digit_block::unit`, rounded
//                   once (two digits: exact)
//   word_pairs, word_sums   the same in words: widen, zero_words, add_words, whole_words
#pragma once
#include "tw_vec.h"

namespace tw {

constexpr int MAX_DIGITS = 3;

// values[k] = (digit[0] * 128 + digit[1] + digit[2] / 128) * 2 * unit.
struct alignas(16) digit_block {
  uint32_t pair[MAX_DIGITS][16];  // digits of k and k + 1 as bytes, twice
  int16_t offset[MAX_DIGITS];     // -12 times the sum of the digits
  int16_t num_digits;             // 2 or 3
  float unit;                     // NaN if a value is no number
  TW_INLINE bool has_last() const { return num_digits > 2; }
};

// values[k] = (word[0] + word[1] / 32) * 2 * unit.
struct alignas(16) word_block {
  uint32_t pair[2][16];  // words of k and k + 1
  int32_t num_words;     // 1 or 2
  float unit;
  TW_INLINE bool has_last() const { return num_words > 1; }
};

// 32 values as integers below 2^20. Each is 0, or has at most 4 significant bits, is of 2^-63 to 2^127 and within 17
// binades of the largest. Returns the exponent field of the fp32 that half of the value 1 stands for; 255 if a value
// is no number.
static inline int32_t make_integers(const float* x, int32_t* value) {
  int32_t most = 0;
  for (int k = 0; k < 32; ++k) {
    const int32_t size = (int32_t)(bits_from_f32(x[k]) & 0x7fffffffu);
    most = size > most ? size : most;
  }
  // The largest value is 8 .. 15 times 2^(exponent - 130); the integer 1 stands for 2^(exponent - 146).
  const int32_t exponent = most >> 23 < 64 ? 64 : most >> 23;
  const bool finite = exponent < 255;
  const float factor = finite ? f32_from_bits((uint32_t)(273 - exponent) << 23) : 0.0f;
  for (int k = 0; k < 32; ++k) value[k] = finite ? (int32_t)(x[k] * factor) : 0;
  return finite ? exponent - 20 : 255;
}

// Half of 2^shift integer units: halved, because weights are doubled.
static TW_INLINE float exact_unit(int32_t exponent, int shift) {
  return exponent == 255 ? __builtin_nanf("") : f32_from_bits((uint32_t)(exponent + shift) << 23);
}

static inline void make_block(const float* x, digit_block* block) {
  alignas(64) int32_t value[32], digit[MAX_DIGITS][32];
  const int32_t exponent = make_integers(x, value);
  int32_t last = 0, sum[MAX_DIGITS] = {0, 0, 0};
  for (int k = 0; k < 32; ++k) {
    const int32_t low = ((value[k] + 64) & 127) - 64, rest = (value[k] - low) >> 7;
    const int32_t middle = ((rest + 64) & 127) - 64, high = (rest - middle) >> 7;
    digit[0][k] = high;
    digit[1][k] = middle;
    digit[2][k] = low;
    last |= low;
    sum[0] += high;
    sum[1] += middle;
    sum[2] += low;
  }
  for (int d = 0; d < MAX_DIGITS; ++d) {
    for (int i = 0; i < 16; ++i) {
      const uint32_t pair = ((uint32_t)digit[d][2 * i] & 255u) | ((uint32_t)digit[d][2 * i + 1] & 255u) << 8;
      block->pair[d][i] = pair | pair << 16;
    }
    block->offset[d] = (int16_t)(-12 * sum[d]);
  }
  block->num_digits = last ? 3 : 2;
  block->unit = exact_unit(exponent, 7);
}

static inline void make_block(const float* x, word_block* block) {
  alignas(64) int32_t value[32];
  const int32_t exponent = make_integers(x, value);
  uint32_t last = 0;
  for (int i = 0; i < 16; ++i) {
    const uint32_t a = (uint32_t)value[2 * i], b = (uint32_t)value[2 * i + 1];
    block->pair[0][i] = (a >> 5 & 65535u) | b >> 5 << 16;
    block->pair[1][i] = (a & 31u) | (b & 31u) << 16;
    last |= block->pair[1][i];
  }
  block->num_words = last ? 2 : 1;
  block->unit = exact_unit(exponent, 5);
}

#if defined(__AVX2__)
struct byte_pairs { __m256i x; };
struct digit_sums { __m256i x; };

static TW_INLINE void load_pairs(const uint8_t* quads, byte_pairs& first, byte_pairs& second) {
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i both = _mm256_loadu_si256((const __m256i*)quads), low = _mm256_set1_epi8(15);
  first.x = _mm256_shuffle_epi8(table, _mm256_and_si256(both, low));
  second.x = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
}
static TW_INLINE digit_sums start_sums(int16_t offset) { return {_mm256_set1_epi16(offset)}; }
static TW_INLINE digit_sums add_pair(digit_sums sums, byte_pairs weights, uint32_t pair) {
  __m256i next = _mm256_add_epi16(sums.x, _mm256_maddubs_epi16(weights.x, _mm256_set1_epi32((int)pair)));
  // Else the compiler makes a tree of the sums and reads far ahead, and spills what does not fit registers.
  asm volatile("" : "+x"(next) : : "memory");
  return {next};
}
static TW_INLINE v16 floats(__m256i x, __m256i y) {
  const __m256 low = _mm256_cvtepi32_ps(x), high = _mm256_cvtepi32_ps(y);
#if defined(__AVX512F__)
  return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
#else
  return {low, high};
#endif
}
static TW_INLINE __m256i join(__m256i high_low) {
  return _mm256_madd_epi16(high_low, _mm256_set1_epi32(128 | 1 << 16));
}
// The layout has columns 0 .. 3 and 8 .. 11 in the first half: interleaved by halves, digits come out in order.
static TW_INLINE v16 whole_sums(const digit_sums (&s)[2]) {
  return floats(join(_mm256_unpacklo_epi16(s[0].x, s[1].x)), join(_mm256_unpackhi_epi16(s[0].x, s[1].x)));
}
static TW_INLINE __m256i join_last(__m256i whole, __m256i last) {
  return _mm256_add_epi32(_mm256_slli_epi32(whole, 7), _mm256_srai_epi32(last, 16));
}
static TW_INLINE v16 whole_sums(const digit_sums (&s)[3]) {
  const __m256i x = join(_mm256_unpacklo_epi16(s[0].x, s[1].x)), y = join(_mm256_unpackhi_epi16(s[0].x, s[1].x));
  const v16 sums = floats(join_last(x, _mm256_unpacklo_epi16(s[2].x, s[2].x)),
                          join_last(y, _mm256_unpackhi_epi16(s[2].x, s[2].x)));
  return mul(sums, set1(0.0078125f));
}

struct word_pairs { __m256i x, y; };
struct word_sums { __m256i x, y; };

static TW_INLINE word_pairs widen(byte_pairs pairs) {
  const __m256i none = _mm256_setzero_si256(), twelve = _mm256_set1_epi16(12);
  return {_mm256_sub_epi16(_mm256_unpacklo_epi8(pairs.x, none), twelve),
          _mm256_sub_epi16(_mm256_unpackhi_epi8(pairs.x, none), twelve)};
}
static TW_INLINE word_sums zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static TW_INLINE word_sums add_words(word_sums sums, const word_pairs& weights, uint32_t pair) {
  const __m256i both = _mm256_set1_epi32((int)pair);
  __m256i x = _mm256_add_epi32(sums.x, _mm256_madd_epi16(weights.x, both));
  __m256i y = _mm256_add_epi32(sums.y, _mm256_madd_epi16(weights.y, both));
  asm volatile("" : "+x"(x), "+x"(y) : : "memory");
  return {x, y};
}
static TW_INLINE v16 whole_words(word_sums first) { return floats(first.x, first.y); }
static TW_INLINE v16 whole_words(word_sums first, word_sums second) {
  const v16 sums = floats(_mm256_add_epi32(_mm256_slli_epi32(first.x, 5), second.x),
                          _mm256_add_epi32(_mm256_slli_epi32(first.y, 5), second.y));
  return mul(sums, set1(0.03125f));
}

#else
struct byte_pairs { uint8_t x[32]; };
struct digit_sums { int16_t x[16]; };

static TW_INLINE void load_pairs(const uint8_t* quads, byte_pairs& first, byte_pairs& second) {
  static const uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  for (int i = 0; i < 32; ++i) {
    first.x[i] = table[quads[i] & 15];
    second.x[i] = table[quads[i] >> 4];
  }
}
static TW_INLINE digit_sums start_sums(int16_t offset) {
  digit_sums sums;
  for (int i = 0; i < 16; ++i) sums.x[i] = offset;
  return sums;
}
static TW_INLINE digit_sums add_pair(digit_sums sums, byte_pairs weights, uint32_t pair) {
  const int32_t a = (int8_t)pair, b = (int8_t)(pair >> 8);
  for (int i = 0; i < 16; ++i) sums.x[i] = (int16_t)(sums.x[i] + weights.x[2 * i] * a + weights.x[2 * i + 1] * b);
  return sums;
}
template <int D>
static TW_INLINE v16 whole_sums(const digit_sums (&s)[D]) {
  alignas(64) float out[16];
  for (int c = 0; c < 16; ++c) {
    const int place = c / 4 == 1 ? c + 4 : c / 4 == 2 ? c - 4 : c;
    const int32_t whole = s[0].x[place] * 128 + s[1].x[place];
    out[c] = D == 2 ? (float)whole : (float)(whole * 128 + s[D - 1].x[place]) * 0.0078125f;
  }
  return load(out);
}

struct word_pairs { int16_t x[16][2]; };
struct word_sums { int32_t x[16]; };

static TW_INLINE word_pairs widen(byte_pairs pairs) {
  word_pairs words;
  for (int c = 0; c < 16; ++c) {
    const int place = c / 4 == 1 ? c + 4 : c / 4 == 2 ? c - 4 : c;
    for (int i = 0; i < 2; ++i) words.x[c][i] = (int16_t)(pairs.x[2 * place + i] - 12);
  }
  return words;
}
static TW_INLINE word_sums zero_words() { return {}; }
static TW_INLINE word_sums add_words(word_sums sums, const word_pairs& weights, uint32_t pair) {
  const int32_t a = (int16_t)pair, b = (int16_t)(pair >> 16);
  for (int c = 0; c < 16; ++c) sums.x[c] += weights.x[c][0] * a + weights.x[c][1] * b;
  return sums;
}
static TW_INLINE v16 whole_words(word_sums first) {
  alignas(64) float out[16];
  for (int c = 0; c < 16; ++c) out[c] = (float)first.x[c];
  return load(out);
}
static TW_INLINE v16 whole_words(word_sums first, word_sums second) {
  alignas(64) float out[16];
  for (int c = 0; c < 16; ++c) out[c] = (float)(first.x[c] * 32 + second.x[c]) * 0.03125f;
  return load(out);
}
#endif

}  // namespace tw
