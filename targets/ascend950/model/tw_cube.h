// The matrix unit and the way out of its accumulator.
#pragma once
#include <vector>

#include "tw_transfer.h"

namespace tw {
struct ElementType {
  const char* name;
  uint64_t c0, k_cycles;  // elements of 32 bytes; K that one cycle takes
};
constexpr ElementType kElements[] = {{"unknown", 1, 1}, {"float", 8, 4},  {"bfloat16", 16, 16},
                                     {"half", 16, 16},  {"e4m3", 32, 32}, {"e5m2", 32, 32},
                                     {"int8", 32, 32},  {"int4", 64, 1},  {"e2m1", 64, 64},
                                     {"e1m2", 64, 64}};
constexpr bool is_fp8(uint64_t code) { return code == 4 || code == 5; }
constexpr bool is_fp4(uint64_t code) { return code == 8 || code == 9; }
constexpr uint64_t kScaled = 32, kScaledPair = 64;  // of K that one scale, and a pair of them, take

inline const float* fp8_values(int mantissa_bits) {
  struct Table {
    float value[256];
    Table(int bits) {
      for (int i = 0; i < 256; ++i) value[i] = fp8_value((uint8_t)i, bits);
    }
  };
  static const Table e4m3(3), e5m2(2);
  return mantissa_bits == 3 ? e4m3.value : e5m2.value;
}

// Element x of the 32 bytes at p.
inline float element_value(const uint8_t* p, uint64_t x, uint64_t code) {
  uint16_t word;
  float value;
  switch (code) {
    case 1: memcpy(&value, p + 4 * x, 4); return value;
    case 2: memcpy(&word, p + 2 * x, 2); return bf16_value(word);
    case 3: memcpy(&word, p + 2 * x, 2); return f16_value(word);
    case 4:
    case 5: return fp8_values(code == 4 ? 3 : 2)[p[x]];
    default: return fp4_value(p[x / 2] >> (x % 2 * 4) & 15, code == 8 ? 1 : 2);
  }
}

// Reads fractals [k / C0][rows / 16][16][C0] as floats: element (y, x) goes to y * y_step + x * x_step.
// What pads the last C0 is read too: K is rounded up.
inline void unpack_fractals(const Memory& m, uint64_t base, uint64_t fractals, uint64_t k_groups,
                            uint64_t code, float* out, uint64_t y_step, uint64_t x_step) {
  uint64_t c0 = kElements[code].c0;
  for (uint64_t g = 0; g < k_groups; ++g)
    for (uint64_t y = 0; y < fractals * 16; ++y) {
      const uint8_t* row = m.bytes + base + (g * fractals * 16 + y) * 32;
      float* to = out + y * y_step + g * c0 * x_step;
      if (code == 2) {
        const uint16_t* words = (const uint16_t*)row;
        for (uint64_t x = 0; x < 16; ++x) to[x * x_step] = bf16_value(words[x]);
      } else {
        for (uint64_t x = 0; x < c0; ++x) to[x * x_step] = element_value(row, x, code);
      }
    }
}

// Multiplies what unpack_fractals found by its scales, [rows / 16][k / 64][16][2].
inline void apply_scales(const Memory& m, uint64_t base, uint64_t fractals, uint64_t k, float* out,
                         uint64_t y_step, uint64_t x_step) {
  uint64_t pairs = k / kScaledPair;
  for (uint64_t y = 0; y < fractals * 16; ++y)
    for (uint64_t g = 0; g < k / kScaled; ++g) {
      uint64_t at = base + ((y / 16 * pairs + g / 2) * 16 + y % 16) * 2 + g % 2;
      float scale = e8m0_value(m.bytes[at]);
      for (uint64_t x = 0; x < kScaled; ++x) out[y * y_step + (g * kScaled + x) * x_step] *= scale;
    }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TW_WIDE __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define TW_WIDE
#endif

TW_WIDE static bool all_finite(const float* values, uint64_t count) {
  uint32_t largest = 0;
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t size = bits_as<uint32_t>(values[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  return largest < 0x7f800000u;
}

// out[x] += a[0] rows[0][x], then a[1] rows[1][x], ...: products and sums are rounded apart.
TW_WIDE static void add_products(float* out, const float* a, const float* rows, uint64_t width,
                                 uint64_t count) {
  uint64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const float *r0 = rows + i * width, *r1 = r0 + width, *r2 = r1 + width, *r3 = r2 + width;
    float a0 = a[i], a1 = a[i + 1], a2 = a[i + 2], a3 = a[i + 3];
    for (uint64_t x = 0; x < width; ++x)
      out[x] = (((out[x] + a0 * r0[x]) + a1 * r1[x]) + a2 * r2[x]) + a3 * r3[x];
  }
  for (; i < count; ++i)
    for (uint64_t x = 0; x < width; ++x) out[x] += a[i] * rows[i * width + x];
}

// C[m, n] += A[m, k] B[n, k]^T. The order of the sum inside the unit is not documented: groups of
// 16 of K are walked upwards or downwards by the shape of the tile, so that a result that depends
// on the order shows when tiles change.
inline double Block::mmad(const Request& r) {
  uint64_t m = r.a[3], k = r.a[4], n = r.a[5], code = r.a[7];
  if (!range("m", m, 0, 4095) || !range("k", k, 0, 4095) || !range("n", n, 0, 4095)) return 0;
  if (m == 0 || n == 0 || k == 0) return 0;
  bool bias = r.a[9] && !r.a[6], scaled = r.a[10];
  bool pair = scaled ? (is_fp8(code) && is_fp8(r.a[8])) || (is_fp4(code) && is_fp4(r.a[8]))
                     : code > 0 && code < 6 && code == r.a[8];
  if (!pair || bias) {
    fail("illegal path",
         text("%s: %s times %s%s is not modelled", describe(now_site).c_str(), kElements[code].name,
              kElements[r.a[8]].name, bias ? " plus a bias" : ""));
    return 0;
  }
  if (!aligned("A", r.a[1], 512) || !aligned("B", r.a[2], 512) || !aligned("C", r.a[0], 1024))
    return 0;
  if (scaled && k % kScaledPair) {
    range("k past a multiple of 64", k % kScaledPair, 0, 0);
    return 0;
  }
  uint64_t c0 = kElements[code].c0;
  uint64_t mf = (m + 15) / 16, nf = (n + 15) / 16, kf = (k + c0 - 1) / c0;
  if (!touch(l0a, r.a[1], mf * kf * 512, false) || !touch(l0b, r.a[2], nf * kf * 512, false)) return 0;
  uint64_t scales = scaled ? k / kScaled * 16 : 0;  // bytes of 16 rows
  if (!touch(l0a_mx, r.a[1] / 16, mf * scales, false)) return 0;
  if (!touch(l0b_mx, r.a[2] / 16, nf * scales, false)) return 0;
  if (!r.a[6] && !touch(l0c, r.a[0], mf * nf * 1024, false)) return 0;
  if (!touch(l0c, r.a[0], mf * nf * 1024, true)) return 0;
  thread_local std::vector<float> a, columns, sums;
  uint64_t width = nf * 16, k_padded = kf * c0;
  a.resize(mf * 16 * k_padded);
  columns.resize(k_padded * width);  // B as [k][n]: the inner loop runs over columns
  sums.resize(width);
  unpack_fractals(l0a, r.a[1], mf, kf, code, a.data(), k_padded, 1);
  unpack_fractals(l0b, r.a[2], nf, kf, r.a[8], columns.data(), 1, width);
  if (scaled) {
    apply_scales(l0a_mx, r.a[1] / 16, mf, k, a.data(), k_padded, 1);
    apply_scales(l0b_mx, r.a[2] / 16, nf, k, columns.data(), 1, width);
  }
  // If all are finite, a factor of 0 adds nothing: rows that pad a tile are cheap.
  bool finite = all_finite(columns.data(), columns.size());
  bool down = (mf + nf + kf) & 1;
  float* c = (float*)(l0c.bytes + r.a[0]);
  for (uint64_t y = 0; y < mf * 16; ++y) {
    float* own = c + y / 16 * 256 + y % 16 * 16;  // of each 16 columns, mf * 256 apart
    if (r.a[6]) std::fill(sums.begin(), sums.end(), 0.0f);
    else for (uint64_t g = 0; g < nf; ++g) memcpy(&sums[g * 16], own + g * mf * 256, 64);
    uint64_t groups = (k + 15) / 16;
    for (uint64_t step = 0; step < groups; ++step) {
      uint64_t g = down ? groups - 1 - step : step;
      const float* row = &a[y * k_padded + g * 16];
      uint64_t count = k - g * 16 < 16 ? k - g * 16 : 16;
      bool any = !finite;
      for (uint64_t i = 0; i < count; ++i) any = any || row[i] != 0;
      if (any) add_products(sums.data(), row, &columns[g * 16 * width], width, count);
    }
    for (uint64_t g = 0; g < nf; ++g) memcpy(own + g * mf * 256, &sums[g * 16], 64);
  }
  double k_steps = (double)(kf * c0) / (double)kElements[code].k_cycles;
  return (double)(mf * nf) * k_steps + 60;
}

// L0C holds [n / 16][m / 16][16][16] floats; source stride is in rows of 16 elements. Dual mode 1
// gives the first half of the rows to AIV0 and the other to AIV1, mode 2 halves of the columns.
inline double Block::from_l0c(const Request& r) {
  bool to_ub = r.op == kL0cToUb;
  uint64_t n = r.a[2], m = r.a[3], stride = r.a[4], source = r.a[5], quant = r.a[8], bytes = r.a[12];
  uint64_t dual = to_ub ? r.a[7] : 0;
  if (!range("n", n, 1, 4095) || !range("m", m, 1, 8192) || !range("stride", stride, 1, 1u << 24))
    return 0;
  if (!range("source stride", source, 1, 65535) || !range("dual mode", dual, 0, 2)) return 0;
  if ((quant != 0 && quant != 1 && quant != 16) || !r.a[10] || r.a[11]) {
    fail("illegal path", text("%s: quantisation mode %llu or layout is not modelled",
                              describe(now_site).c_str(), (unsigned long long)quant));
    return 0;
  }
  uint64_t want = quant ? 2 : 4;
  if (!range("bytes of a result", bytes, want, want)) return 0;
  if (!aligned("source", r.a[1], 64) || (to_ub && !aligned("destination", r.a[0], 32))) return 0;
  uint64_t parts = dual ? 2 : 1, rows = dual == 1 ? m / 2 : m, columns = dual == 2 ? n / 2 : n;
  for (uint64_t g = 0; g * 16 < n; ++g)
    if (!touch(l0c, r.a[1] + g * source * 64, m * 64, false)) return 0;
  for (uint64_t part = 0; part < parts; ++part) {
    Memory& out = ub[dual ? AIV0 + part : AIV0 + (r.a[6] & 1)];
    uint64_t y0 = dual == 1 ? part * rows : 0, x0 = dual == 2 ? part * columns : 0;
    for (uint64_t y = 0; y < rows; ++y) {
      uint64_t at = r.a[0] + y * stride * bytes;
      bool fits = to_ub ? touch(out, at, columns * bytes, true) : touch_gm(at, columns * bytes, true);
      if (!fits) return 0;
      uint8_t* target = to_ub ? out.bytes + at : (uint8_t*)(uintptr_t)at;
      const float* in = (const float*)(l0c.bytes + r.a[1]) + (y0 + y) * 16;
      if (!quant && !r.a[9] && x0 % 16 == 0) {  // as they are
        for (uint64_t x = 0; x < columns; x += 16)
          memcpy(target + x * 4, in + (x0 + x) * source, (columns - x < 16 ? columns - x : 16) * 4);
        continue;
      }
      for (uint64_t x = 0; x < columns; ++x) {
        uint64_t column = x0 + x;
        float value = in[column / 16 * source * 16 + column % 16];
        if (r.a[9]) value = value > 0 ? value : 0;
        uint16_t word = quant == 16 ? bf16_bits(value) : f16_bits(value);
        if (quant) memcpy(target + x * 2, &word, 2);
        else memcpy(target + x * 4, &value, 4);
      }
    }
  }
  totals.bytes[r.op] += m * n * bytes;
  if (!to_ub) return gm_cycles((double)(m * n * bytes));
  return 26 + (double)(m * n * bytes) / (dual ? 2 * kL0cRate : kL0cRate);
}
}  // namespace tw
