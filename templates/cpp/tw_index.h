// Launch of the selection of entries: score(e) = sum over heads of w * relu(q . key[e]) for the visible entries of a
// token, the K largest of them in ascending order, then -1; for candidates also the BLOCKS blocks of largest maximum.
//
// Order of every sum, which decides the bits and depends on nothing but the token and the entry: a dot product is fma
// along the width from +0 or, where CODES says that both sides are mxfp4, the exact sums of groups of 32 columns added
// in order (tw_index_codes.h); lane i adds w * relu(dot) of heads i, i + 16, .. by fma from +0; then the tree of tw::sum.
// Selection is exact: ties go to the lowest entry; -inf is never selected; a NaN score is above +inf, so that it takes
// one of the K places, but comes out as -1. Entries that the token cannot see are not read.
// A long list may be cut into parts, each keeping its K largest; a second pass joins them in order. No split and no
// vector width can change the result.
//
// A translation unit defines
//   struct Problem    HEADS, WIDTH, RATIO, PER_PAGE, K, BLOCKS (0: no candidates), BLOCK_SIZE, WITHIN, CODES; types args,
//                     rows (tw_packed_rows.h); static functions of const args&: keys, positions, request_rows, tables,
//                     table_stride, candidates, num_candidates, output, and q(args, token, head, d), w(args, token, head)
// and calls tw::select_entries<Problem, REGISTER_ROWS>(args, num_tokens, schedule, workspace).
#pragma once
#include "tw_index_codes.h"

namespace tw {

struct select_schedule {
  int64_t stage_entries;  // entries scored at a time
  int64_t split_entries;  // entries of a part; 0: no token is split
  int64_t partial_bytes;  // most workspace for parts; a token that does not fit is not split
  int64_t ahead;          // rows asked from memory before they are decoded
};

struct select_row {
  int64_t num_entries, num_parts, first_item, first_part;
};

template <class P>
struct select_sizes {
  static constexpr int64_t HEAD_PANELS = (P::HEADS + HEAD_LANES - 1) / HEAD_LANES, PANELS = (P::WIDTH + 15) / 16;
  static constexpr int64_t COLUMNS = PANELS * 16, WIDE = P::K + P::BLOCKS;
  static constexpr int64_t PART = top_part_words(P::K) + (P::BLOCKS ? top_part_words(P::BLOCKS) : 0);

  static constexpr int64_t thread_bytes(const select_schedule& s, int64_t num_candidates) {
    const int64_t queries = HEAD_PANELS * HEAD_LANES * (COLUMNS + 1) + HEAD_LANES * COLUMNS, n = s.stage_entries;
    const int64_t staged = (n + MOST_ROWS + 1) * COLUMNS + (n + MOST_ROWS) * HEAD_LANES + up16(n + MOST_ROWS) + up16(n);
    const int64_t streams = top_stream_words(P::K) + (P::BLOCKS ? top_stream_words(P::BLOCKS) : 0);
    return (queries + staged + streams + up16(num_candidates)) * 4 + (n + 7) / 8 * 64;
  }
  static constexpr int64_t row_bytes(int64_t num_tokens) { return (num_tokens * 32 + 63) / 64 * 64; }
  static constexpr int64_t most_parts(const select_schedule& s) {
    return s.split_entries ? s.partial_bytes / (PART * 4) : 0;
  }
};

// Bytes of workspace, 64-byte aligned.
template <class P>
constexpr int64_t select_bytes(const select_schedule& schedule, int64_t num_tokens, int64_t num_candidates,
                               int64_t num_threads) {
  using Z = select_sizes<P>;
  return Z::row_bytes(num_tokens) + Z::most_parts(schedule) * Z::PART * 4 +
         num_threads * Z::thread_bytes(schedule, num_candidates);
}

template <class P, int REGISTER_ROWS>
struct select_launch {
  using Z = select_sizes<P>;
  using Args = typename P::args;
  using Rows = typename P::rows;
  static constexpr int CODE_ROWS = REGISTER_ROWS < 3 ? REGISTER_ROWS : 3;  // what AVX2 keeps in registers
  const Args* args;
  select_schedule schedule;
  int64_t num_tokens, num_items;
  select_row* rows;
  uint32_t* parts;
  uint8_t* thread_scratch;

