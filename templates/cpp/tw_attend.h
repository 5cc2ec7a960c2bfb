// Launch of paged attention: softmax(scale q k^T) v over positions 0 .. positions[token] of each request,
// grouped queries, read through block tables.
//
// A row is a (token, query head). Its positions are cut into units of CHUNK from position 0; a unit ends with
// (m, l, o) = (maximum, sum of weights, weighted values), and units are folded in order, starting with the
// first: m = max(m1, m2), x = x1 * exp(m1 - m) + x2 * exp(m2 - m) for l and o. The result is o / l.
// A work item is (tile of tokens of one request, kv head, range of units). If a tile has several ranges, every
// unit leaves its (m, l, o) in the workspace and a second pass folds them, in the same order. A token with a
// negative position (padding) sees nothing and gives zeros.
//
// A translation unit defines
//   struct Problem    HEADS, KV_HEADS, WIDTH, BLOCK_SIZE, CHUNK; types args, cache (float or uint16_t = bf16);
//                     static functions of const args&: scale, positions, request_rows, block_tables,
//                     table_stride, k_cache, v_cache, and
//                     load_q(args, token, head, float* q), epilogue(args, token, head, const float* out)
// and calls tw::attend<Problem, REGISTER_ROWS>(args, num_tokens, schedule, workspace). Neither REGISTER_ROWS (rows
// of a register tile) nor a field of the schedule can change a result bit.
#pragma once
#include <initializer_list>

#include "tw_attend_tile.h"

namespace tw {

struct attend_schedule {
  int64_t tile_tokens;    // most tokens of a tile
  int64_t split_units;    // units of a range; 0: tiles are not split
  int64_t partial_bytes;  // most workspace for split tiles; a tile that does not fit is not split
  int64_t inline_units;   // a launch of at most so many units of one kv head is a single work item
  bool paired;            // order of tiles: first, last, second, last but one, ...
  bool prefetch;          // ask for the values of a unit while its keys are transposed
};

// Tokens of one request that lie side by side in the batch.
struct attend_tile {
  int64_t token, count, num_units, num_ranges;
  int64_t first_item, first_partial;
};

template <class P>
struct attend_sizes {
  static_assert(P::WIDTH % 8 == 0 && P::WIDTH >= 8, "width must be a multiple of 8");
  static_assert(P::HEADS % P::KV_HEADS == 0, "heads must be a multiple of kv heads");
  static_assert(P::CHUNK >= 1 && P::BLOCK_SIZE >= 1, "chunk and block size must be positive");
  static constexpr int GROUP = P::HEADS / P::KV_HEADS;
  static constexpr int STRIDE = round_up(P::CHUNK, 16);    // positions of a unit
  static constexpr int COLUMNS = round_up(P::WIDTH, 16);   // width of o
  static constexpr bool WHOLE_COLUMNS = P::WIDTH == COLUMNS;
  static constexpr bool DIRECT = WHOLE_COLUMNS && sizeof(typename P::cache) == 4;  // values need no copy
  static constexpr int PARTIAL = COLUMNS + 16;             // o, m, l
  static constexpr int64_t KEYS = P::WIDTH * STRIDE, VALUES = STRIDE * COLUMNS;
  static constexpr int64_t PARTIAL_BYTES = PARTIAL * 4;

