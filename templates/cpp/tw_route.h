// Which rows meet which matrix, where a weight is a stack of matrices and every token has slots.
//
// A routed problem has a type `routing` with KIND, COUNT matrices, SLOTS per token and SHARED:
//   UNROUTED  one matrix, all rows: row = token
//   EXPERTS   ids(args)[token * SLOTS + slot] names the matrix of a slot; an id outside 0 .. COUNT - 1 names
//             none, and its results are NaN
//   GROUPS    slot g of every token meets matrix g
// Rows of results are numbered token * SLOTS + slot. Activations have one row a token (SHARED) or one a slot.
#pragma once
#include <stdint.h>

namespace tw {

enum routing_kind { UNROUTED = 0, EXPERTS = 1, GROUPS = 2 };

struct one_matrix {
  static constexpr int KIND = UNROUTED;
  static constexpr int64_t COUNT = 1, SLOTS = 1;
  static constexpr bool SHARED = false;
};

// Rows order[first .. first + count) meet one matrix; matrix COUNT is none.
struct row_block { int32_t matrix, first, count; };

struct routes {
  const int32_t* order;
  const row_block* blocks;
  int64_t num_blocks;
};

constexpr int64_t route_align(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Bytes that sort_slots works in: starts, rows in order, blocks (no more of them than rows).
constexpr int64_t route_bytes(int64_t num_rows, int64_t num_matrices) {
  return route_align((num_matrices + 2) * 4) + route_align(num_rows * 4) +
         route_align(num_rows * (int64_t)sizeof(row_block));
}

// A counting sort: rows by ascending matrix, then by ascending number, cut into blocks of max_count.
static inline routes sort_slots(const int32_t* ids, int64_t num_rows, int64_t num_matrices, int64_t max_count,
                                uint8_t* memory) {
  int32_t* start = (int32_t*)memory;
  int32_t* order = (int32_t*)(memory + route_align((num_matrices + 2) * 4));
  row_block* blocks = (row_block*)((uint8_t*)order + route_align(num_rows * 4));
  const auto matrix_of = [&](int64_t row) {
    return ids[row] >= 0 && ids[row] < num_matrices ? (int64_t)ids[row] : num_matrices;
  };
  for (int64_t m = 0; m < num_matrices + 2; ++m) start[m] = 0;
  for (int64_t row = 0; row < num_rows; ++row) ++start[matrix_of(row) + 1];
  for (int64_t m = 0; m <= num_matrices; ++m) start[m + 1] += start[m];
  int64_t num_blocks = 0;
  for (int64_t m = 0; m <= num_matrices; ++m)
    for (int64_t first = start[m]; first < start[m + 1]; first += max_count) {
      const int64_t rest = start[m + 1] - first;
      blocks[num_blocks++] = {(int32_t)m, (int32_t)first, (int32_t)(rest < max_count ? rest : max_count)};
    }
  for (int64_t row = 0; row < num_rows; ++row) order[start[matrix_of(row)]++] = (int32_t)row;
  return {order, blocks, num_blocks};
}

}  // namespace tw
