// What whole-row ops call on the vector cores: codes and scales of quantised values, places of paged
// entries. Needs tw_ascend_math.h before it. Numbers below 2^-126 are 0 on this chip.
#pragma once

#define TW_CALLEE __simt_callee__ static inline __attribute__((always_inline, unused))

// ---------------------------------------------------------------- quantised values
TW_CALLEE uint32_t tw_size_bits(float x) { return (uint32_t)tw_bits(x) & 0x7fffffffu; }
TW_CALLEE float tw_from_size(uint32_t bits) { return tw_from_bits((int32_t)bits); }

TW_CALLEE float tw_within(float x, float limit) {
  x = x < -limit ? -limit : x;
  return x > limit ? limit : x;  // NaN stays
}

// Rounds |x| <= 448 to e4m3, ties to even. Below 2^-6 the step is 2^-9, the last bit of 1.5 * 2^14.
TW_CALLEE float tw_round_e4m3(float x) {
  const uint32_t size = tw_size_bits(x), sign = (uint32_t)tw_bits(x) & 0x80000000u;
  const uint32_t normal = (size + 0x7ffffu + (size >> 20 & 1u)) & 0xfff00000u;
  const uint32_t tiny = (uint32_t)tw_bits((tw_from_size(size) + 24576.0f) - 24576.0f);
  const uint32_t rounded = size < 0x3c800000u ? tiny : normal;
  return tw_from_size((size > 0x7f800000u ? size : rounded) | sign);
}

TW_CALLEE uint32_t tw_code_e4m3(float x) {
  const uint32_t size = tw_size_bits(x), sign = (uint32_t)tw_bits(x) >> 24 & 0x80u;
  const uint32_t tiny = (uint32_t)tw_bits(tw_from_size(size) + 16384.0f) & 0x7fu;
  const uint32_t code = size < 0x3c800000u ? tiny : (size >> 20) - 960u;
  return (size > 0x7f800000u ? 0x7fu : code) | sign;
}

TW_CALLEE float tw_e4m3_value(uint32_t code) {
  const uint32_t size = code & 0x7fu, sign = (code & 0x80u) << 24;
  const uint32_t normal = (size << 20) + (120u << 23);
  const uint32_t bits = size < 8u ? (uint32_t)tw_bits(tw_mul((float)(int32_t)size, 0x1p-9f)) : normal;
  return tw_from_size((size == 0x7fu ? 0x7fc00000u : bits) | sign);
}

// Four e2m1 codes, the lowest first, as e4m3 codes of the same values.
TW_CALLEE uint32_t tw_e4m3_of_e2m1(uint32_t codes) {
  uint32_t made = 0u;
  for (int32_t i = 0; i < 4; ++i) {
    const uint32_t code = codes >> 4 * i, size = code & 7u;  // 0 and 1/2 have no exponent
    const uint32_t bits = size == 0u ? 0u : size == 1u ? 0x30u : 0x30u + 4u * size;
    made |= (bits | (code & 8u) << 4) << 8 * i;
  }
  return made;
}

// Rounds |x| <= 6 to 0 .5 1 1.5 2 3 4 6, ties to the even code; the sign stays.
TW_CALLEE float tw_round_e2m1(float x) {
  const float size = tw_from_size(tw_size_bits(x));
  const float half = (size + 6291456.0f) - 6291456.0f;
  const float one = (size + 12582912.0f) - 12582912.0f;
  const float two = (size + 25165824.0f) - 25165824.0f;
  const float rounded = size < 2.0f ? half : size < 4.0f ? one : two;
  return tw_from_size((uint32_t)tw_bits(rounded) | ((uint32_t)tw_bits(x) & 0x80000000u));
}

TW_CALLEE uint32_t tw_code_e2m1(float x) {
  const uint32_t size = tw_size_bits(x), sign = (uint32_t)tw_bits(x) >> 28 & 8u;
  const uint32_t code = size < 0x3f800000u ? (uint32_t)(size >= 0x3f000000u) : (size >> 22) - 252u;
  return (code & 7u) | sign;
}

TW_CALLEE float tw_e2m1_value(uint32_t code) {
  const uint32_t size = code & 7u;  // 0 and 1/2 have no exponent; else it counts from 1/2
  const uint32_t bits = size == 0u ? 0u : size == 1u ? 0x3f000000u : (size + 252u) << 22;
  return tw_from_size(bits | (code & 8u) << 28);
}

// A scale of 2^-127 is 0 here.
TW_CALLEE float tw_ue8m0_value(uint32_t code) {
  return tw_from_size(code == 255u ? 0x7fc00000u : code << 23);
}

