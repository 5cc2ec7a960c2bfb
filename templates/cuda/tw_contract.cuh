// Products of rows of bf16 with tiles of fp4 or fp8 codes (codegen/pack_tiles.py): codes become bf16
// values in the registers of the matrix instruction, sums are fp32 in the order of k. A code whose
// bits are moved into the fields of a bf16 is its value times a power of two; the product with its
// scale is exact. One warp, or one group of warps, brings tiles and rows; others take products.
#pragma once
#include "tw_wide.cuh"

#define TW_SPAN 128         // values of k of a tile
#define TW_NEIGHBOURS 8     // blocks of rows that share columns before the next columns come
#define TW_SCALE_BYTES 256  // of a tile: a byte for a row and 32 values of k

#define TW_FIELDS 0x81C081C0u  // sign, exponent and mantissa of two e2m1 codes: values times 2^-126
#define TW_KEPT 0x0C180C18u    // of a first word: bits of codes that lie in both words

// Codes of two groups of 32 values of k of a row in a word each: the four pairs of one of them,
// times 2^-6. Bits lie so that a shift and a mask give a pair; one pair's are in both words.
template <int kPart>
TW_DEVICE void tw_woven_pairs(uint32_t x, uint32_t y, uint32_t scale, uint32_t* pairs) {
  const uint32_t word = kPart == 0 ? x : y, both = tw_choose<TW_KEPT>(x, y << 2);
  const uint32_t last = kPart == 0 ? both << 2 : __funnelshift_r(both, both, 4);
  pairs[0] = tw_times((word << 6) & TW_FIELDS, scale);
  pairs[1] = tw_times(word & TW_FIELDS, scale);
  pairs[2] = tw_times(__funnelshift_r(word, word, 6) & TW_FIELDS, scale);
  pairs[3] = tw_times(last & TW_FIELDS, scale);
}

// The power of two of one of a word's four ue8m0 bytes, times 2^120, in both halves. Bytes beside
// woven codes have those 120 already.
template <int kBits>
TW_DEVICE uint32_t tw_unit_scale(uint32_t word, int unit) {
  const uint32_t byte = __byte_perm(word, 0, 0x4040 | unit * 0x101);
  return kBits == 4 ? byte << 7 : byte * 128u + 0x3C003C00u;
}

// Codes of four values of k of a row in one word, even bytes those of the first pair.
TW_DEVICE void tw_byte_pairs(uint32_t x, uint32_t scale, uint32_t* pairs) {
  pairs[0] = tw_times(((x << 8) & 0x80008000u) | ((x << 4) & 0x07F007F0u), scale);
  pairs[1] = tw_times((x & 0x80008000u) | ((x >> 4) & 0x07F007F0u), scale);
}

// Codes of two times eight rows, `apart` bytes from each other, of half of a span: words of row
// lane / 4 of both.
template <int kBits>
TW_DEVICE void tw_fetch_half(uint32_t (&x)[kBits / 4][4], uint32_t rows, int apart, int half, int lane) {
#pragma unroll
  for (int i = 0; i < kBits / 4; ++i) {
    const int part = (half * (kBits / 4) + i) * 2 + (lane >> 4);
    tw_matrices(x[i], rows + part * 1024 + (lane & 7) * 16 + (lane >> 3 & 1) * apart);
  }
}

// One of two parts of them becomes the left operand of two products of 16 values of k.
template <int kBits, int kPart>
TW_DEVICE void tw_decode_part(uint32_t (*a)[4], const uint32_t (&x)[kBits / 4][4], int half,
                              const uint32_t (&scales)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {  // of lane / 4, and the eighth after
    const uint32_t scale = tw_unit_scale<kBits>(scales[row], half * 2 + kPart);
    uint32_t pairs[4];
    if constexpr (kBits == 4) {
      tw_woven_pairs<kPart>(x[0][row], x[0][2 + row], scale, pairs);
    } else {
      tw_byte_pairs(x[kPart][row], scale, pairs);
      tw_byte_pairs(x[kPart][2 + row], scale, pairs + 2);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i >> 1][(i & 1) * 2 + row] = pairs[i];
  }
}

// All of them, that of four.
template <int kBits>
TW_DEVICE void tw_decode_half(uint32_t (&a)[4][4], const uint32_t (&x)[kBits / 4][4], int half,
                              const uint32_t (&scales)[2]) {
  tw_decode_part<kBits, 0>(a, x, half, scales);
  tw_decode_part<kBits, 1>(a + 2, x, half, scales);
}

// Weights of one matrix, where their codes and scales begin; rows of activations.
template <int kWeights>
struct tw_operands {
  const unsigned char* codes[kWeights];
  const unsigned char* scales[kWeights];
  const unsigned char* x;
  const int* rows;  // of results, of which `share` have one row of x
  int share, count;
  int first, spans;  // of a row that are taken, of kSpans
};

