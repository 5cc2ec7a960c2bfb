// Rows sorted by the matrix they meet, without atomics: each matrix's block counts for itself.
// Matrix `matrices` is that of ids outside 0 .. matrices - 1.
#pragma once
#include "tw_hopper.cuh"

TW_DEVICE int tw_matrix_of(const int* ids, int row, int num_rows, int matrices) {
  if (row >= num_rows) return -1;
  const int id = ids[row];
  return id < 0 || id >= matrices ? matrices : id;
}

// Sum over a block of 1,024 threads of what each gives, and of those before this one.
TW_DEVICE int tw_block_sum(int x, int* across, int& before) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int upto = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, upto, step);
    if (lane >= step) upto += other;
  }
  __syncthreads();
  if (lane == 31) across[warp] = upto;
  __syncthreads();
  int total = 0, first = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i == warp) first = total;
    total += across[i];
  }
  before = first + upto - x;
  return total;
}

// Block m of 1,024 threads writes starts[m], and the rows of matrix m, ascending, from there on.
TW_DEVICE void tw_route_rows(const int* ids, int* starts, int* order, int num_rows, int matrices,
                             int* across) {
  const int matrix = blockIdx.x;
  int lower = 0, before;
  for (int row = threadIdx.x; row < num_rows; row += 1024) {
    lower += tw_matrix_of(ids, row, num_rows, matrices) < matrix;
  }
  int place = tw_block_sum(lower, across, before);
  if (threadIdx.x == 0) starts[matrix] = place;
  if (threadIdx.x == 0 && matrix == matrices) starts[matrices + 1] = num_rows;
  for (int base = 0; base < num_rows; base += 4096) {
    const int first = base + threadIdx.x * 4;
    int mine = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mine |= (tw_matrix_of(ids, first + i, num_rows, matrices) == matrix) << i;
    }
    const int total = tw_block_sum(__popc(mine), across, before);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (mine >> i & 1) order[place + before++] = first + i;
    }
    place += total;
  }
}

// One block of 1,024 threads cuts each matrix's rows into equal blocks of at most `most` < 255, those
// of most rows first: table[block] is (matrix, first place in the order, count, 0); blocks left over
// count 0. `memory` holds 32 words, and one for each matrix: rows of a block << 24 | blocks.
TW_DEVICE void tw_route_blocks(const int* starts, int* table, int num_blocks, int matrices, int most,
                               int* memory) {
  uint32_t* sizes = (uint32_t*)memory + 32;
  int mine = 0, before;
  for (int matrix = threadIdx.x; matrix <= matrices; matrix += 1024) {
    const int count = starts[matrix + 1] - starts[matrix], blocks = (count + most - 1) / most;
    sizes[matrix] = blocks == 0 ? 0 : (uint32_t)((count + blocks - 1) / blocks) << 24 | blocks;
    mine += blocks;
  }
  const int total = tw_block_sum(mine, memory, before);  // sizes are seen by all
  for (int matrix = threadIdx.x; matrix <= matrices; matrix += 1024) {
    const uint32_t least = sizes[matrix] & 0xFF000000u;
    const int blocks = sizes[matrix] & 0xFFFFFF, first = starts[matrix];
    const int count = starts[matrix + 1] - first;
    int at = 0;
    for (int other = 0; other <= matrices; ++other) {
      const uint32_t size = sizes[other];
      if (size >= least + (other < matrix ? 0u : 1u << 24)) at += size & 0xFFFFFF;
    }
    for (int i = 0; i < blocks; ++i) {
      const int from = (int)((int64_t)count * i / blocks), to = (int)((int64_t)count * (i + 1) / blocks);
      int* entry = table + (int64_t)(at + i) * 4;
      entry[0] = matrix, entry[1] = first + from, entry[2] = to - from, entry[3] = 0;
    }
  }
  for (int i = total + threadIdx.x; i < num_blocks; i += 1024) table[(int64_t)i * 4 + 2] = 0;
}

// A block of the lists: writes its rows, returns their number; `matrix` becomes what they meet.
TW_DEVICE int tw_listed(const int* order, const int* table, int block, int* rows, int threads,
                        int& matrix) {
  const int* entry = table + (int64_t)block * 4;
  const int count = entry[2];
  if (count == 0) return 0;
  matrix = entry[0];
  for (int i = threadIdx.x; i < count; i += threads) rows[i] = order[entry[1] + i];
  return count;
}

// Without lists: every `most`-th row of a matrix leads a block, of itself and the next ones.
TW_DEVICE int tw_led(const int* ids, int leader, int num_rows, int matrices, int most, int* rows,
                     int& matrix) {
  const int lane = threadIdx.x & 31;
  matrix = tw_matrix_of(ids, leader, num_rows, matrices);
  int before = 0, seen = 0;
  for (int base = 0; base < num_rows; base += 32) {
    const int row = base + lane;
    const bool mine = tw_matrix_of(ids, row, num_rows, matrices) == matrix;
    const uint32_t all = __ballot_sync(0xFFFFFFFFu, mine);
    before += __popc(__ballot_sync(0xFFFFFFFFu, mine && row < leader));
    const int place = seen + __popc(all & ((1u << lane) - 1)) - before;
    if (threadIdx.x < 32 && mine && row >= leader && place < most) rows[place] = row;
    seen += __popc(all);
  }
  return before % most ? 0 : min(seen - before, most);
}
