// Products of e4m3 codes whose sums of 128 values of k leave the matrix unit, are scaled and added
// in fp32: blocks of 128 rows and two halves of 128 columns each, for which a thread brings tiles,
// two groups of four warps multiply, 64 rows and all columns each, and a warp for each group
// carries results away. The groups take turns: one scales sums of a half while those of the other
// are multiplied.
#pragma once
#include "tw_boxes.cuh"

#define TW_NEAR 16  // blocks of rows that share columns before the next columns come
#define TW_SCALED_ROWS 16384  // bytes of a stage: rows, then the columns of each half
#define TW_SCALED_HALF 16384
#define TW_SCALED_STAGE 49152
#define TW_SCALED_BRINGS 256  // the thread that brings
#define TW_KEPT_ROW 528  // bytes between rows of results on their way out: pairs of a warp in all banks

// The next stage of a ring, and the parity that its barriers have.
struct tw_ring {
  int stage;
  uint32_t parity;
};
template <int kStages>
TW_DEVICE void tw_step(tw_ring& ring) {
  if (++ring.stage == kStages) ring.stage = 0, ring.parity ^= 1;
}

// Where a tile of the work lies: rows, columns, spans from first to stop.
struct tw_piece {
  int row_block, column, segment, first, stop;
};
TW_DEVICE tw_piece tw_piece_of(int number, int row_blocks, int columns, int each, int spans) {
  tw_piece at;
  at.segment = number / (row_blocks * columns);
  number %= row_blocks * columns;
  const int before = number / (TW_NEAR * columns) * TW_NEAR;
  const int inside = number % (TW_NEAR * columns), size = min(row_blocks - before, TW_NEAR);
  at.row_block = before + inside % size;
  at.column = inside / size;
  at.first = min(at.segment * each, spans);
  at.stop = min(at.first + each, spans);
  return at;
}

template <int kStages>
TW_DEVICE void tw_scaled_ready(uint32_t full) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      tw_barrier_init(full + 8 * i, 1);
      tw_barrier_init(full + 8 * (kStages + i), 2);
    }
    tw_barriers_ready();
  }
  __syncthreads();
}

// Brings what one tile takes; `panels` are of 64 columns, two of each half.
template <int kStages>
TW_DEVICE void tw_scaled_bring(tw_ring& ring, uint32_t base, uint32_t full, const tw_map* rows,
                               const tw_map* const (&halves)[2], const int (&panels)[2],
                               const tw_piece& at, int spans) {
  for (int span = at.first; span < at.stop; ++span) {
    const uint32_t to = base + ring.stage * TW_SCALED_STAGE, barrier = full + 8 * ring.stage;
    tw_wait(barrier + 8 * kStages, ring.parity ^ 1);
    tw_arrive_for(barrier, TW_SCALED_STAGE);
    tw_box(to, rows, span * 128, at.row_block * 128, barrier);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tw_box(to + TW_SCALED_ROWS + i * 8192, halves[i >> 1], 0,
             ((panels[i >> 1] + (i & 1)) * spans + span) * 64, barrier);
    }
    tw_step<kStages>(ring);
  }
}

// The power of two whose ue8m0 code is the lowest byte.
TW_DEVICE float tw_power(int word) { return __int_as_float((word & 255) << 23); }

// Scales that a thread takes of one span after the other: of its two rows, the second one so many
// words further on, and of the columns of each half.
struct tw_scales {
  const int* rows;
  const int* columns[2];
  int second, num_rows;
  int words[4];
};
TW_DEVICE void tw_load_scales(tw_scales& of) {
  of.words[0] = of.rows[0];
  of.words[1] = of.rows[of.second];
  of.words[2] = of.columns[0][0];
  of.words[3] = of.columns[1][0];
  of.rows += of.num_rows;
  of.columns[0] += 64;
  of.columns[1] += 64;
}

// One of two barriers, by a group.
template <int kOfZero, int kOfOne, int kThreads>
TW_DEVICE void tw_meet_of(int group) {
  if (group == 0) {
    tw_meet<kOfZero, kThreads>();
  } else {
    tw_meet<kOfOne, kThreads>();
  }
}
template <int kOfZero, int kOfOne, int kThreads>
TW_DEVICE void tw_let_of(int group) {
  if (group == 0) {
    tw_let<kOfZero, kThreads>();
  } else {
    tw_let<kOfOne, kThreads>();
  }
}