// Where a stage's weights and rows of x lie. Rows are halves of a span, 128 swizzled bytes each;
// groups of warps want eight of them to lie at multiples of 1,024.
template <int kWeights, int kBits, int kRows, int kAlign = 128>
struct tw_stage {
  static constexpr bool woven = kBits == 4;  // scales lie behind the codes of a tile
  static constexpr int code_bytes = 64 * TW_SPAN * kBits / 8;
  static constexpr int tile_bytes = code_bytes + TW_SCALE_BYTES;
  static constexpr int rows_at = (kWeights * tile_bytes + kAlign - 1) / kAlign * kAlign;
  static constexpr int half_bytes = kRows * 128;
  static constexpr int num_bytes = rows_at + 2 * half_bytes;
};

// Begins to bring a span as the `turn`-th of a ring of stages, once its stage is free: every `step`-th
// of the weights' tiles from `first` on, if there is any. Returns where the stage lies; what comes
// is counted at `full`.
template <int kWeights, class Stage, int kStages>
TW_DEVICE uint32_t tw_begin(const tw_operands<kWeights>& of, const int64_t (&tiles)[kWeights], int span,
                            int turn, uint32_t base, uint32_t& full, int first, int step) {
  const int s = turn % kStages;
  const uint32_t at = base + s * Stage::num_bytes;
  if (turn >= kStages) tw_wait(full + 8 * (kStages + s), (turn / kStages - 1) & 1);
  full += 8 * s;
  if (first >= kWeights) return at;
  tw_arrive_for(full, (kWeights - first + step - 1) / step * Stage::tile_bytes);
#pragma unroll
  for (int w = 0; w < kWeights; ++w) {
    if (w % step != first) continue;
    const int64_t tile = tiles[w] + span;
    const uint32_t to = at + w * Stage::tile_bytes;
    if constexpr (Stage::woven) {
      tw_bulk(to, of.codes[w] + tile * Stage::tile_bytes, Stage::tile_bytes, full);
    } else {
      tw_bulk(to, of.codes[w] + tile * Stage::code_bytes, Stage::code_bytes, full);
      tw_bulk(to + Stage::code_bytes, of.scales[w] + tile * TW_SCALE_BYTES, TW_SCALE_BYTES, full);
    }
  }
  return at;
}

// Block of rows and block of columns of one of all blocks: neighbours share rows and columns.
TW_DEVICE void tw_turn(int number, int row_blocks, int columns, int& row_block, int& column) {
  const int first = number / (TW_NEIGHBOURS * columns) * TW_NEIGHBOURS;
  const int inside = number % (TW_NEIGHBOURS * columns), size = min(row_blocks - first, TW_NEIGHBOURS);
  row_block = first + inside % size;
  column = inside / size;
}

// Where 16 bytes of a row lie in a stage's half of a span.
TW_DEVICE uint32_t tw_row_place(int row, int part, int half_bytes) {
  return (part >> 3) * half_bytes + row * 128 + ((part ^ row) & 7) * 16;
}

// Few rows: the last warp brings what the four others multiply, 16 columns each. Rows that are not
// there are not brought: what they give is not used.
template <int kWeights, int kBits, int kRows, int kSpans, int kStages>
TW_DEVICE void tw_few_bring(const tw_operands<kWeights>& of, const int64_t (&tiles)[kWeights],
                            uint32_t base, uint32_t full, int lane) {
  typedef tw_stage<kWeights, kBits, kRows> stage;
  const unsigned char* lines[kRows / 2];
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const int row = i * 2 + (lane >> 4);
    const int64_t source = row < of.count ? of.rows[row] / of.share : -1;
    lines[i] = source < 0 ? nullptr : of.x + source * (kSpans * TW_SPAN * 2) + (lane & 15) * 16;
  }
#pragma unroll 1
  for (int i = 0; i < of.spans; ++i) {
    const int span = of.first + i;
    uint32_t arrived = full;
    const uint32_t at = tw_begin<kWeights, stage, kStages>(of, tiles, span, i, base, arrived, lane == 0 ? 0 : kWeights, 1);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) {
      const int row = j * 2 + (lane >> 4);
      const uint32_t to = at + stage::rows_at + tw_row_place(row, lane & 15, stage::half_bytes);
      if (lines[j] != nullptr) tw_copy16(to, lines[j] + span * (TW_SPAN * 2));
    }
    tw_arrive_copied(arrived);
  }
}