  struct scratch {
    float *q, *w, *turned, *sums, *scores;
    key_panels keys;
    top_stream best, blocks;
    int32_t *ids, *listed;
    int64_t* offset;
    int64_t token;
  };

  scratch carve(int thread_id) const {
    const int64_t stage = schedule.stage_entries, listed = P::num_candidates(*args);
    float* p = (float*)(thread_scratch + thread_id * Z::thread_bytes(schedule, listed));
    auto take = [&](int64_t count) {
      float* start = p;
      p += count;
      return start;
    };
    scratch s;
    s.q = take(Z::HEAD_PANELS * HEAD_LANES * Z::COLUMNS);
    s.w = take(Z::HEAD_PANELS * HEAD_LANES);
    s.turned = take(HEAD_LANES * Z::COLUMNS);
    s.keys = {take((stage + MOST_ROWS + 1) * Z::COLUMNS), (stage + MOST_ROWS + 1) * 16};
    s.sums = take((stage + MOST_ROWS) * HEAD_LANES);
    s.scores = take(up16(stage + MOST_ROWS));
    s.ids = (int32_t*)take(up16(stage));
    s.best = top_stream_in((uint32_t*)take(top_stream_words(P::K)), P::K);
    if (P::BLOCKS) s.blocks = top_stream_in((uint32_t*)take(top_stream_words(P::BLOCKS)), P::BLOCKS);
    s.listed = (int32_t*)take(up16(listed));
    s.offset = (int64_t*)p;
    s.token = -1;
    return s;
  }

  int64_t num_visible(int64_t token) const {
    const int64_t position = P::positions(*args)[token];
    return position < 0 ? 0 : (position + 1) / P::RATIO;
  }

  // Entries of a part: whole blocks.
  int64_t part_entries() const {
    return (schedule.split_entries + P::BLOCK_SIZE - 1) / P::BLOCK_SIZE * P::BLOCK_SIZE;
  }

  void find_rows() {
    num_items = 0;
    int64_t used = 0;
    for (int64_t t = 0; t < num_tokens; ++t) {
      const int64_t visible = num_visible(t), listed = P::num_candidates(*args) * P::BLOCK_SIZE;
      select_row row = {P::WITHIN && listed < visible ? listed : visible, 1, num_items, used};
      if (schedule.split_entries > 0) {
        const int64_t wanted = (row.num_entries + part_entries() - 1) / part_entries();
        if (wanted > 1 && used + wanted <= Z::most_parts(schedule)) row.num_parts = wanted, used += wanted;
      }
      num_items += row.num_parts;
      rows[t] = row;
    }
  }

  int64_t find_token(int64_t item) const {
    int64_t low = 0, high = num_tokens;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (rows[middle].first_item <= item ? low : high) = middle;
    }
    return low;
  }

  TW_NOINLINE void load_token(int64_t token, scratch& s) const {
    if (s.token == token) return;
    s.token = token;
    for (int64_t p = 0; p < Z::HEAD_PANELS; ++p) {
      memset(s.turned, 0, HEAD_LANES * Z::COLUMNS * 4);
      for (int h = 0; h < HEAD_LANES; ++h) {
        const int64_t head = p * HEAD_LANES + h;
        s.w[head] = head < P::HEADS ? P::w(*args, token, head) : 0.0f;
        if (head < P::HEADS)
          for (int64_t d = 0; d < P::WIDTH; ++d) s.turned[h * Z::COLUMNS + d] = P::q(*args, token, head, d);
      }
      if constexpr (P::CODES) {
        turn_queries<Z::COLUMNS>(s.turned, query_codes_in<Z::COLUMNS>(s.q + p * HEAD_LANES * Z::COLUMNS));
        continue;
      }
      for (int half = 0; half < HEAD_LANES; half += 8) {
        const float* from[8];
        for (int h = 0; h < 8; ++h) from[h] = s.turned + (half + h) * Z::COLUMNS;
        float* to = s.q + p * HEAD_LANES * Z::COLUMNS + half;
        for (int d = 0; d < Z::COLUMNS; d += 8) transpose8(from, d, to + d * HEAD_LANES, HEAD_LANES);
      }
    }
  }