// 2^ceil(log2 x) of a positive x; infinity for infinity and NaN.
TW_CALLEE float tw_power_of_two_at_least(float x) {
  const uint32_t exponent = ((uint32_t)tw_bits(x) + 0x7fffffu) >> 23;
  return tw_from_size((exponent < 255u ? exponent : 255u) << 23);
}

// For each format: the scale of a group with this largest size, a value at that scale, its code.
TW_CALLEE float tw_scale_mxfp8(float most) {
  return tw_power_of_two_at_least(tw_mul(most < 1e-4f ? 1e-4f : most, (float)(1.0 / 448.0)));
}
TW_CALLEE float tw_scale_mxfp4(float most) {
  const float least = 6.0f * 0x1p-126f;
  return tw_power_of_two_at_least(tw_mul(most < least ? least : most, (float)(1.0 / 6.0)));
}
TW_CALLEE float tw_scale_nvfp4(float most) {
  const float least = 0x1p-9f, wanted = (most < 6.0f * least ? 6.0f * least : most) / 6.0f;
  const float above = wanted < least ? least : wanted;
  return tw_round_e4m3(above > 448.0f ? 448.0f : above);
}
TW_CALLEE float tw_coded_mxfp8(float x, float scale) {
  return tw_round_e4m3(tw_within(x / scale, 448.0f));
}
TW_CALLEE float tw_coded_mxfp4(float x, float scale) {
  return tw_round_e2m1(tw_within(x / scale, 6.0f));
}
TW_CALLEE float tw_coded_nvfp4(float x, float scale) { return tw_coded_mxfp4(x, scale); }
TW_CALLEE uint32_t tw_code_mxfp8(float value) { return tw_code_e4m3(value); }
TW_CALLEE uint32_t tw_code_mxfp4(float value) { return tw_code_e2m1(value); }
TW_CALLEE uint32_t tw_code_nvfp4(float value) { return tw_code_e2m1(value); }
TW_CALLEE uint32_t tw_scale_code_mxfp8(float scale) { return (uint32_t)tw_bits(scale) >> 23; }
TW_CALLEE uint32_t tw_scale_code_mxfp4(float scale) { return (uint32_t)tw_bits(scale) >> 23; }
TW_CALLEE uint32_t tw_scale_code_nvfp4(float scale) { return tw_code_e4m3(scale); }

// One of three bf16 parts that add up to x exactly, largest first, as its bits.
TW_CALLEE uint32_t tw_bf16_part(float x, int32_t part) {
  const bool special = tw_size_bits(x) >= 0x7f800000u;
  for (int32_t i = 0; i < part; ++i) x = special ? 0.0f : x - tw_from_size((uint32_t)tw_bits(x) & 0xffff0000u);
  return (uint32_t)tw_bits(x) >> 16 | (special && part == 0 && x != x ? 0x40u : 0u);
}

// ---------------------------------------------------------------- pages
// A page table is a ring: entry e of a request stands in page table[e / entries % pages].
#define TW_ENTRY_SLOT(qualifier, name)                                                            \
  qualifier int64_t name(__gm__ int32_t* tables, int32_t pages, int32_t row, int32_t entry,       \
                         int32_t entries) {                                                       \
    const int64_t page = tables[(int64_t)row * pages + entry / entries % pages];                  \
    return page * entries + entry % entries;                                                      \
  }
// Slot of the entry that a token completes, else -1.
#define TW_PAGE_SLOT(qualifier, name, slot)                                                       \
  qualifier int32_t name(__gm__ int32_t* tables, int32_t pages, int32_t row, int32_t position,    \
                         int32_t ratio, int32_t entries) {                                        \
    if (position < 0 || (position + 1) % ratio) return -1;                                        \
    return (int32_t)slot(tables, pages, row, position / ratio, entries);                          \
  }
TW_ENTRY_SLOT(TW_CALLEE, tw_entry_slot)
TW_PAGE_SLOT(TW_CALLEE, tw_page_slot, tw_entry_slot)
// The same for the scalar program.
TW_ENTRY_SLOT(__aicore__ static inline, tw_scalar_entry_slot)
TW_PAGE_SLOT(__aicore__ static inline, tw_scalar_page_slot, tw_scalar_entry_slot)

// ---------------------------------------------------------------- order of entries
// Unsigned order of keys = order of entries: the two zeros are equal, every NaN is above +inf.
TW_CALLEE uint32_t tw_order_key(float x) {
  const uint32_t bits = (uint32_t)tw_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  if (bits == 0x80000000u) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
TW_CALLEE float tw_key_value(uint32_t key) {
  if (key == 0xffffffffu) return __builtin_nanf("");
  return tw_from_size(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