  static constexpr int64_t up(int64_t count) { return (count + 15) / 16 * 16; }
  static constexpr int64_t rows(const attend_schedule& s) { return s.tile_tokens * GROUP; }
  // q, scores, o and seven numbers of each row; keys, values and offsets of a unit.
  static constexpr int64_t thread_bytes(const attend_schedule& s) {
    const int64_t of_rows = up(rows(s) * P::WIDTH) + rows(s) * (STRIDE + COLUMNS) + 7 * up(rows(s));
    return (of_rows + KEYS + VALUES) * 4 + STRIDE * 8;
  }
  static constexpr int64_t tile_bytes(int64_t num_tokens) {
    return (num_tokens * (int64_t)sizeof(attend_tile) + 63) / 64 * 64;
  }
  static constexpr int64_t partials(const attend_schedule& s, int64_t num_tokens, int64_t max_positions) {
    if (s.split_units == 0) return 0;
    const int64_t units = (max_positions + P::CHUNK - 1) / P::CHUNK;
    const int64_t wanted = num_tokens * P::HEADS * units, most = s.partial_bytes / PARTIAL_BYTES;
    return wanted < most ? wanted : most;
  }
};

// Bytes of workspace, 64-byte aligned; max_positions = table_stride * BLOCK_SIZE.
template <class P>
constexpr int64_t attend_bytes(const attend_schedule& schedule, int64_t num_tokens, int64_t max_positions,
                               int64_t num_threads) {
  using Z = attend_sizes<P>;
  return Z::tile_bytes(num_tokens) + Z::partials(schedule, num_tokens, max_positions) * Z::PARTIAL_BYTES +
         num_threads * Z::thread_bytes(schedule);
}

template <class P, int REGISTER_ROWS>
struct attend_launch {
  static_assert(REGISTER_ROWS >= 1 && REGISTER_ROWS <= 12, "1 to 12 rows fit in registers");
  using Z = attend_sizes<P>;
  using Args = typename P::args;
  using Cache = typename P::cache;
  const Args* args;
  attend_schedule schedule;
  int64_t num_tokens, num_tiles, num_items;
  attend_tile* tiles;
  float* partials;
  uint8_t* thread_scratch;

  struct scratch {
    float *q, *keys, *values, *scores, *out;
    float *running_m, *running_l, *unit_m, *unit_l, *keep, *gain;
    int* visible;
    int64_t* offset;
  };

  scratch carve(int thread_id) const {
    float* p = (float*)(thread_scratch + thread_id * Z::thread_bytes(schedule));
    const int64_t rows = Z::rows(schedule);
    scratch s;
    auto take = [&](int64_t count) {
      float* start = p;
      p += count;
      return start;
    };
    s.q = take(Z::up(rows * P::WIDTH));
    s.keys = take(Z::KEYS);
    s.values = take(Z::VALUES);
    s.scores = take(rows * Z::STRIDE);
    s.out = take(rows * Z::COLUMNS);
    for (float** row : {&s.running_m, &s.running_l, &s.unit_m, &s.unit_l, &s.keep, &s.gain}) *row = take(Z::up(rows));
    s.visible = (int*)take(Z::up(rows));
    s.offset = (int64_t*)p;
    return s;
  }

  int64_t units_of(int64_t token) const {
    const int64_t position = P::positions(*args)[token];
    return position < 0 ? 0 : position / P::CHUNK + 1;
  }

  // ---- Tiles: built by the calling thread before the parallel part.
  void find_tiles(int64_t max_partials) {
    const int32_t* request = P::request_rows(*args);
    num_tiles = 0;
    int64_t used = 0;
    for (int64_t token = 0; token < num_tokens;) {
      attend_tile tile = {token, 0, 0, 1, 0, 0};
      while (token < num_tokens && tile.count < schedule.tile_tokens && request[token] == request[tile.token]) {
        const int64_t units = units_of(token++);
        tile.num_units = units > tile.num_units ? units : tile.num_units;
        ++tile.count;
      }
      if (schedule.split_units > 0) {
        const int64_t wanted = tile.count * P::HEADS * tile.num_units;
        if (tile.num_units > schedule.split_units && used + wanted <= max_partials) {
          tile.num_ranges = (tile.num_units + schedule.split_units - 1) / schedule.split_units;
          tile.first_partial = used;
          used += wanted;
        }
      }
      tiles[num_tiles++] = tile;
    }
  }

  // Work grows with the position: paired order (first, last, second, last but one, ...) gives equal
  // stretches of items equal work.
  int64_t tile_at(int64_t i) const {
    if (!schedule.paired) return i;
    return i % 2 == 0 ? i / 2 : num_tiles - 1 - i / 2;
  }

  void number_items() {
    num_items = 0;
    for (int64_t i = 0; i < num_tiles; ++i) {
      attend_tile& tile = tiles[tile_at(i)];
      tile.first_item = num_items;
      num_items += tile.num_ranges * P::KV_HEADS;
    }
  }

