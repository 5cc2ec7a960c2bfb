// Launch of latent attention: one row per entry is key and value of all heads; the newest WINDOW positions of a
// request, oldest first, and then entries of a second state, under one softmax with a sink per head.
//
// A token has two lists, each cut into units of CHUNK from its own start: the window, then the entries (all visible
// ones, or the chosen ones that are not -1). A unit ends with (m, l, o) = (maximum, sum of weights, weighted values);
// units are folded in order, starting with the first: m = max(m1, m2), x = x1 * exp(m1 - m) + x2 * exp(m2 - m) for l
// and o. Last comes the sink s: with M = max(m, s), the result is o * exp(m - M) / (l * exp(m - M) + exp(s - M)).
// A token with a negative position (padding) sees nothing and gives zeros.
//
// A work item is (tile of tokens, group of panels of heads, range of units). If a tile has several ranges, every unit
// leaves its (m, l, o) in the workspace and a second pass folds them, in the same order. Tiles of several tokens
// decode the rows of their windows once.
//
// A translation unit defines
//   struct Problem    HEADS, WIDTH, WINDOW, CHUNK, WINDOW_PER_PAGE, ENTRIES (none, all or selected), PER_PAGE, RATIO;
//                     types args, window_rows and entry_rows (tw_packed_rows.h); static functions of const args&:
//                     scale, sink (of a head), positions, request_rows, window_tables, window_stride, window_state, tables,
//                     table_stride, state, selected, num_selected, and load_q(args, token, head, float* q),
//                     epilogue(args, token, head, const float* out)
// and calls tw::latent<Problem, REGISTER_ROWS>(args, num_tokens, schedule, workspace). Neither REGISTER_ROWS nor a
// field of the schedule can change a result bit.
#pragma once
#include "tw_latent_sizes.h"

namespace tw {

template <class P, int REGISTER_ROWS>
struct latent_launch {
  static_assert(REGISTER_ROWS >= 1 && REGISTER_ROWS <= MOST_ROWS, "1 to 12 rows fit in registers");
  using Z = latent_sizes<P>;
  using Args = typename P::args;
  const Args* args;
  latent_schedule schedule;
  int64_t num_tokens, num_tiles, num_items;
  latent_tile* tiles;
  float* partials;
  uint8_t* thread_scratch;

  // Of each panel of heads: q, scores, o, and six numbers per head.
  struct head_scratch {
    float *q, *scores, *out, *m, *l, *unit_m, *unit_l, *keep, *gain;
  };
  struct scratch {
    float* heads;
    key_panels keys, shared;
    float* rows;
    int64_t* offset;
  };

  scratch carve(int thread_id) const {
    float* p = (float*)(thread_scratch + thread_id * Z::thread_bytes(schedule));
    scratch s;
    auto take = [&](int64_t count) {
      float* start = p;
      p += count;
      return start;
    };
    s.heads = take(schedule.head_panels * HEAD_FLOATS);
    s.keys = {take(Z::panel_floats(P::CHUNK) * Z::PANELS), Z::panel_floats(P::CHUNK)};
    const int64_t shared = Z::shared_rows(schedule);
    s.shared = {shared ? take(Z::panel_floats(shared) * Z::PANELS) : nullptr, Z::panel_floats(shared)};
    s.rows = take(Z::OUT);
    s.offset = (int64_t*)p;
    return s;
  }

  static constexpr int64_t SCORES = (P::CHUNK + MOST_ROWS) * HEAD_LANES;
  static constexpr int64_t HEAD_FLOATS = Z::OUT * 2 + SCORES + 6 * HEAD_LANES;

  static head_scratch of_panel(const scratch& s, int64_t index) {
    float* p = s.heads + index * HEAD_FLOATS;
    float* numbers = p + Z::OUT * 2 + SCORES;
    return {p, p + Z::OUT, p + Z::OUT + SCORES, numbers, numbers + 16, numbers + 32, numbers + 48, numbers + 64,
            numbers + 80};
  }

  // ---- What a token sees.
  int64_t position(int64_t token) const { return P::positions(*args)[token]; }

  int64_t window_count(int64_t token) const {
    const int64_t seen = position(token) + 1;
    return seen < P::WINDOW ? seen : P::WINDOW;
  }

  int64_t num_chosen(int64_t token) const {
    if (position(token) < 0 || P::ENTRIES == entries::none) return 0;
    if (P::ENTRIES == entries::all) return (position(token) + 1) / P::RATIO;
    const int32_t* chosen = P::selected(*args) + token * P::num_selected(*args);
    int64_t count = 0;
    for (int64_t i = 0; i < P::num_selected(*args); ++i) count += chosen[i] >= 0;
    return count;
  }