  tw_ring pages(int64_t token) const {
    return tw_ring_of(P::tables(*args), P::table_stride(*args), P::request_rows(*args)[token]);
  }

  TW_NOINLINE void score(int64_t count, const scratch& s) const {
    const typename Rows::cell* state = P::keys(*args);
    uint8_t* codes = (uint8_t*)s.keys.base;
    float* scales = s.keys.base + (schedule.stage_entries + MOST_ROWS) * Z::COLUMNS / 4;
    for (int64_t e = 0; e < count; ++e) {
      if (schedule.ahead > 0 && e + schedule.ahead < count) {
        const uint8_t* row = (const uint8_t*)(state + s.offset[e + schedule.ahead] * Rows::ROW);
        for (int at = 0; at < Rows::BYTES; at += 64) prefetch(row + at);
      }
      const typename Rows::cell* row = state + s.offset[e] * Rows::ROW;
      if constexpr (P::CODES)
        take_key<Z::COLUMNS>(row, codes + e * Z::COLUMNS, scales + e * (Z::COLUMNS / CODE_GROUP));
      else
        Rows::decode(row, s.keys.base + e * 16, s.keys.stride);
    }
    if constexpr (P::CODES)
      return code_scores<CODE_ROWS, P::HEADS, Z::COLUMNS>(codes, scales, (int)count, s.q, s.w, s.sums, s.scores);
    else
      index_scores<REGISTER_ROWS, P::HEADS, (int)Z::PANELS>(s.keys, (int)count, s.q, s.w, s.sums, s.scores);
  }

  // ---- Parts.
  void entries_part(int64_t token, int64_t begin, int64_t end, scratch& s) const {
    const tw_ring ring = pages(token);
    const int64_t newest = (num_visible(token) - 1) / P::BLOCK_SIZE;
    block_maximum block = {};
    for (int64_t first = begin; first < end; first += schedule.stage_entries) {
      const int64_t left = end - first, count = left < schedule.stage_entries ? left : schedule.stage_entries;
      tw_entry_slots(ring, first, count, P::PER_PAGE, s.offset);
      score(count, s);
      s.best.add(s.scores, count, (int32_t)first);
      for (int64_t e = 0; P::BLOCKS > 0 && e < count;) {
        const int64_t index = (first + e) / P::BLOCK_SIZE, stop = (index + 1) * P::BLOCK_SIZE - first;
        const int64_t most = stop < count ? stop : count;
        block.add(s.scores + e, most - e);
        if (stop <= count || first + count == end) {
          const float top = block.take(index == newest);
          s.blocks.add(&top, 1, (int32_t)index);
        }
        e = most;
      }
    }
  }

  // Candidate blocks in ascending order, each once: as they were given, if that is how they came.
  const int32_t* sorted_candidates(int64_t token, int64_t* count, const scratch& s) const {
    const int64_t given = P::num_candidates(*args);
    const int32_t* list = P::candidates(*args) + token * given;
    return ascending(list, given, s.listed, count);
  }

