// Products of rows of bf16 with tiles of fp4 or fp8 codes (codegen/pack_tiles.py): codes become bf16
// values in the registers of the matrix instruction, sums are fp32 in the order of k. A code whose
// bits are moved into the fields of a bf16 is its value times a power of two; the product with its
// scale is exact. One warp, or one group of warps, brings tiles and rows; others take products.
#pragma once
#include "tw_wide.cuh"

#define TW_SPAN 128         // values of k of a tile
#define TW_NEIGHBOURS 8     // blocks of rows that share columns before the next columns come
#define TW_SCALE_BYTES 256  // of a tile: a byte for a row and 32 values of k

// Codes of 32 values of k of a row in one word, low nibbles those of the first 16: pairs for both
// halves, times 2^-6.
TW_DEVICE void tw_nibble_pairs(uint32_t x, uint32_t scale, uint32_t (&pairs)[4]) {
  pairs[0] = tw_times(((x << 12) & 0x80008000u) | ((x << 6) & 0x01C001C0u), scale);
  pairs[1] = tw_times(((x << 4) & 0x80008000u) | ((x >> 2) & 0x01C001C0u), scale);
  pairs[2] = tw_times(((x << 8) & 0x80008000u) | ((x << 2) & 0x01C001C0u), scale);
  pairs[3] = tw_times((x & 0x80008000u) | ((x >> 6) & 0x01C001C0u), scale);
}

// The power of two of one of a word's four ue8m0 bytes, times 2^120, in both halves.
TW_DEVICE uint32_t tw_unit_scale(uint32_t word, int unit) {
  return __byte_perm(word, 0, 0x4040 | unit * 0x101) * 128u + 0x3C003C00u;
}

// Codes of four values of k of a row in one word, even bytes those of the first pair.
TW_DEVICE void tw_byte_pairs(uint32_t x, uint32_t scale, uint32_t (&pairs)[2]) {
  pairs[0] = tw_times(((x << 8) & 0x80008000u) | ((x << 4) & 0x07F007F0u), scale);
  pairs[1] = tw_times((x & 0x80008000u) | ((x >> 4) & 0x07F007F0u), scale);
}

// Codes of sixteen rows of a tile, of half of a span: words of row lane / 4 and of the eighth after.
template <int kBits>
TW_DEVICE void tw_fetch_half(uint32_t (&x)[kBits / 4][4], uint32_t tile, int first_row, int half,
                             int lane) {
#pragma unroll
  for (int i = 0; i < kBits / 4; ++i) {
    const int part = (half * (kBits / 4) + i) * 2 + (lane >> 4), row = first_row + (lane & 15);
    tw_matrices(x[i], tile + (part * 64 + row) * 16);
  }
}

// They become the left operand of four products of 16 values of k.
template <int kBits>
TW_DEVICE void tw_decode_half(uint32_t (&a)[4][4], const uint32_t (&x)[kBits / 4][4], int half,
                              const uint32_t (&scales)[2]) {
#pragma unroll
  for (int i = 0; i < kBits / 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int unit = half * 2 + (kBits == 4 ? j : i);
      const uint32_t low_scale = tw_unit_scale(scales[0], unit);
      const uint32_t high_scale = tw_unit_scale(scales[1], unit);
      if constexpr (kBits == 4) {
        uint32_t low[4], high[4];
        tw_nibble_pairs(x[0][2 * j], low_scale, low);
        tw_nibble_pairs(x[0][2 * j + 1], high_scale, high);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          uint32_t(&step)[4] = a[2 * j + k];
          step[0] = low[2 * k], step[1] = high[2 * k];
          step[2] = low[2 * k + 1], step[3] = high[2 * k + 1];
        }
      } else {
        uint32_t low[2], high[2], (&step)[4] = a[2 * i + j];
        tw_byte_pairs(x[i][2 * j], low_scale, low);
        tw_byte_pairs(x[i][2 * j + 1], high_scale, high);
        step[0] = low[0], step[1] = high[0], step[2] = low[1], step[3] = high[1];
      }
    }
  }
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
  static constexpr int code_bytes = 64 * TW_SPAN * kBits / 8;
  static constexpr int tile_bytes = code_bytes + TW_SCALE_BYTES;
  static constexpr int rows_at = (kWeights * tile_bytes + kAlign - 1) / kAlign * kAlign;
  static constexpr int half_bytes = kRows * 128;
  static constexpr int num_bytes = rows_at + 2 * half_bytes;
};

// Brings one span of the weights' panels to a stage; one thread.
template <int kWeights, class Stage>
TW_DEVICE void tw_bring_tiles(const tw_operands<kWeights>& of, const int64_t (&tiles)[kWeights],
                              int span, uint32_t at, uint32_t full) {
  tw_arrive_for(full, kWeights * Stage::tile_bytes);
#pragma unroll
  for (int w = 0; w < kWeights; ++w) {
    const int64_t tile = tiles[w] + span;
    tw_bulk(at + w * Stage::tile_bytes, of.codes[w] + tile * Stage::code_bytes, Stage::code_bytes, full);
    tw_bulk(at + w * Stage::tile_bytes + Stage::code_bytes, of.scales[w] + tile * TW_SCALE_BYTES,
            TW_SCALE_BYTES, full);
  }
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
  const uint32_t empty = full + 8 * kStages;
  const unsigned char* lines[kRows / 2];
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const int row = i * 2 + (lane >> 4);
    const int64_t source = row < of.count ? of.rows[row] / of.share : -1;
    lines[i] = source < 0 ? nullptr : of.x + source * (kSpans * TW_SPAN * 2) + (lane & 15) * 16;
  }
