// The largest entries of a row: their positions, ties to the lowest. Results are exact, so no split of the
// row and no vector width can change them.
//
//   tw_argmax_row(x, n)                       position of the largest entry; 0 for a row with a NaN
//   tw_argmax_range, tw_argmax_join           the same over parts of a row, joined in order
//   tw_top_k_row(x, n, k, indices, values, scratch)   k <= n entries, largest first; NaN is largest of all
//   tw_top_k_join(values, indices, n, k, ...)         the same over the top-k lists of parts, side by side in order
//   tw_top_k_bytes(k)                         bytes of scratch, 8-byte aligned
#pragma once
#include "tw_vec.h"

#define TW_SELECT static __attribute__((noinline, unused))

// ---------------------------------------------------------------- argmax
struct tw_best {
  float value;
  int64_t index;
  bool has_nan;
};

namespace tw {

constexpr int64_t SELECT_BLOCK = 1024;

static inline bool any_nan(const float* x, int64_t n) {
  int found = 0;
  for (int64_t i = 0; i < n; ++i) found |= x[i] != x[i];
  return found != 0;
}

// Largest of n entries, NaN left out; *special: there may be a NaN, because 0 * x is not 0.
static inline float block_max(const float* x, int64_t n, bool* special) {
  v16 top[4], check = zero();
  for (int i = 0; i < 4; ++i) top[i] = set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    TW_UNROLL(4)
    for (int c = 0; c < 4; ++c) {
      const v16 v = load(x + i + 16 * c);
      top[c] = max(v, top[c]);
      check = fma(v, zero(), check);
    }
  }
  float largest = max_lane(max(max(top[0], top[1]), max(top[2], top[3]))), rest = 0.0f;
  for (; i < n; ++i) {
    largest = x[i] > largest ? x[i] : largest;
    rest += 0.0f * x[i];
  }
  *special = !(sum(check) + rest == 0.0f);
  return largest;
}

}  // namespace tw

// Best of x[begin .. end); the row's positions are kept.
TW_SELECT tw_best tw_argmax_range(const float* x, int64_t begin, int64_t end) {
  tw_best best = {-__builtin_inff(), begin, false};
  int64_t block = begin;
  for (int64_t i = begin; i < end; i += tw::SELECT_BLOCK) {
    const int64_t count = end - i < tw::SELECT_BLOCK ? end - i : tw::SELECT_BLOCK;
    bool special;
    const float largest = tw::block_max(x + i, count, &special);
    if (special) best.has_nan |= tw::any_nan(x + i, count);
    if (largest > best.value) best.value = largest, block = i;
  }
  best.index = block;
  while (best.index < end && x[best.index] != best.value) ++best.index;
  return best;
}

// `first` is of positions before those of `second`.
static inline tw_best tw_argmax_join(tw_best first, tw_best second) {
  tw_best best = second.value > first.value ? second : first;
  best.has_nan = first.has_nan || second.has_nan;
  return best;
}

static inline int32_t tw_argmax_index(tw_best best) { return best.has_nan ? 0 : (int32_t)best.index; }

static inline int32_t tw_argmax_row(const float* x, int64_t n) {
  return tw_argmax_index(tw_argmax_range(x, 0, n));
}

