// Small ops on whole rows.
#pragma once
#include "tw_vec.h"

// Slots [S, W] added in ascending order.
template <int S, int W>
static inline void tw_sum_slots(const float* x, float* y) {
  for (int64_t j = 0; j < W; ++j) {
    float total = x[j];
    for (int s = 1; s < S; ++s) total += x[s * W + j];
    y[j] = total;
  }
}

template <class T>
static inline void tw_copy(const T* x, int64_t n, T* y) {
  memcpy(y, x, (size_t)n * sizeof(T));
}

template <class T>
static inline void tw_repeat(const T* x, int64_t n, int times, T* y) {
  for (int i = 0; i < times; ++i) memcpy(y + i * n, x, (size_t)n * sizeof(T));
}

static inline float tw_absent(float) { return __builtin_nanf(""); }
static inline int32_t tw_absent(int32_t) { return 0; }

// y[s] = x[ids[s]] of n entries.
template <class T>
static inline void tw_gather(const T* x, int64_t n, const int32_t* ids, int64_t count, T* y) {
  for (int64_t s = 0; s < count; ++s) y[s] = ids[s] >= 0 && ids[s] < n ? x[ids[s]] : tw_absent(T());
}

// x mod divisor, never negative.
static inline void tw_modulo(const int32_t* x, int64_t n, int32_t divisor, int32_t* y) {
  for (int64_t j = 0; j < n; ++j) {
    const int32_t rest = x[j] % divisor;
    y[j] = rest < 0 ? rest + divisor : rest;
  }
}