  int64_t find_item(int64_t item) const {
    int64_t low = 0, high = num_tiles;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (tiles[tile_at(middle)].first_item <= item ? low : high) = middle;
    }
    return low;
  }

  float* partial(const attend_tile& tile, int64_t unit, int64_t kv_head) const {
    const int64_t before = (unit * P::KV_HEADS + kv_head) * tile.count * Z::GROUP;
    return partials + (tile.first_partial + before) * Z::PARTIAL;
  }

  // ---- One unit of one tile.
  int see_positions(const attend_tile& tile, int64_t unit, const scratch& s) const {
    int most = 0;
    for (int64_t t = 0; t < tile.count; ++t) {
      const int64_t left = P::positions(*args)[tile.token + t] + 1 - unit * P::CHUNK;
      const int visible = left < 0 ? 0 : left > P::CHUNK ? P::CHUNK : (int)left;
      most = visible > most ? visible : most;
      for (int g = 0; g < Z::GROUP; ++g) s.visible[t * Z::GROUP + g] = visible;
    }
    return most;
  }

  // Offsets of the unit's entries in the cache; places beyond the last one repeat it, so that nothing that
  // the request does not own is read.
  void find_entries(const attend_tile& tile, int64_t unit, int kv_head, int count, const scratch& s) const {
    const int64_t request = P::request_rows(*args)[tile.token];
    const int32_t* table = P::block_tables(*args) + request * P::table_stride(*args);
    for (int j = 0; j < round_up(count, 16); ++j) {
      const int64_t position = unit * P::CHUNK + (j < count ? j : count - 1);
      const int64_t block = table[position / P::BLOCK_SIZE], entry = position % P::BLOCK_SIZE;
      s.offset[j] = ((block * P::KV_HEADS + kv_head) * P::BLOCK_SIZE + entry) * P::WIDTH;
    }
  }

  template <int V> struct size_constant { static constexpr int value = V; };

  template <int R, class F>
  static TW_INLINE void rest_rows(int count, F& body, int first) {
    if constexpr (R > 0) {
      if (count == R) return body(size_constant<R>{}, first);
      rest_rows<R - 1>(count, body, first);
    }
  }

  // Call body(integral number of rows, first row) for register tiles that cover `count` rows.
  template <class F>
  static TW_INLINE void each_row_tile(int count, F&& body) {
    int first = 0;
    for (; count - first >= REGISTER_ROWS; first += REGISTER_ROWS)
      body(size_constant<REGISTER_ROWS>{}, first);
    rest_rows<REGISTER_ROWS - 1>(count - first, body, first);
  }

  static TW_INLINE int most_visible(const int* visible, int count) {
    int most = 0;
    for (int r = 0; r < count; ++r) most = visible[r] > most ? visible[r] : most;
    return most;
  }

  void weigh(int rows, const scratch& s) const {
    each_row_tile(rows, [&](auto size, int first) {
      constexpr int R = decltype(size)::value;
      const int most = most_visible(s.visible + first, R);
      if (most > 0)
        score_rows<R, P::WIDTH, Z::STRIDE>(s.q + first * P::WIDTH, s.keys, round_up(most, 16), P::scale(*args),
                                           s.scores + first * Z::STRIDE);
    });
    weigh_rows<Z::STRIDE>(s.scores, s.visible, rows, s.unit_m, s.unit_l);
  }

  // The fold of l, and the factors that the fold of o uses.
  static TW_INLINE void fold_sums(int rows, const scratch& s) {
    for (int r = 0; r < rows; ++r) {
      const float a = s.running_m[r], b = s.unit_m[r], top = a > b ? a : b, shift = finite_shift(top);
      const float keep = tw_exp(a - shift), gain = tw_exp(b - shift);
      const bool seen = s.visible[r] > 0;
      s.keep[r] = keep;
      s.gain[r] = gain;
      s.running_m[r] = seen ? top : a;
      s.running_l[r] = seen ? __builtin_fmaf(s.running_l[r], keep, s.unit_l[r] * gain) : s.running_l[r];
    }
  }

