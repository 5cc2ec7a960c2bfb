// The inner loops of selection: scores of staged entries, and streams that keep the largest of what they are given.
//
// A stream sees scores in ascending order of their entries, in any cuts, and holds at most 4 k + 1024 of them: linear
// time, and memory that does not grow with the row.
#pragma once
#include "tw_latent_tile.h"
#include "tw_select.h"

namespace tw {

constexpr int64_t up16(int64_t count) { return (count + 15) / 16 * 16; }

// ---------------------------------------------------------------- scores
// sum += w * relu(dot) of sixteen heads, `heads` of which exist: 0 * inf in a lane without one is no score.
static TW_INLINE void add_heads(v16 dot, v16 w, int heads, bool first, float* sum) {
  v16 positive = max(zero(), dot);  // a NaN stays
  if (heads < HEAD_LANES) {
    float lanes[HEAD_LANES];
    store(lanes, positive);
    positive = load_n(lanes, heads);
  }
  store(sum, fma(w, positive, first ? zero() : load(sum)));
}

// sums[r] += w * relu(keys[r] . q), for R entries and sixteen heads.
template <int R>
static TW_INLINE void index_tile(const float* keys, int64_t stride, const float* q, int panels, v16 w, int heads,
                                 bool first, float* sums) {
  v16 acc[R];
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (int c = 0; c < panels; ++c, keys += stride, q += 16 * HEAD_LANES) {
    TW_UNROLL(4)
    for (int d = 0; d < 16; ++d) {
      const v16 lanes = load(q + d * HEAD_LANES);
      TW_UNROLL(16)
      for (int r = 0; r < R; ++r) acc[r] = fma(set1(keys[r * 16 + d]), lanes, acc[r]);
    }
  }
  TW_UNROLL(16)
  for (int r = 0; r < R; ++r) add_heads(acc[r], w, heads, first, sums + r * HEAD_LANES);
}

// Scores of `count` entries; places up to the next multiple of R mean nothing.
template <int R, int HEADS, int PANELS>
static TW_SHARED void index_scores(key_panels keys, int count, const float* q, const float* w, float* sums,
                                   float* scores) {
  for (int h = 0; h < HEADS; h += HEAD_LANES) {
    const int heads = HEADS - h < HEAD_LANES ? HEADS - h : HEAD_LANES;
    for (int e = 0; e < count; e += R)
      index_tile<R>(keys.base + e * 16, keys.stride, q + h * PANELS * 16, PANELS, load(w + h), heads, h == 0,
                    sums + e * HEAD_LANES);
  }
  for (int e = 0; e < count; ++e) scores[e] = sum_lanes(load(sums + e * HEAD_LANES));
}

// ---------------------------------------------------------------- streams
constexpr int64_t top_stream_words(int64_t k) { return RADIX_BINS + 2 * (4 * k + 1024); }
constexpr int64_t top_part_words(int64_t k) { return 2 * up16(k) + 16; }
constexpr uint32_t KEY_OF_MINUS_INF = 0x007fffffu, KEY_OF_NAN = 0xffffffffu;

static TW_SHARED uint32_t compact(candidates& c, int64_t k) { return keep_largest(c, k); }

struct top_stream {
  candidates c;
  int64_t k, room;
  uint32_t least;  // what is not above can no longer be among the k largest

  void clear() {
    c.count = 0;
    least = KEY_OF_MINUS_INF;
  }
  TW_INLINE void push(uint32_t key, int32_t index) {
    if (key <= least) return;  // a later tie loses
    c.keys[c.count] = key;
    c.indices[c.count++] = index;
    if (c.count == room) least = compact(c, k);
  }
  void add(const float* scores, int64_t count, int32_t first) {
    each_above(scores, 0, count, [&] { return key_value(least); },
               [&](int64_t i) { push(order_key(scores[i]), first + (int32_t)i); });
  }
  void add_ids(const float* scores, int64_t count, const int32_t* ids) {
    each_above(scores, 0, count, [&] { return key_value(least); },
               [&](int64_t i) { push(order_key(scores[i]), ids[i]); });
  }

  // The k largest in a part of the workspace: count, keys, indices.
  void save(uint32_t* part) {
    if (c.count > k) compact(c, k);
    part[0] = (uint32_t)c.count;
    memcpy(part + 16, c.keys, (size_t)c.count * 4);
    memcpy(part + 16 + up16(k), c.indices, (size_t)c.count * 4);
  }
  void add_saved(const uint32_t* part) {
    const int32_t* indices = (const int32_t*)(part + 16 + up16(k));
    for (uint32_t i = 0; i < part[0]; ++i) push(part[16 + i], indices[i]);
  }
  // Entries of the k largest in ascending order, then -1.
  void finish(int32_t* out) {
    if (c.count > k) compact(c, k);
    int64_t n = 0;
    for (int64_t i = 0; i < c.count; ++i)
      if (c.keys[i] != KEY_OF_NAN) out[n++] = c.indices[i];
    while (n < k) out[n++] = -1;
  }
};

static inline top_stream top_stream_in(uint32_t* p, int64_t k) {
  const int64_t room = 4 * k + 1024;
  uint32_t* keys = p + RADIX_BINS;
  return {{p, keys, (int32_t*)(keys + room), nullptr, nullptr, 0}, k, room, KEY_OF_MINUS_INF};
}

// The maximum of a block, given piece by piece: a NaN anywhere makes it NaN.
struct block_maximum {
  float top;
  bool any, nan;
  void add(const float* x, int64_t n) {
    bool special;
    const float largest = block_max(x, n, &special);
    if (special) nan |= any_nan(x, n);
    top = !any || largest > top ? largest : top;
    any = true;
  }
  float take(bool is_newest) {
    const float found = is_newest ? __builtin_inff() : nan ? __builtin_nanf("") : top;
    *this = {};
    return found;
  }
};

// The numbers >= 0 of a list in ascending order, each once: the list itself, if they lead it so; else a copy.
static inline const int32_t* ascending(const int32_t* list, int64_t given, int32_t* copy, int64_t* count) {
  int64_t n = 0;
  while (n < given && list[n] >= 0 && (n == 0 || list[n] > list[n - 1])) ++n;
  *count = n;
  while (n < given && list[n] < 0) ++n;
  if (n == given) return list;
  int64_t kept = 0;
  for (int64_t i = 0; i < given; ++i)
    if (list[i] >= 0) copy[kept++] = list[i];
  for (int64_t gap = kept / 2; gap > 0; gap /= 2)
    for (int64_t i = gap; i < kept; ++i) {
      const int32_t x = copy[i];
      int64_t j = i;
      for (; j >= gap && copy[j - gap] > x; j -= gap) copy[j] = copy[j - gap];
      copy[j] = x;
    }
  n = 0;
  for (int64_t i = 0; i < kept; ++i)
    if (i == 0 || copy[i] != copy[i - 1]) copy[n++] = copy[i];
  *count = n;
  return copy;
}

}  // namespace tw
