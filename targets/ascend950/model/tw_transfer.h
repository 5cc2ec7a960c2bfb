// What each instruction does when its pipe executes it, and how many cycles that is modelled to
// take (rates are those of targets/ascend950/target.py).
#pragma once
#include "tw_schedule.h"
#include "tw_types.h"

namespace tw {
constexpr double kGmRate = 31, kUbToL1Rate = 128, kL0cRate = 128, kL0Rate = 256, kTransferStart = 41;

inline double Block::transfer(const Request& r) {
  switch (r.op) {
    case kGmToUb: return gm_to_ub(r);
    case kUbToGm: return ub_to_gm(r);
    case kUbToL1:
    case kL1ToUb: return blocks(r);
    case kGmToL1: return gm_to_l1(r);
    case kFillL1: return fill_l1(r);
    case kL1ToL0A:
    case kL1ToL0B: return l1_to_l0(r);
    case kL1ToL0AMx:
    case kL1ToL0BMx: return scales_to_l0(r);
    case kMmad: return mmad(r);
    case kL0cToUb:
    case kL0cToGm: return from_l0c(r);
    case kVector: return run_vector(r);
    default: return 0;
  }
}

// A transfer of so many bytes from or to global memory. The three cores of a block share its part of
// the memory's bandwidth: a transfer begins when it is free.
inline double Block::gm_cycles(double bytes) {
  double& time = ready[now_actor];
  double begin = time + kTransferStart;
  if (gm_free > begin) time += gm_free - begin, begin = gm_free;
  gm_free = begin + bytes / kGmRate;
  return kTransferStart + bytes / kGmRate;
}

inline double Block::gm_to_ub(const Request& r) {
  uint64_t bursts = r.a[2], bytes = r.a[3], element = r.a[7];
  uint64_t left = r.a[4] * element, right = r.a[5] * element;
  if (!range("number of bursts", bursts, 1, 4095)) return 0;
  if (!range("bytes of a burst", bytes, 1, 2097151)) return 0;
  if (!range("left padding in bytes", left, 0, 32) || !range("right padding in bytes", right, 0, 32))
    return 0;
  if (!aligned("destination", r.a[0], 32) || !aligned("source", r.a[1], element)) return 0;
  uint64_t source = r.a[8], target = r.a[9], row = left + bytes + right;
  bool compact = target == bytes;
  if (!compact && bursts > 1 && !aligned("destination stride", target, 32)) return 0;
  Memory& m = ub[kActor[now_actor].core];
  uint32_t pattern = (uint32_t)r.a[11];
  for (uint64_t b = 0; b < bursts; ++b) {
    uint64_t at = r.a[0] + b * target;
    if (!touch_gm(r.a[1] + b * source, bytes, false) || !touch(m, at, row, true)) return 0;
    uint8_t* out = m.bytes + at;
    const uint8_t* in = (const uint8_t*)(uintptr_t)(r.a[1] + b * source);
    memcpy(out + left, in, bytes);
    auto pad = [&](uint64_t i) { return r.a[6] ? ((uint8_t*)&pattern)[i % element] : in[i % element]; };
    for (uint64_t i = 0; i < left; ++i) out[i] = pad(i);
    for (uint64_t i = 0; i < right; ++i) out[left + bytes + i] = pad(i);
  }
  totals.bytes[kGmToUb] += bursts * bytes;
  return gm_cycles((double)(bursts * bytes));
}

inline double Block::ub_to_gm(const Request& r) {
  uint64_t bursts = r.a[2], bytes = r.a[3], element = r.a[6];
  if (!range("number of bursts", bursts, 1, 4095)) return 0;
  if (!range("bytes of a burst", bytes, 1, 2097151)) return 0;
  if (!aligned("source", r.a[1], 32) || !aligned("destination", r.a[0], element)) return 0;
  uint64_t target = r.a[4], source = r.a[5];
  if (source != bytes && bursts > 1 && !aligned("source stride", source, 32)) return 0;
  Memory& m = ub[kActor[now_actor].core];
  for (uint64_t b = 0; b < bursts; ++b) {
    uint64_t at = r.a[1] + b * source;
    if (!touch(m, at, bytes, false) || !touch_gm(r.a[0] + b * target, bytes, true)) return 0;
    memcpy((void*)(uintptr_t)(r.a[0] + b * target), m.bytes + at, bytes);
  }
  totals.bytes[kUbToGm] += bursts * bytes;
  return gm_cycles((double)(bursts * bytes));
}

// UB and L1 exchange blocks of 32 bytes with gaps.
inline double Block::blocks(const Request& r) {
  bool up = r.op == kUbToL1;
  uint64_t bursts = r.a[2], bytes = r.a[3] * 32, source = bytes + r.a[4] * 32, target = bytes + r.a[5] * 32;
  if (!range("number of bursts", bursts, 1, 4095) || !range("blocks of a burst", r.a[3], 1, 65535))
    return 0;
  if (!aligned("source", r.a[1], 32) || !aligned("destination", r.a[0], 32)) return 0;
  Memory& from = up ? ub[kActor[now_actor].core] : l1;
  Memory& to = up ? l1 : ub[AIV0 + (r.a[6] & 1)];
  for (uint64_t b = 0; b < bursts; ++b) {
    uint64_t in = r.a[1] + b * source, out = r.a[0] + b * target;
    if (!touch(from, in, bytes, false) || !touch(to, out, bytes, true)) return 0;
    memcpy(to.bytes + out, from.bytes + in, bytes);
  }
  totals.bytes[r.op] += bursts * bytes;
  return kTransferStart + (double)(bursts * bytes) / kUbToL1Rate;
}

// Row-major [rows, columns] of GM to fractals: element (n, d) goes to block d / C0 * c0_stride + n
// of 32 bytes. Columns that do not fill the last C0 are filled with zeros.
inline double Block::gm_to_l1(const Request& r) {
  uint64_t row_bytes = r.a[2], element = r.a[6], c0 = 32 / element;
  bool transposed = r.a[7];
  uint64_t rows = transposed ? r.a[4] : r.a[3], columns = transposed ? r.a[3] : r.a[4];
  // The transposing form reads [rows, columns] and writes rows as the axis of C0.
  uint64_t n_extent = transposed ? columns : rows, d_extent = transposed ? rows : columns;
  if (!range("rows", r.a[3], 1, 65535) || !range("columns", r.a[4], 1, 65535)) return 0;
  if (!aligned("destination", r.a[0], 32) || !aligned("source", r.a[1], element)) return 0;
  if (!range("matrices", r.a[11], 1, 1)) return 0;
  uint64_t row_stride = r.a[12] * 32, c0_stride = r.a[13] * 32;
  for (uint64_t y = 0; y < rows; ++y)
    if (!touch_gm(r.a[1] + y * row_bytes, columns * element, false)) return 0;
  const uint8_t* in = (const uint8_t*)(uintptr_t)r.a[1];
  for (uint64_t g = 0; g * c0 < d_extent; ++g) {
    uint64_t base = r.a[0] + g * c0_stride, width = d_extent - g * c0 < c0 ? d_extent - g * c0 : c0;
    if (row_stride == 32 ? !touch(l1, base, n_extent * 32, true) : false) return 0;
    for (uint64_t n = 0; n < n_extent; ++n) {
      uint64_t at = base + n * row_stride;
      if (row_stride != 32 && !touch(l1, at, 32, true)) return 0;
      uint8_t* out = l1.bytes + at;
      if (transposed) {
        for (uint64_t d = 0; d < width; ++d)
          memcpy(out + d * element, in + (g * c0 + d) * row_bytes + n * element, element);
      } else {
        memcpy(out, in + n * row_bytes + g * 32, width * element);
      }
      memset(out + width * element, 0, 32 - width * element);
    }
  }
  totals.bytes[kGmToL1] += rows * columns * element;
  return gm_cycles((double)(rows * columns * element));
}

inline double Block::fill_l1(const Request& r) {
  uint64_t repeats = r.a[2], bytes = r.a[3] * 32, stride = bytes + r.a[4] * 32;
  if (!range("repeats", repeats, 0, 32767) || !range("blocks", r.a[3], 0, 32767)) return 0;
  if (!range("gap", r.a[4], 0, 32767) || !aligned("destination", r.a[0], 32)) return 0;
  uint32_t value = (uint32_t)r.a[1];
  for (uint64_t i = 0; i < repeats && bytes; ++i) {
    uint64_t at = r.a[0] + i * stride;
    if (!touch(l1, at, bytes, true)) return 0;
    for (uint64_t j = 0; j < bytes; j += 4) memcpy(l1.bytes + at + j, &value, 4);
  }
  return kTransferStart + (double)(repeats * bytes) / kL0Rate;
}

// Fractals of 512 bytes, [16 rows][32 bytes]. The transposing form (16-bit elements) transposes
// each fractal and exchanges the axes between them.
inline double Block::l1_to_l0(const Request& r) {
  uint64_t m_step = r.a[4], k_step = r.a[5], element = r.a[8];
  bool transposed = r.a[9];
  if (!range("m step", m_step, 0, 255) || !range("k step", k_step, 0, 255)) return 0;
  if (!range("element bytes", element, 1, 4)) return 0;
  if (transposed && !range("element bytes of a transposed copy", element, 2, 2)) return 0;
  if (!aligned("source", r.a[1], 32) || !aligned("destination", r.a[0], 512)) return 0;
  Memory& to = r.op == kL1ToL0A ? l0a : l0b;
  for (uint64_t k = 0; k < k_step; ++k) {
    for (uint64_t m = 0; m < m_step; ++m) {
      uint64_t in = r.a[1] + ((r.a[3] + k) * r.a[6] + r.a[2] + m) * 512;
      uint64_t out = r.a[0] + (transposed ? m * r.a[7] + k : k * r.a[7] + m) * 512;
      if (!touch(l1, in, 512, false) || !touch(to, out, 512, true)) return 0;
      if (!transposed) {
        memcpy(to.bytes + out, l1.bytes + in, 512);
        continue;
      }
      const uint16_t* a = (const uint16_t*)(l1.bytes + in);
      uint16_t* b = (uint16_t*)(to.bytes + out);
      for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) b[j * 16 + i] = a[i * 16 + j];
    }
  }
  totals.bytes[r.op] += m_step * k_step * 512;
  return 30 + (double)(m_step * k_step * 512) / kL0Rate;
}