  template <class Rows>
  static void add_values(int rows, Rows values, fold_factors fold, const scratch& s, target out) {
    each_row_tile(rows, [&](auto size, int first) {
      constexpr int R = decltype(size)::value;
      if (most_visible(s.visible + first, R) > 0)
        value_rows<R, Z::COLUMNS, Z::STRIDE>(s.scores + first * Z::STRIDE, values, s.visible + first,
                                             {fold.keep + first, fold.gain + first, fold.first},
                                             {out.base + first * out.stride, out.stride});
    });
  }

  void unit(const attend_tile& tile, int64_t unit, int kv_head, bool first, const scratch& s, target out) const {
    const int rows = (int)tile.count * Z::GROUP, count = see_positions(tile, unit, s);
    find_entries(tile, unit, kv_head, count, s);
    const Cache *k = P::k_cache(*args), *v = P::v_cache(*args);
    transpose_keys<Cache, P::WIDTH, Z::STRIDE>(k, schedule.prefetch ? v : nullptr, s.offset, round_up(count, 16), s.keys);
    weigh(rows, s);
    if (!first) fold_sums(rows, s);
    const fold_factors fold = {s.keep, s.gain, first};
    const cache_rows<Cache, P::WIDTH, P::CHUNK, P::BLOCK_SIZE> direct = {
        v, s.offset, (int)(unit * P::CHUNK % P::BLOCK_SIZE)};
    if constexpr (Z::DIRECT) {
      add_values(rows, direct, fold, s, out);
    } else {
      if constexpr (Z::WHOLE_COLUMNS)
        if (rows <= REGISTER_ROWS) return add_values(rows, direct, fold, s, out);
      stage_values<Cache, P::WIDTH, Z::COLUMNS>(v, s.offset, count, s.values);
      add_values(rows, staged_rows<Z::COLUMNS>{s.values}, fold, s, out);
    }
  }

  // ---- Work items.
  void finish(int64_t token, int64_t head, const float* out, float total, float* row) const {
    const bool empty = P::positions(*args)[token] < 0;
    for (int d = 0; d < P::WIDTH; ++d) row[d] = empty ? 0.0f : out[d] / total;
    P::epilogue(*args, token, head, row);
  }

  void load_rows(const attend_tile& tile, int kv_head, const scratch& s) const {
    for (int r = 0; r < tile.count * Z::GROUP; ++r)
      P::load_q(*args, tile.token + r / Z::GROUP, kv_head * Z::GROUP + r % Z::GROUP, s.q + r * P::WIDTH);
  }

  void whole_item(const attend_tile& tile, int kv_head, const scratch& s) const {
    const int rows = (int)tile.count * Z::GROUP;
    for (int64_t u = 0; u < tile.num_units; ++u) {
      unit(tile, u, kv_head, u == 0, s, {s.out, Z::COLUMNS});
      if (u == 0)
        for (int r = 0; r < rows; ++r) s.running_m[r] = s.unit_m[r], s.running_l[r] = s.unit_l[r];
    }
    for (int r = 0; r < rows; ++r)
      finish(tile.token + r / Z::GROUP, kv_head * Z::GROUP + r % Z::GROUP, s.out + r * Z::COLUMNS, s.running_l[r],
             s.values);
  }

  void range_item(const attend_tile& tile, int kv_head, int64_t range, const scratch& s) const {
    const int64_t begin = range * schedule.split_units, end = begin + schedule.split_units;
    for (int64_t u = begin; u < end && u < tile.num_units; ++u) {
      float* out = partial(tile, u, kv_head);
      unit(tile, u, kv_head, true, s, {out, Z::PARTIAL});
      for (int r = 0; r < tile.count * Z::GROUP; ++r) {
        out[r * Z::PARTIAL + Z::COLUMNS] = s.unit_m[r];
        out[r * Z::PARTIAL + Z::COLUMNS + 1] = s.unit_l[r];
      }
    }
  }

