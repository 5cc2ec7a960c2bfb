// Hyper-connections: N residual streams of one token, [N, W], and its mix of N (2 + N) numbers. The order of
// every sum is that of the ops' references. Needs tw_math.h before it.
#pragma once
#include "tw_vec.h"

template <int N>
static inline void tw_hyper_columns(float (*comb)[N], float eps) {
  for (int k = 0; k < N; ++k) {
    float sum = comb[0][k];
    for (int j = 1; j < N; ++j) sum += comb[j][k];
    sum += eps;
    for (int j = 0; j < N; ++j) comb[j][k] /= sum;
  }
}

template <int N>
static inline void tw_hyper_rows(float (*comb)[N], float eps) {
  float sums[N];
  for (int j = 0; j < N; ++j) sums[j] = comb[j][0];
  for (int k = 1; k < N; ++k)
    for (int j = 0; j < N; ++j) sums[j] += comb[j][k];
  for (int j = 0; j < N; ++j)
    for (int k = 0; k < N; ++k) comb[j][k] /= sums[j] + eps;
}

// mix: pre [N], post [N], comb [N, N]; the last is a softmax of each row, then Sinkhorn's iterations.
template <int N, int ITERATIONS>
static inline void tw_hyper_mix(const float* m, const float* scale, const float* base, float eps,
                                float* mix) {
  for (int i = 0; i < N; ++i) mix[i] = tw_sigmoid(tw_mul(m[i], scale[0]) + base[i]) + eps;
  for (int i = N; i < 2 * N; ++i) mix[i] = 2.0f * tw_sigmoid(tw_mul(m[i], scale[1]) + base[i]);
  float comb[N][N];
  for (int j = 0; j < N; ++j) {
    for (int k = 0; k < N; ++k) {
      const int i = 2 * N + j * N + k;
      comb[j][k] = tw_mul(m[i], scale[2]) + base[i];
    }
    float most = comb[j][0], sum = 0.0f;
    for (int k = 1; k < N; ++k) most = tw_max(most, comb[j][k]);
    for (int k = 0; k < N; ++k) comb[j][k] = tw_exp(comb[j][k] - most);
    for (int k = 0; k < N; ++k) sum += comb[j][k];
    for (int k = 0; k < N; ++k) comb[j][k] = comb[j][k] / sum + eps;
  }
  tw_hyper_columns<N>(comb, eps);
  for (int i = 1; i < ITERATIONS; ++i) {
    tw_hyper_rows<N>(comb, eps);
    tw_hyper_columns<N>(comb, eps);
  }
  memcpy(mix + 2 * N, comb, sizeof comb);
}

// y = sum_i pre[i] x[i], in ascending order.
template <int N, int W>
static inline void tw_hyper_collapse(const float* x, const float* pre, float* y) {
  for (int64_t j = 0; j < W; ++j) {
    float total = tw_mul(pre[0], x[j]);
    for (int i = 1; i < N; ++i) total += tw_mul(pre[i], x[i * W + j]);
    y[j] = total;
  }
}

// next[k] = post[k] y + sum_j comb[j, k] x[j], in ascending order.
template <int N, int W>
static inline void tw_hyper_update(const float* x, const float* y, const float* mix, float* next) {
  const float *post = mix + N, *comb = mix + 2 * N;
  for (int k = 0; k < N; ++k) {
    for (int64_t l = 0; l < W; ++l) {
      float total = tw_mul(post[k], y[l]);
      for (int j = 0; j < N; ++j) total += tw_mul(comb[j * N + k], x[j * W + l]);
      next[k * W + l] = total;
    }
  }
}