// Sums of so many spans.
template <int kWeights, int kBits, int kRows, int kStages>
TW_DEVICE void tw_few_sums(float (&sums)[kWeights][kRows / 8][4], uint32_t base, uint32_t full,
                           int spans, int warp, int lane) {
  typedef tw_stage<kWeights, kBits, kRows> stage;
  const uint32_t empty = full + 8 * kStages;
#pragma unroll
  for (int i = 0; i < kWeights * kRows / 2; ++i) sums[i * 2 / kRows][i % (kRows / 2) / 4][i % 4] = 0.0f;
#pragma unroll 1
  for (int span = 0; span < spans; ++span) {
    const int s = span % kStages;
    const uint32_t at = base + s * stage::num_bytes;
    tw_wait(full + 8 * s, (span / kStages) & 1);
    uint32_t scales[kWeights][2];
#pragma unroll
    for (int i = 0; i < kWeights * 2; ++i) {
      const int row = warp * 16 + (lane >> 2) + i % 2 * 8;
      scales[i / 2][i % 2] = tw_load4(at + i / 2 * stage::tile_bytes + stage::code_bytes + row * 4);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[kWeights][4][4];
#pragma unroll
      for (int w = 0; w < kWeights; ++w) {
        uint32_t x[kBits / 4][4];
        tw_fetch_half<kBits>(x, at + w * stage::tile_bytes + warp * 256, 128, half, lane);
        tw_decode_half<kBits>(a[w], x, half, scales[w]);
      }
#pragma unroll
      for (int t = 0; t < kRows / 8; ++t) {
        uint32_t b[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = t * 8 + (lane & 7), part = half * 8 + i * 4 + (lane >> 3);
          tw_matrices(b[i], at + stage::rows_at + tw_row_place(row, part, stage::half_bytes));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int w = 0; w < kWeights; ++w) {
            tw_product(sums[w][t], a[w][k], b[k / 2][k % 2 * 2], b[k / 2][k % 2 * 2 + 1]);
          }
        }
      }
    }
    tw_arrive_warp(empty + 8 * s, lane);
  }
}

// Many rows: the last group of warps brings what the others multiply, kTiles tiles with all rows,
// after `before` spans of other rows: each of its warps brings every fourth tile, 16 threads a row.
template <int kTiles, int kBits, int kRows, int kSpans, int kStages>
TW_DEVICE void tw_wide_bring(const tw_operands<kTiles>& of, const int64_t (&tiles)[kTiles], uint32_t base,
                             uint32_t full, int before, int thread) {
  typedef tw_stage<kTiles, kBits, kRows, 1024> stage;
  constexpr int lines = kRows / 8;  // of a thread; rows eight apart lie in the same place of their blocks
  const int part = thread & 15, first = thread >> 4, left = (of.count - first + 7) >> 3;
  uint32_t place[lines];  // in units of 16 bytes
#pragma unroll
  for (int i = 0; i < lines; ++i) {
    const int row = i < left ? of.rows[first + 8 * i] / of.share : 0;
    place[i] = (uint32_t)row * (kSpans * TW_SPAN * 2 / 16) + part;
  }
  const int tile = (thread & 31) == 0 ? thread >> 5 : kTiles;
#pragma unroll 1
  for (int i = 0; i < of.spans; ++i) {
    const int span = of.first + i;
    uint32_t arrived = full;
    const uint32_t at = tw_begin<kTiles, stage, kStages>(of, tiles, span, before + i, base, arrived, tile, 4);
    const unsigned char* from = of.x + span * (TW_SPAN * 2);
    const uint32_t to = at + stage::rows_at + tw_row_place(first, part, stage::half_bytes);
#pragma unroll
    for (int j = 0; j < lines; ++j) {
      if (j < left) tw_copy16(to + j * 1024, from + (uint64_t)place[j] * 16);
    }
    tw_arrive_copied(arrived);
  }
}