  void blocks_part(int64_t token, int64_t begin, int64_t end, scratch& s) const {
    const tw_ring ring = pages(token);
    const int64_t visible = num_visible(token);
    int64_t listed, count = 0;
    const int32_t* list = sorted_candidates(token, &listed, s);
    auto flush = [&] {
      score(count, s);
      s.best.add_ids(s.scores, count, s.ids);
      count = 0;
    };
    for (int64_t i = begin / P::BLOCK_SIZE; i * P::BLOCK_SIZE < end && i < listed; ++i) {
      const int64_t first = (int64_t)list[i] * P::BLOCK_SIZE;
      for (int64_t e = first; e < first + P::BLOCK_SIZE && e < visible;) {
        const int64_t room = schedule.stage_entries - count, stop = first + P::BLOCK_SIZE;
        const int64_t last = stop < visible ? stop : visible, take = last - e < room ? last - e : room;
        tw_entry_slots(ring, e, take, P::PER_PAGE, s.offset + count);
        for (int64_t i = 0; i < take; ++i) s.ids[count++] = (int32_t)e++;
        if (count == schedule.stage_entries) flush();
      }
    }
    if (count > 0) flush();
  }

  void write_row(int64_t token, scratch& s) const {
    int32_t* out = P::output(*args) + token * Z::WIDE;
    s.best.finish(out);
    if (P::BLOCKS) s.blocks.finish(out + P::K);
  }

  uint32_t* part(int64_t index) const { return parts + index * Z::PART; }

  void item(int64_t token, int64_t index, scratch& s) const {
    const select_row& row = rows[token];
    const int64_t size = row.num_parts > 1 ? part_entries() : row.num_entries, begin = index * size;
    const int64_t end = begin + size < row.num_entries ? begin + size : row.num_entries;
    s.best.clear();
    if (P::BLOCKS) s.blocks.clear();
    if (end > begin) load_token(token, s);
    // Some listed blocks may lie at the end of the list: the last part takes all that are left.
    if (P::WITHIN)
      blocks_part(token, begin, index + 1 == row.num_parts ? P::num_candidates(*args) * P::BLOCK_SIZE : end, s);
    else
      entries_part(token, begin, end, s);
    if (row.num_parts == 1) return write_row(token, s);
    uint32_t* to = part(row.first_part + index);
    s.best.save(to);
    if (P::BLOCKS) s.blocks.save(to + top_part_words(P::K));
  }

  static void items_body(void* arg, int64_t begin, int64_t end, int thread_id) {
    const select_launch& self = *(const select_launch*)arg;
    scratch s = self.carve(thread_id);
    for (int64_t t = self.find_token(begin), at = begin; at < end; ++t)
      for (; at < end && at < self.rows[t].first_item + self.rows[t].num_parts; ++at)
        self.item(t, at - self.rows[t].first_item, s);
  }

  static void join_body(void* arg, int64_t begin, int64_t end, int thread_id) {
    const select_launch& self = *(const select_launch*)arg;
    scratch s = self.carve(thread_id);
    for (int64_t t = begin; t < end; ++t) {
      const select_row& row = self.rows[t];
      if (row.num_parts == 1) continue;
      s.best.clear();
      if (P::BLOCKS) s.blocks.clear();
      for (int64_t i = 0; i < row.num_parts; ++i) {
        const uint32_t* from = self.part(row.first_part + i);
        s.best.add_saved(from);
        if (P::BLOCKS) s.blocks.add_saved(from + top_part_words(P::K));
      }
      self.write_row(t, s);
    }
  }
};

// Run all work items. No tokens: nothing is read or written.
template <class P, int REGISTER_ROWS>
static void select_entries(const typename P::args& args, int64_t num_tokens, const select_schedule& schedule,
                           uint8_t* workspace) {
  using Z = select_sizes<P>;
  using L = select_launch<P, REGISTER_ROWS>;
  if (num_tokens <= 0) return;
  uint8_t* parts = workspace + Z::row_bytes(num_tokens);
  L self = {&args, schedule, num_tokens, 0, (select_row*)workspace, (uint32_t*)parts,
            parts + Z::most_parts(schedule) * Z::PART * 4};
  self.find_rows();
  tw_parallel(self.num_items, L::items_body, &self);
  if (self.num_items > num_tokens) tw_parallel(num_tokens, L::join_body, &self);
}

}  // namespace tw
