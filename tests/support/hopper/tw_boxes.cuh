#pragma once
#include "tw_hopper.cuh"
#define __grid_constant__

struct tw_map {  // support/triton_run.py fills it
  const unsigned char* data;
  int64_t rows, row_bytes, box_rows, box_columns, unused[11];
};

TW_DEVICE void tw_box(uint32_t to, const tw_map* map, int column, int row, uint32_t barrier) {
  if (to % 1024) abort();
  for (int i = 0; i < map->box_rows; ++i) {
    for (int j = 0; j < 128; ++j) {
      const bool there = row + i < map->rows && column + j < map->row_bytes;
      const int place = i * 128 + ((j >> 4 ^ i & 7) << 4 | j & 15);
      memory[to + place] = there ? map->data[(row + i) * map->row_bytes + column + j] : 0;
    }
  }
  Barrier& b = *barriers_of_block.at(barrier);
  std::lock_guard<std::mutex> hold(b.lock);
  b.num_bytes -= map->box_rows * 128;
  b.end_phase();
}

template <int kName, int kThreads>
TW_DEVICE void tw_let() { (void)meeting(kName, kThreads).arrive(); }

TW_DEVICE void tw_bulk_out(void* to, uint32_t from, uint32_t num_bytes) {
  if (num_bytes % 16 || from % 16 || (uintptr_t)to % 16) abort();
  memcpy(to, memory + from, num_bytes);
}
TW_DEVICE void tw_bulk_group() {}
TW_DEVICE void tw_bulk_read() {}
TW_DEVICE void tw_bulk_done() {}

static inline float of_e4m3(uint32_t code) {
  const int power = code >> 3 & 15, low = code & 7;
  const float size = (code & 127) == 127 ? NAN : power ? ldexpf(8 + low, power - 10) : ldexpf(low, -9);
  return code & 128 ? -size : size;
}
// Row r of codes, k of 32.
static inline float code_at(Tile t, int r, int k) {
  uint32_t address = t.start + r / 8 * t.stride + r % 8 * 128 + k;
  return of_e4m3(memory[address ^ (address >> 7 & 7) << 4]);
}
TW_DEVICE void tw_codes(float (&d)[64], uint64_t a, uint64_t b, int adds) {
  meet_group();
  const int thread = threadIdx.x % 128;
  float row[2][32];
  for (int h = 0; h < 2; ++h) {
    for (int k = 0; k < 32; ++k) row[h][k] = code_at(tile_of(a), row_of(thread, h * 2), k);
  }
  for (int i = 0; i < 64; ++i) {
    float sum = 0.0f;
    for (int k = 0; k < 32; ++k) {
      sum += row[i >> 1 & 1][k] * code_at(tile_of(b), column_of(thread, i), k);
    }
    d[i] = adds ? d[i] + sum : sum;
  }
  meet_group();
}