// Sums of so many spans, which are brought after `before` others; a group of warps takes kEach times 64
// rows of tiles: a tile, or where two weights meet, half of a tile of each, whose rows take turns
// by eight, so that sums that meet are one thread's. With two sets of registers half a span is
// decoded into one while the half before, in the other, is multiplied.
template <int kGroups, int kEach, int kMet, int kColumns, int kBits, int kRows, int kStages>
TW_DEVICE void tw_wide_sums(float (&sums)[kEach][kColumns / 2], uint32_t base, uint32_t full, int before,
                            int spans, int group, int warp, int lane) {
  typedef tw_stage<kGroups * kEach, kBits, kRows, 1024> stage;
  static_assert(kEach == 1 || kEach % kMet == 0, "a group begins with a tile");
  constexpr int code_step = kMet == 1 ? 128 : stage::tile_bytes;
  constexpr int scale_step = kMet == 1 ? 32 : stage::tile_bytes;
  const uint32_t empty = full + 8 * kStages;
  const uint32_t tile = base + (kEach == 1 ? group / kMet * kMet : group * kEach) * stage::tile_bytes;
  const int row = kMet == 1 ? warp * 16 : (kEach == 1 ? group % 2 * 32 : 0) + warp * 8;
#pragma unroll
  for (int i = 0; i < kEach * kColumns / 2; ++i) sums[i / (kColumns / 2)][i % (kColumns / 2)] = 0.0f;
  uint32_t a[4][4], x[kBits / 4][4], scales[2];
  const auto fetch = [&](int at, int each, int half) {
    const uint32_t from = tile + at + each / kMet * kMet * stage::tile_bytes;
    const int first = row + each % kMet * 32;
    tw_fetch_half<kBits>(x, from + first * 16, code_step, half, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = tw_load4(from + stage::code_bytes + (first + (lane >> 2)) * 4 + i * scale_step);
    }
  };
  const auto enter = [&](int span) {  // where its stage lies, once it is there
    const int s = span % kStages;
    tw_wait(full + 8 * s, (span / kStages) & 1);
    tw_publish();  // rows were stored one by one
    return s * stage::num_bytes;
  };
  if (spans == 0) return;
  int at = enter(before);
  fetch(at, 0, 0);
  tw_decode_part<kBits, 0>(a, x, 0, scales);
#pragma unroll 1
  for (int span = before; span < before + spans; ++span) {
    int next = at;
#pragma unroll
    for (int i = 0; i < 2 * kEach; ++i) {
      const int half = i / kEach, each = i % kEach, later = (i + 1) % (2 * kEach);
      const uint64_t rows = tw_tile(base + at + stage::rows_at + half * stage::half_bytes, 16);
      // A part is decoded while products of the other one are on their way.
      tw_fence_registers();
      tw_wide(sums[each], a[0], rows);
      tw_wide(sums[each], a[1], tw_tile_at(rows, 32));
      tw_commit();
      if (i > 0) tw_products_but<1>(x);
      tw_decode_part<kBits, 1>(a + 2, x, half, scales);
      if (later == 0) next = enter(min(span + 1, before + spans - 1));
      fetch(next, later % kEach, later / kEach);
      tw_fence_registers();
      tw_wide(sums[each], a[2], tw_tile_at(rows, 64));
      tw_wide(sums[each], a[3], tw_tile_at(rows, 96));
      tw_commit();
      tw_products_but<1>(x);
      tw_decode_part<kBits, 0>(a, x, later / kEach, scales);
    }
    // No product is on its way from one turn to the next: the assembler would make all wait.
    tw_hold(a[0]), tw_hold(a[1]);
#pragma unroll
    for (int each = 0; each < kEach; ++each) tw_unfinished<0>(sums[each]);
    tw_arrive_after_products(empty + 8 * (span % kStages), lane);
    at = next;
  }
}

// Gives sums to finish(lines, columns, sums of each weight), some at a time so that they do not wait
// for each other: line_of(i) is the line of results of row i of a block, -1: there is none.
template <int kWeights, int kBlocks, class Line, class Finish>
TW_DEVICE void tw_few_finish(const float (&sums)[kWeights][kBlocks][4], int panel, int warp, int lane,
                             const Line& line_of, const Finish& finish) {
#pragma unroll
  for (int t = 0; t < kBlocks; ++t) {
    int line[4], column[4];
    TW_EACH(4) line[m] = line_of(t * 8 + (lane & 3) * 2 + (m & 1));
    TW_EACH(4) column[m] = panel * 64 + warp * 16 + (lane >> 2) + (m >> 1) * 8;
    if constexpr (kWeights == 2) {
      finish(line, column, sums[0][t], sums[1][t]);
    } else {
      finish(line, column, sums[0][t]);
    }
  }
}

// The same of sums of many rows: `units` counts 64 rows of tiles of all groups before this group's.
template <int kMet, int kEach, int kSums, class Line, class Finish>
TW_DEVICE void tw_wide_finish(const float (&sums)[kEach][kSums], int units, int warp, int lane,
                              const Line& line_of, const Finish& finish) {
  constexpr int blocks = kSums / 4, together = blocks % 3 == 0 ? 3 : blocks % 2 == 0 ? 2 : 1;
  constexpr int many = together * 4 / kMet, step = 4 / kMet;
#pragma unroll
  for (int each = 0; each < kEach; ++each) {
    const int first = (units + each) * (64 / kMet) + warp * (16 / kMet) + (lane >> 2);
#pragma unroll
    for (int block = 0; block < blocks; block += together) {
      int line[many], column[many];
      float low[many], high[many];
      TW_EACH(many) {
        const int of = block + m / step, i = m % step;
        line[m] = line_of(of * 8 + (lane & 3) * 2 + (i & 1)), column[m] = first + (i >> 1) * 8;
        low[m] = sums[each][of * 4 + i];
        if constexpr (kMet == 2) high[m] = sums[each][of * 4 + 2 + i];
      }
      if constexpr (kMet == 2) {
        finish(line, column, low, high);
      } else {
        finish(line, column, low);
      }
    }
  }
}