// The turn of a group, of 0 first; then that of the other one.
TW_DEVICE void tw_wait_turn(int group) { tw_meet_of<1, 2, 256>(group); }
TW_DEVICE void tw_give_turn(int group) { tw_let_of<2, 1, 256>(group); }

// Begins the product of one half and one span.
TW_DEVICE void tw_scaled_begin(float (&part)[64], uint32_t rows, uint32_t columns) {
  const uint64_t a = tw_tile(rows, 0), b = tw_tile(columns, 0);
  tw_fence_registers();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    tw_codes(part, tw_tile_at(a, k * 32), tw_tile_at(b, k * 32), k > 0);
    tw_commit();
  }
}

// Sums of spans first to stop; words of the first one's scales are there.
template <int kStages>
TW_DEVICE void tw_scaled_sums(float (&sums)[2][64], tw_ring& ring, uint32_t base, uint32_t full,
                              tw_scales& scales, int group, int first, int stop) {
  float part[64], powers[4];
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.0f;
#pragma unroll 1
  for (int span = first; span < stop; ++span) {
    const uint32_t from = base + ring.stage * TW_SCALED_STAGE, barrier = full + 8 * ring.stage;
    tw_wait(barrier, ring.parity);
#pragma unroll
    for (int i = 0; i < 4; ++i) powers[i] = tw_power(scales.words[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tw_wait_turn(group);
      tw_scaled_begin(part, from + group * 8192, from + TW_SCALED_ROWS + half * TW_SCALED_HALF);
      if (half == 0 && span + 1 < stop) tw_load_scales(scales);
      // The other group's products begin to queue where half of these are done.
      tw_unfinished<2>(part);
      tw_give_turn(group);
      tw_unfinished<0>(part);
      if (half == 1 && (threadIdx.x & 127) == 0) tw_arrive(barrier + 8 * kStages);
      const float both[] = {__fmul_rn(powers[0], powers[2 + half]),
                            __fmul_rn(powers[1], powers[2 + half])};
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        sums[half][i] = __fmaf_rn(part[i], both[i >> 1 & 1], sums[half][i]);
      }
    }
    tw_step<kStages>(ring);
  }
}

TW_DEVICE float tw_rounded(float x) { return __int_as_float((int)(tw_pack(x, 0.0f) << 16)); }

// Results of a group leave by the copy engine, from rows that each of its threads has part of.
TW_DEVICE void tw_keep(uint32_t to, const float (&pair)[2]) {
  tw_store8(to, make_uint2((uint32_t)__float_as_int(pair[0]), (uint32_t)__float_as_int(pair[1])));
}
TW_DEVICE void tw_keep(uint32_t to, const unsigned short (&pair)[2]) {
  tw_store4(to, pair[0] | (uint32_t)pair[1] << 16);
}
// Rows of a group are free to be written, or full: between its warps and the one that carries.
TW_DEVICE void tw_wait_free(int group) { tw_meet_of<5, 6, 160>(group); }
TW_DEVICE void tw_give_free(int group) { tw_let_of<5, 6, 160>(group); }
TW_DEVICE void tw_wait_kept(int group) { tw_meet_of<3, 4, 160>(group); }
TW_DEVICE void tw_give_kept(int group) { tw_let_of<3, 4, 160>(group); }
// One warp: 64 rows go to `to` and `step` elements further on each, `count` of each, a multiple of
// 16 bytes or nothing; `last` is the last row that is there.
template <class T>
TW_DEVICE void tw_carry(int group, uint32_t from, T* to, int64_t step, int last, int count) {
  tw_wait_kept(group);
  for (int row = threadIdx.x & 31; row < 64; row += 32) {
    if (row <= last && count > 0) {
      tw_bulk_out(to + row * step, from + row * TW_KEPT_ROW, count * (int)sizeof(T));
    }
  }
  tw_bulk_group();
  tw_bulk_read();
  tw_give_free(group);
}