  tw_ring window_pages(int64_t token) const {
    return tw_ring_of(P::window_tables(*args), P::window_stride(*args), P::request_rows(*args)[token]);
  }
  tw_ring entry_pages(int64_t token) const {
    return tw_ring_of(P::tables(*args), P::table_stride(*args), P::request_rows(*args)[token]);
  }

  // ---- Decoding of rows.
  template <class Rows>
  TW_NOINLINE void decode(const typename Rows::cell* state, const int64_t* offset, int64_t count, key_panels keys) const {
    const int64_t ahead = schedule.ahead;
    for (int64_t e = 0; e < count; ++e) {
      if (ahead > 0 && e + ahead < count) {
        const uint8_t* row = (const uint8_t*)(state + offset[e + ahead] * Rows::ROW);
        for (int at = 0; at < Rows::BYTES; at += 64) prefetch(row + at);
      }
      Rows::decode(state + offset[e] * Rows::ROW, keys.base + e * 16, keys.stride);
    }
  }

  void decode_window(int64_t token, int64_t first, int64_t count, int64_t* offset, key_panels keys) const {
    const tw_ring pages = window_pages(token);
    tw_entry_slots(pages, first, count, P::WINDOW_PER_PAGE, offset);
    decode<typename P::window_rows>(P::window_state(*args), offset, count, keys);
  }

  // The chosen entries of a list from the one numbered `cursor` on, which is moved past them.
  int64_t find_chosen(int64_t token, int64_t unit, int64_t* cursor, int64_t* offset) const {
    const tw_ring pages = entry_pages(token);
    int64_t count = 0;
    if (P::ENTRIES == entries::all) {
      const int64_t first = unit * P::CHUNK, left = num_chosen(token) - first;
      count = left < 0 ? 0 : left < P::CHUNK ? left : P::CHUNK;
      tw_entry_slots(pages, first, count, P::PER_PAGE, offset);
    } else if (P::ENTRIES == entries::selected) {
      const int32_t* chosen = P::selected(*args) + token * P::num_selected(*args);
      for (; *cursor < P::num_selected(*args) && count < P::CHUNK; ++*cursor)
        if (chosen[*cursor] >= 0) offset[count++] = tw_entry_slot(pages, chosen[*cursor], P::PER_PAGE);
    }
    return count;
  }

  int64_t skip_chosen(int64_t token, int64_t present) const {
    if (P::ENTRIES != entries::selected || present == 0) return 0;
    const int32_t* chosen = P::selected(*args) + token * P::num_selected(*args);
    int64_t cursor = 0;
    for (; cursor < P::num_selected(*args) && present > 0; ++cursor) present -= chosen[cursor] >= 0;
    return cursor;
  }

  // ---- Tiles: built by the calling thread before the parallel part.
  bool joins(const latent_tile& tile, int64_t token) const {
    const int32_t* request = P::request_rows(*args);
    return tile.count < schedule.tile_tokens && request[token] == request[tile.token] && position(tile.token) >= 0 &&
           position(token) == position(tile.token) + tile.count;
  }

  void find_tiles(int64_t max_partials) {
    num_tiles = num_items = 0;
    int64_t used = 0;
    const int64_t groups = head_groups();
    for (int64_t token = 0; token < num_tokens;) {
      latent_tile tile = {token, 1, 0, 1, num_items, 0};
      while (++token < num_tokens && joins(tile, token)) ++tile.count;
      if (tile.count == 1 && position(tile.token) >= 0 && (schedule.split_units > 0 || num_tokens == 1)) {
        tile.num_units = Z::units(window_count(tile.token)) + Z::units(num_chosen(tile.token));
        const int64_t wanted = Z::HEAD_PANELS * tile.num_units;
        if (schedule.split_units > 0 && tile.num_units > schedule.split_units && used + wanted <= max_partials) {
          tile.num_ranges = (tile.num_units + schedule.split_units - 1) / schedule.split_units;
          tile.first_partial = used;
          used += wanted;
        }
      }
      num_items += tile.num_ranges * groups;
      tiles[num_tiles++] = tile;
    }
  }

  int64_t head_groups() const { return (Z::HEAD_PANELS + schedule.head_panels - 1) / schedule.head_panels; }

  int64_t find_item(int64_t item) const {
    int64_t low = 0, high = num_tiles;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (tiles[middle].first_item <= item ? low : high) = middle;
    }
    return low;
  }

  float* partial(const latent_tile& tile, int64_t unit, int64_t panel) const {
    return partials + (tile.first_partial + unit * Z::HEAD_PANELS + panel) * Z::PARTIAL;
  }

  // ---- Work items.
  static int heads_of(int64_t panel) {
    const int64_t left = P::HEADS - panel * HEAD_LANES;
    return left < HEAD_LANES ? (int)left : HEAD_LANES;
  }