  static void items_body(void* arg, int64_t begin, int64_t end, int thread_id) {
    const attend_launch& self = *(const attend_launch*)arg;
    const scratch s = self.carve(thread_id);
    for (int64_t i = self.find_item(begin), item = begin; item < end; ++i) {
      const attend_tile& tile = self.tiles[self.tile_at(i)];
      const int64_t last = tile.first_item + tile.num_ranges * P::KV_HEADS;
      for (; item < end && item < last; ++item) {
        const int64_t local = item - tile.first_item;
        const int kv_head = (int)(local / tile.num_ranges);
        self.load_rows(tile, kv_head, s);
        if (tile.num_ranges == 1)
          self.whole_item(tile, kv_head, s);
        else
          self.range_item(tile, kv_head, local % tile.num_ranges, s);
      }
    }
  }

  static void all_items_body(void* arg, int64_t, int64_t, int thread_id) {
    items_body(arg, 0, ((const attend_launch*)arg)->num_items, thread_id);
  }

  bool is_small() const {
    int64_t units = 0;
    for (int64_t i = 0; i < num_tiles; ++i) units += tiles[i].num_units * P::KV_HEADS;
    return units <= schedule.inline_units;
  }

  // Fold the partials of one row of a split tile.
  void fold_row(const attend_tile& tile, int kv_head, int r, const scratch& s) const {
    const int64_t token = tile.token + r / Z::GROUP;
    float m = 0.0f, l = 1.0f;
    for (int64_t u = 0; u < units_of(token); ++u) {
      const float* part = partial(tile, u, kv_head) + r * Z::PARTIAL;
      const float b = part[Z::COLUMNS], unit_l = part[Z::COLUMNS + 1];
      const float top = m > b ? m : b, shift = finite_shift(top);
      const float keep = tw_exp(m - shift), gain = tw_exp(b - shift);
      for (int d = 0; d < Z::COLUMNS; d += 16)
        store(s.out + d, u == 0 ? load(part + d)
                                : fma(load(s.out + d), set1(keep), mul(load(part + d), set1(gain))));
      l = u == 0 ? unit_l : __builtin_fmaf(l, keep, unit_l * gain);
      m = u == 0 ? b : top;
    }
    finish(token, kv_head * Z::GROUP + r % Z::GROUP, s.out, l, s.values);
  }

  static void fold_body(void* arg, int64_t begin, int64_t end, int thread_id) {
    const attend_launch& self = *(const attend_launch*)arg;
    const scratch s = self.carve(thread_id);
    for (int64_t item = begin; item < end; ++item) {
      const attend_tile& tile = self.tiles[item / P::KV_HEADS];
      if (tile.num_ranges == 1) continue;
      for (int r = 0; r < tile.count * Z::GROUP; ++r) self.fold_row(tile, (int)(item % P::KV_HEADS), r, s);
    }
  }
};

// Run all work items. No tokens: nothing is read or written.
template <class P, int REGISTER_ROWS>
static void attend(const typename P::args& args, int64_t num_tokens, const attend_schedule& schedule,
                   uint8_t* workspace) {
  using Z = attend_sizes<P>;
  using L = attend_launch<P, REGISTER_ROWS>;
  if (num_tokens <= 0) return;
  const int64_t max_partials = Z::partials(schedule, num_tokens, P::table_stride(args) * P::BLOCK_SIZE);
  uint8_t* partials = workspace + Z::tile_bytes(num_tokens);
  L self = {&args, schedule, num_tokens, 0, 0, (attend_tile*)workspace, (float*)partials,
            partials + max_partials * Z::PARTIAL_BYTES};
  self.find_tiles(max_partials);
  self.number_items();
  if (self.is_small())
    tw_parallel(1, L::all_items_body, &self);
  else
    tw_parallel(self.num_items, L::items_body, &self);
  bool any_split = false;
  for (int64_t i = 0; i < self.num_tiles; ++i) any_split |= self.tiles[i].num_ranges > 1;
  if (any_split) tw_parallel(self.num_tiles * P::KV_HEADS, L::fold_body, &self);
}

}  // namespace tw
