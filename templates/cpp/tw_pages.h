// Paged rows of states [pages, entries, width], and the ops that find, store and pool them. A page table is a
// ring: entry e of a request stands in page table[e / entries % pages]. Position -1 marks a padding token.
// Needs tw_math.h before it.
#pragma once
#include "tw_vec.h"

// One request's ring of pages.
struct tw_ring {
  const int32_t* table;
  int64_t pages;
};

static inline int64_t tw_entry_slot(tw_ring ring, int64_t entry, int64_t entries) {
  return (int64_t)ring.table[entry / entries % ring.pages] * entries + entry % entries;
}

// The slots of `count` entries side by side, page by page: a division costs as much as scoring some of them.
static inline void tw_entry_slots(tw_ring ring, int64_t first, int64_t count, int64_t entries, int64_t* slots) {
  for (int64_t i = 0; i < count;) {
    const int64_t slot = tw_entry_slot(ring, first + i, entries), left = entries - (first + i) % entries;
    const int64_t stop = i + left < count ? i + left : count;
    for (int64_t at = i; at < stop; ++at) slots[at] = slot + at - i;
    i = stop;
  }
}

static inline tw_ring tw_ring_of(const int32_t* tables, int64_t pages, int64_t row) {
  return {tables + row * pages, pages};
}

static inline bool tw_completes(int64_t position, int64_t ratio) {
  return position >= 0 && (position + 1) % ratio == 0;
}

// Slot of the entry that a token completes, else -1.
static inline int32_t tw_page_slot(const int32_t* tables, int64_t pages, int32_t row, int32_t position,
                                   int64_t ratio, int64_t entries) {
  if (!tw_completes(position, ratio)) return -1;
  return (int32_t)tw_entry_slot(tw_ring_of(tables, pages, row), position / ratio, entries);
}

static TW_INLINE float tw_widened(float x) { return x; }
static TW_INLINE float tw_widened(uint16_t x) { return tw::f32_from_bf16(x); }

// Softmax of the gates over the rows of a window, per channel, times the values: rows in order of
// position, oldest first, in two passes (maximum, then sums). The older half of an overlapping window reads
// the first W columns, the newer half the others. Tokens that complete no window give 0.
template <int RATIO, bool OVERLAP, int W, class T>
static inline void tw_pool_window(const T* values, const T* gates, int64_t entries, tw_ring ring,
                                  int64_t position, float* y) {
  constexpr int COUNT = OVERLAP ? 2 * RATIO : RATIO, BLOCK = 64;
  constexpr int64_t STRIDE = OVERLAP ? 2 * W : W;
  if (!tw_completes(position, RATIO)) {
    memset(y, 0, W * sizeof(float));
    return;
  }
  int64_t at[COUNT];
  const int first = position + 1 < COUNT ? (int)(COUNT - 1 - position) : 0;  // rows before are absent
  for (int s = first; s < COUNT; ++s) {
    const int64_t column = OVERLAP && s >= RATIO ? W : 0;
    at[s] = tw_entry_slot(ring, position - (COUNT - 1) + s, entries) * STRIDE + column;
  }
  for (int64_t c = 0; c < W; c += BLOCK) {
    const int64_t n = W - c < BLOCK ? W - c : BLOCK;
    alignas(64) float most[BLOCK], total[BLOCK], sum[BLOCK];
    for (int64_t j = 0; j < n; ++j) most[j] = -__builtin_inff(), total[j] = sum[j] = 0.0f;
    for (int s = first; s < COUNT; ++s) {
      const T* gate = gates + at[s] + c;
      for (int64_t j = 0; j < n; ++j) most[j] = tw_max(most[j], tw_widened(gate[j]));
    }
    for (int s = first; s < COUNT; ++s) {
      const T *gate = gates + at[s] + c, *value = values + at[s] + c;
      for (int64_t j = 0; j < n; ++j) {
        const float weight = tw_exp(tw_widened(gate[j]) - most[j]);
        total[j] += weight;
        sum[j] += tw_mul(weight, tw_widened(value[j]));
      }
    }
    for (int64_t j = 0; j < n; ++j) y[c + j] = sum[j] / total[j];
  }
}

// Rows of an n-gram table: SIZES multipliers, SIZES - 1 n-gram sizes, HEADS primes for each of them.
template <int SIZES, int HEADS>
static inline void tw_ngram_rows(const int32_t* history, int64_t entries, tw_ring ring, int64_t position,
                                 const int64_t* multipliers, const int64_t* primes, int64_t pad,
                                 int32_t* rows) {
  uint64_t product[SIZES];  // unsigned: these wrap
  for (int64_t i = 0; i < SIZES; ++i) {
    const int64_t id =
        position >= i ? history[tw_entry_slot(ring, position - i, entries)] : pad;
    product[i] = (uint64_t)id * (uint64_t)multipliers[i];
  }
  uint64_t mixed = product[0];
  int64_t offset = 0;
  for (int gram = 1, i = 0; gram < SIZES; ++gram) {
    mixed ^= product[gram];
    for (int head = 0; head < HEADS; ++head, ++i) {
      const int64_t rest = (int64_t)mixed % primes[i];
      rows[i] = (int32_t)((rest < 0 ? rest + primes[i] : rest) + offset);
      offset += primes[i];
    }
  }
}