// Scales of the MX form: fractals of 16 rows and two scales, [16][2]. L0A_MX and L0B_MX lie beside
// L0A and L0B: the scales of operands at a byte there begin at a sixteenth of it.
inline double Block::scales_to_l0(const Request& r) {
  uint64_t x_step = r.a[4], y_step = r.a[5];
  if (!range("x step", x_step, 1, 255) || !range("y step", y_step, 1, 255)) return 0;
  if (!aligned("source", r.a[1], 32) || !aligned("destination", r.a[0], 32)) return 0;
  Memory& to = r.op == kL1ToL0AMx ? l0a_mx : l0b_mx;
  for (uint64_t x = 0; x < x_step; ++x)
    for (uint64_t y = 0; y < y_step; ++y) {
      uint64_t in = r.a[1] + ((r.a[2] + x) * r.a[6] + r.a[3] + y) * 32;
      uint64_t out = r.a[0] + (x * r.a[7] + y) * 32;
      if (!touch(l1, in, 32, false) || !touch(to, out, 32, true)) return 0;
      memcpy(to.bytes + out, l1.bytes + in, 32);
    }
  totals.bytes[r.op] += x_step * y_step * 32;
  return 30 + (double)(x_step * y_step * 32) / kL0Rate;
}
}  // namespace tw