#pragma unroll 1
  for (int i = 0; i < of.spans; ++i) {
    const int s = i % kStages, span = of.first + i;
    const uint32_t at = base + s * stage::num_bytes;
    if (i >= kStages) tw_wait(empty + 8 * s, (i / kStages - 1) & 1);
    if (lane == 0) tw_bring_tiles<kWeights, stage>(of, tiles, span, at, full + 8 * s);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) {
      const int row = j * 2 + (lane >> 4);
      const uint32_t to = at + stage::rows_at + tw_row_place(row, lane & 15, stage::half_bytes);
      if (lines[j] != nullptr) tw_copy16(to, lines[j] + span * (TW_SPAN * 2));
    }
    tw_arrive_copied(full + 8 * s);
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
        tw_fetch_half<kBits>(x, at + w * stage::tile_bytes, warp * 16, half, lane);
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

// Many rows: the last group of warps brings what the kGroups others multiply, 64 columns each.
// `places`: of each row of x, in units of 16 bytes.
template <int kGroups, int kBits, int kRows, int kSpans, int kStages>
TW_DEVICE void tw_wide_bring(const tw_operands<kGroups>& of, const int64_t (&tiles)[kGroups],
                             uint32_t* places, uint32_t base, uint32_t full, int thread) {
  typedef tw_stage<kGroups, kBits, kRows, 1024> stage;
  constexpr int together = 8;  // lines that are sent for at once
  const uint32_t empty = full + 8 * kStages;
  for (int row = thread; row < of.count; row += 128) {
    places[row] = (uint32_t)(of.rows[row] / of.share) * (kSpans * TW_SPAN * 2 / 16);
  }
  tw_meet<2, 128>();
  const int part = thread & 15, first = thread >> 4;
#pragma unroll 1
  for (int i = 0; i < of.spans; ++i) {
    const int s = i % kStages, span = of.first + i;
    const uint32_t at = base + s * stage::num_bytes;
    if (i >= kStages) tw_wait(empty + 8 * s, (i / kStages - 1) & 1);
    if (thread == 0) tw_bring_tiles<kGroups, stage>(of, tiles, span, at, full + 8 * s);
    const unsigned char* from = of.x + span * (TW_SPAN * 2) + part * 16;
    // Rows eight apart lie in the same place of their blocks.
    const uint32_t to = at + stage::rows_at + tw_row_place(first, part, stage::half_bytes);
#pragma unroll 1
    for (int row = first; row < of.count; row += 8 * together) {
      uint32_t place[together];
#pragma unroll
      for (int j = 0; j < together; ++j) place[j] = row + 8 * j < of.count ? places[row + 8 * j] : 0;
#pragma unroll
      for (int j = 0; j < together; ++j) {
        const unsigned char* line = from + (uint64_t)place[j] * 16;
        if (row + 8 * j < of.count) tw_copy16(to + (row - first + 8 * j) * 128, line);
      }
    }
    tw_arrive_copied(full + 8 * s);
  }
}

// Sums of so many spans, which are brought after `before` others. Half a span is decoded into one set
// of registers while the half before, in another, is multiplied.
template <int kGroups, int kColumns, int kBits, int kRows, int kStages>
TW_DEVICE void tw_wide_sums(float (&sums)[kColumns / 2], uint32_t base, uint32_t full, int before,
                            int spans, int part, int warp, int lane) {
  typedef tw_stage<kGroups, kBits, kRows, 1024> stage;
  const uint32_t empty = full + 8 * kStages;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sums[i] = 0.0f;
  uint32_t a[2][4][4];
#pragma unroll 1
  for (int span = before; span < before + spans; ++span) {
    const int s = span % kStages;
    const uint32_t at = base + s * stage::num_bytes, tile = at + part * stage::tile_bytes;
    tw_wait(full + 8 * s, (span / kStages) & 1);
    tw_publish();  // rows were stored one by one
    uint32_t scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = tw_load4(tile + stage::code_bytes + (warp * 16 + (lane >> 2) + i * 8) * 4);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t x[kBits / 4][4];
      tw_fetch_half<kBits>(x, tile, warp * 16, half, lane);
      tw_decode_half<kBits>(a[half], x, half, scales);
      const uint64_t rows = tw_tile(at + stage::rows_at + half * stage::half_bytes, 16);
      tw_fence_registers();
#pragma unroll
      for (int k = 0; k < 4; ++k) tw_wide(sums, a[half][k], tw_tile_at(rows, k * 32));
      tw_commit();
      // What was begun before is done: its registers are free, and after the first half its stage.
      tw_unfinished<1>(sums);
      if (half == 0 && span > before) tw_arrive_warp(empty + 8 * ((span - 1) % kStages), lane);
    }
  }
  tw_unfinished<0>(sums);
  if (spans > 0) tw_arrive_warp(empty + 8 * ((before + spans - 1) % kStages), lane);
}

// Sums of two groups, `part` 0 and 1 of a pair, meet: each gets the other's of half of the columns,
// by way of shared memory that all are done with.
template <int kGroups, int kCount>
TW_DEVICE void tw_exchange(float (&sums)[kCount], float (&met)[kCount / 2], float* between, int group,
                           int thread) {
  const int part = group & 1;
  between += (group >> 1) * (kCount * 128);
  float* mine = between + (1 - part) * (kCount / 2 * 128) + thread;
  const float* given = between + part * (kCount / 2 * 128) + thread;
  tw_meet<1, kGroups * 128>();
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) mine[i * 128] = part ? sums[i] : sums[i + kCount / 2];
  tw_meet<1, kGroups * 128>();
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) met[i] = given[i * 128];
}