// ---------------------------------------------------------------- top-k
namespace tw {

constexpr int64_t SMALL_K = 32;      // up to here a sorted list is kept by insertion
constexpr int RADIX_BINS = 1 << 11;  // 32 bits are sorted in three digits

// Unsigned order of keys = order of entries: the two zeros are equal, every NaN is above +inf.
static inline uint32_t order_key(float x) {
  const uint32_t bits = bits_from_f32(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  if (bits == 0x80000000u) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static inline float key_value(uint32_t key) {
  return f32_from_bits(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Bit i: x[i] is not <= bound, i < 16. True for NaN.
static inline uint32_t mask_above(const float* x, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_set1_ps(bound), _CMP_NLE_UQ);
#elif defined(__AVX2__)
  const __m256 b = _mm256_set1_ps(bound);
  const __m256 low = _mm256_cmp_ps(_mm256_loadu_ps(x), b, _CMP_NLE_UQ);
  const __m256 high = _mm256_cmp_ps(_mm256_loadu_ps(x + 8), b, _CMP_NLE_UQ);
  return (uint32_t)_mm256_movemask_ps(low) | (uint32_t)_mm256_movemask_ps(high) << 8;
#else
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (uint32_t)!(x[i] <= bound) << i;
  return mask;
#endif
}

// Call body(i) in order for every i in [begin, n) whose entry may exceed bound(), which body can raise.
template <class Bound, class Body>
static TW_INLINE void each_above(const float* x, int64_t begin, int64_t n, Bound bound, Body body) {
  int64_t i = begin;
  for (; i + 16 <= n; i += 16)
    for (uint32_t mask = mask_above(x + i, bound()); mask != 0; mask &= mask - 1)
      body(i + __builtin_ctz(mask));
  for (; i < n; ++i)
    if (!(x[i] <= bound())) body(i);
}

static inline void top_k_small(const float* x, int64_t n, int64_t k, int32_t* indices) {
  uint32_t keys[SMALL_K];
  int64_t count = 0;
  auto insert = [&](int64_t i) {
    const uint32_t key = order_key(x[i]);
    if (count == k && key <= keys[k - 1]) return;
    int64_t j = count < k ? count++ : k - 1;
    for (; j > 0 && keys[j - 1] < key; --j) keys[j] = keys[j - 1], indices[j] = indices[j - 1];
    keys[j] = key;
    indices[j] = (int32_t)i;
  };
  for (int64_t i = 0; i < k; ++i) insert(i);
  each_above(x, k, n, [&] { return key_value(keys[k - 1]); }, insert);
}

// Candidates in order of position.
struct candidates {
  uint32_t* bins;
  uint32_t* keys;
  int32_t* indices;
  uint32_t* sorted_keys;
  int32_t* sorted_indices;
  int64_t count;
};

// Digit `level` of a key, the highest first: 11, 11 and 10 bits.
static inline uint32_t digit(uint32_t key, int level) {
  return level == 0 ? key >> 21 : level == 1 ? key >> 10 & 0x7ffu : key & 0x3ffu;
}
static inline uint32_t prefix(uint32_t key, int level) {
  return level == 0 ? 0 : level == 1 ? key >> 21 : key >> 10;
}

// The k-th largest key, found digit by digit; *greater: how many keys exceed it.
static inline uint32_t kth_key(const candidates& c, int64_t k, int64_t* greater) {
  uint32_t key = 0;
  int64_t above = 0;
  for (int level = 0; level < 3; ++level) {
    memset(c.bins, 0, RADIX_BINS * sizeof(uint32_t));
    const uint32_t head = prefix(key, level);
    for (int64_t i = 0; i < c.count; ++i)
      c.bins[digit(c.keys[i], level)] += prefix(c.keys[i], level) == head;
    uint32_t bin = level == 2 ? 0x3ffu : RADIX_BINS - 1;
    for (; above + c.bins[bin] < k; --bin) above += c.bins[bin];
    key |= bin << (level == 0 ? 21 : level == 1 ? 10 : 0);
  }
  *greater = above;
  return key;
}

// Keep the k largest, still in order of position; return the smallest of them.
static inline uint32_t keep_largest(candidates& c, int64_t k) {
  int64_t greater, kept = 0;
  const uint32_t least = kth_key(c, k, &greater);
  int64_t ties = k - greater;
  for (int64_t i = 0; i < c.count; ++i) {
    const uint32_t key = c.keys[i];
    const bool tie = key == least && ties > 0;
    ties -= tie;
    c.keys[kept] = key;
    c.indices[kept] = c.indices[i];
    kept += key > least || tie;
  }
  c.count = kept;
  return least;
}

// Stable sort, largest first, by the digits from the lowest up.
static inline void sort_largest_first(candidates& c) {
  for (int level = 2; level >= 0; --level) {
    memset(c.bins, 0, RADIX_BINS * sizeof(uint32_t));
    for (int64_t i = 0; i < c.count; ++i) ++c.bins[digit(~c.keys[i], level)];
    uint32_t start = 0;
    for (int bin = 0; bin < RADIX_BINS; ++bin) {
      const uint32_t size = c.bins[bin];
      c.bins[bin] = start;
      start += size;
    }
    for (int64_t i = 0; i < c.count; ++i) {
      const uint32_t to = c.bins[digit(~c.keys[i], level)]++;
      c.sorted_keys[to] = c.keys[i];
      c.sorted_indices[to] = c.indices[i];
    }
    memcpy(c.keys, c.sorted_keys, (size_t)c.count * 4);
    memcpy(c.indices, c.sorted_indices, (size_t)c.count * 4);
  }
}

static inline int64_t top_k_room(int64_t k) { return 4 * k + 1024; }

static inline void top_k_large(const float* x, int64_t n, int64_t k, int32_t* indices, void* scratch) {
  const int64_t room = top_k_room(k);
  uint32_t* p = (uint32_t*)scratch;
  uint32_t* keys = p + RADIX_BINS;
  candidates c = {p, keys, (int32_t*)(keys + room), keys + 2 * room, (int32_t*)(keys + 2 * room + k), 0};
  const int64_t first = n < room ? n : room;
  for (int64_t i = 0; i < first; ++i) c.keys[i] = order_key(x[i]), c.indices[i] = (int32_t)i;
  c.count = first;
  uint32_t least = n > room ? keep_largest(c, k) : 0;
  each_above(x, first, n, [&] { return key_value(least); }, [&](int64_t i) {
    const uint32_t key = order_key(x[i]);
    if (key <= least) return;  // a later tie loses
    c.keys[c.count] = key;
    c.indices[c.count++] = (int32_t)i;
    if (c.count == room) least = keep_largest(c, k);
  });
  if (c.count > k) keep_largest(c, k);
  sort_largest_first(c);
  memcpy(indices, c.indices, (size_t)k * 4);
}

}  // namespace tw

static inline int64_t tw_top_k_bytes(int64_t k) {
  return k <= tw::SMALL_K ? 0 : (tw::RADIX_BINS + 2 * tw::top_k_room(k) + 2 * k) * 4;
}

TW_SELECT void tw_top_k_row(const float* x, int64_t n, int64_t k, int32_t* indices, float* values,
                            void* scratch) {
  if (k <= tw::SMALL_K)
    tw::top_k_small(x, n, k, indices);
  else
    tw::top_k_large(x, n, k, indices, scratch);
  if (values)
    for (int64_t i = 0; i < k; ++i) values[i] = x[indices[i]];
}

// Top k of the lists of several parts of a row: n values with their positions in the row, list after list in
// order of the parts, each as tw_top_k_row left it (a list may hold fewer than k).
TW_SELECT void tw_top_k_join(const float* list_values, const int32_t* list_indices, int64_t n, int64_t k,
                             int32_t* indices, float* values, void* scratch) {
  tw_top_k_row(list_values, n, k, indices, values, scratch);
  for (int64_t i = 0; i < k; ++i) indices[i] = list_indices[indices[i]];
}