  // q of a panel of heads with heads in the lanes; lanes and columns beyond the last ones are 0.
  TW_NOINLINE void load_queries(int64_t token, int64_t panel, float* rows, float* q) const {
    const int heads = heads_of(panel);
    memset(rows, 0, Z::OUT * 4);
    for (int h = 0; h < heads; ++h) P::load_q(*args, token, panel * HEAD_LANES + h, rows + h * Z::COLUMNS);
    for (int half = 0; half < HEAD_LANES; half += 8) {
      const float* from[8];
      for (int h = 0; h < 8; ++h) from[h] = rows + (half + h) * Z::COLUMNS;
      for (int d = 0; d < Z::COLUMNS; d += 8) transpose8(from, d, q + d * HEAD_LANES + half, HEAD_LANES);
    }
  }

  TW_NOINLINE void unit(key_panels keys, int64_t count, int64_t panel, const head_scratch& h, bool first, float* out) const {
    score_heads<REGISTER_ROWS, Z::PANELS>(keys, (int)count, h.q, (int)schedule.width_panels, P::scale(*args), h.scores);
    weigh_heads(h.scores, (int)count, h.unit_m, h.unit_l);
    if (!first) fold_heads(h.m, h.l, h.unit_m, h.unit_l, h.keep, h.gain);
    value_heads<REGISTER_ROWS, Z::PANELS>(h.scores, keys, (int)count, heads_of(panel), h.keep, h.gain, first, out);
  }

  TW_NOINLINE void finish(int64_t token, int64_t panel, const float* out, const float* m, const float* l, float* row) const {
    const bool empty = position(token) < 0;
    for (int h = 0; h < heads_of(panel); ++h) {
      const int64_t head = panel * HEAD_LANES + h;
      const float sink = P::sink(*args, head), top = m[h] > sink ? m[h] : sink, shift = finite_shift(top);
      const float keep = tw_exp(m[h] - shift), total = __builtin_fmaf(l[h], keep, tw_exp(sink - shift));
      const float* values = out + h * Z::COLUMNS;
      for (int d = 0; d < P::WIDTH; ++d) row[d] = empty ? 0.0f : values[d] * keep / total;
      P::epilogue(*args, token, head, row);
    }
  }

  // Units [begin, end) of a token for panels [p0, p1); `shared`: its window rows, decoded, or null.
  void token_units(const latent_tile& tile, int64_t token, int64_t p0, int64_t p1, int64_t begin, int64_t end,
                   key_panels shared, const scratch& s) const {
    const int64_t in_window = window_count(token), window_units = Z::units(in_window);
    const int64_t lowest = position(token) + 1 - in_window;
    int64_t cursor = skip_chosen(token, begin > window_units ? (begin - window_units) * P::CHUNK : 0);
    for (int64_t u = begin; u < end; ++u) {
      key_panels keys = s.keys;
      int64_t count;
      if (u < window_units) {
        const int64_t left = in_window - u * P::CHUNK;
        count = left < P::CHUNK ? left : P::CHUNK;
        if (shared.base)
          keys = {shared.base + u * P::CHUNK * 16, shared.stride};
        else
          decode_window(token, lowest + u * P::CHUNK, count, s.offset, keys);
      } else {
        count = find_chosen(token, u - window_units, &cursor, s.offset);
        if (count == 0) return;
        decode<typename P::entry_rows>(P::state(*args), s.offset, count, keys);
      }
      for (int64_t p = p0; p < p1; ++p) {
        const head_scratch h = of_panel(s, p - p0);
        if (tile.num_ranges == 1) {
          unit(keys, count, p, h, u == 0, h.out);
          if (u == 0) memcpy(h.m, h.unit_m, 2 * HEAD_LANES * 4);
        } else {
          float* out = partial(tile, u, p);
          unit(keys, count, p, h, true, out);
          memcpy(out + Z::OUT, h.unit_m, 2 * HEAD_LANES * 4);
        }
      }
    }
  }

  void item(const latent_tile& tile, int64_t group, int64_t range, const scratch& s) const {
    const int64_t p0 = group * schedule.head_panels, wanted = p0 + schedule.head_panels;
    const int64_t p1 = wanted < Z::HEAD_PANELS ? wanted : Z::HEAD_PANELS;
    const bool split = tile.num_ranges > 1, shares = tile.count > 1 && Z::shared_rows(schedule) > 0;
    const int64_t lowest = position(tile.token) + 1 - window_count(tile.token);
    if (shares) {
      const int64_t rows = position(tile.token) + tile.count - lowest;
      decode_window(tile.token, lowest, rows, s.offset, s.shared);
    }
    for (int64_t token = tile.token; token < tile.token + tile.count; ++token) {
      for (int64_t p = p0; p < p1; ++p) load_queries(token, p, s.rows, of_panel(s, p - p0).q);
      key_panels shared = {nullptr, 0};
      if (shares)
        shared = {s.shared.base + (position(token) + 1 - window_count(token) - lowest) * 16, s.shared.stride};
      const int64_t begin = split ? range * schedule.split_units : 0, last = begin + schedule.split_units;
      const int64_t end = !split ? INT64_MAX : last < tile.num_units ? last : tile.num_units;
      if (position(token) >= 0) token_units(tile, token, p0, p1, begin, end, shared, s);
      if (split) continue;
      for (int64_t p = p0; p < p1; ++p) {
        const head_scratch h = of_panel(s, p - p0);
        finish(token, p, h.out, h.m, h.l, s.rows);
      }
    }
  }

  static void items_body(void* arg, int64_t begin, int64_t end, int thread_id) {
    const latent_launch& self = *(const latent_launch*)arg;
    const scratch s = self.carve(thread_id);
    for (int64_t i = self.find_item(begin), at = begin; at < end; ++i) {
      const latent_tile& tile = self.tiles[i];
      const int64_t last = tile.first_item + tile.num_ranges * self.head_groups();
      for (; at < end && at < last; ++at) {
        const int64_t local = at - tile.first_item;
        self.item(tile, local / tile.num_ranges, local % tile.num_ranges, s);
      }
    }
  }

  static void all_items_body(void* arg, int64_t, int64_t, int thread_id) {
    items_body(arg, 0, ((const latent_launch*)arg)->num_items, thread_id);
  }

  bool is_small() const {
    return num_tiles == 1 && tiles[0].count == 1 && tiles[0].num_units * Z::HEAD_PANELS <= schedule.inline_units;
  }

  // Fold the partials of one panel of heads of a split tile.
  void fold_panel(const latent_tile& tile, int64_t panel, const scratch& s) const {
    const head_scratch h = of_panel(s, 0);
    for (int64_t u = 0; u < tile.num_units; ++u) {
      const float *part = partial(tile, u, panel), *unit_m = part + Z::OUT, *unit_l = unit_m + HEAD_LANES;
      if (u == 0)
        memcpy(h.m, unit_m, 2 * HEAD_LANES * 4);
      else
        fold_heads(h.m, h.l, unit_m, unit_l, h.keep, h.gain);
      for (int r = 0; r < heads_of(panel); ++r)
        for (int d = r * Z::COLUMNS; d < (r + 1) * Z::COLUMNS; d += 16)
          store(h.out + d, u == 0 ? load(part + d)
                                  : fma(load(h.out + d), set1(h.keep[r]), mul(load(part + d), set1(h.gain[r]))));
    }
    finish(tile.token, panel, h.out, h.m, h.l, s.rows);
  }

  static void fold_body(void* arg, int64_t begin, int64_t end, int thread_id) {
    const latent_launch& self = *(const latent_launch*)arg;
    const scratch s = self.carve(thread_id);
    for (int64_t i = begin; i < end; ++i) {
      const latent_tile& tile = self.tiles[i / Z::HEAD_PANELS];
      if (tile.num_ranges > 1) self.fold_panel(tile, i % Z::HEAD_PANELS, s);
    }
  }
};

// Run all work items. No tokens: nothing is read or written.
template <class P, int REGISTER_ROWS>
static void latent(const typename P::args& args, int64_t num_tokens, const latent_schedule& schedule,
                   uint8_t* workspace) {
  using Z = latent_sizes<P>;
  using L = latent_launch<P, REGISTER_ROWS>;
  if (num_tokens <= 0) return;
  const int64_t most = P::ENTRIES == entries::none       ? 0
                       : P::ENTRIES == entries::selected ? P::num_selected(args)
                                                         : P::table_stride(args) * P::PER_PAGE;
  const int64_t max_partials = Z::partials(schedule, num_tokens, most);
  uint8_t* partials = workspace + Z::tile_bytes(num_tokens);
  L self = {&args, schedule, num_tokens, 0, 0, (latent_tile*)workspace, (float*)partials,
            partials + max_partials * Z::PARTIAL_BYTES};
  self.find_tiles(max_partials);
  if (self.is_small())
    tw_parallel(1, L::all_items_body, &self);
  else
    tw_parallel(self.num_items, L::items_body, &self);
  bool any_split = false;
  for (int64_t i = 0; i < self.num_tiles; ++i) any_split |= self.tiles[i].num_ranges > 1;
  if (any_split) tw_parallel(self.num_tiles * Z::HEAD_PANELS, L::fold_body, &self);
}

}  // namespace tw
