// For the host side of a kernel: launches a printed kernel on the model with its tensors.
#pragma once
#include <stdint.h>

#include "tw_keywords.h"

namespace tw {
struct Tensor {
  const char* name;
  uintptr_t base;
  uint64_t bytes;
  bool writable;
  int unit = 2;  // bytes that the shadow tells apart: 1 where rows have odd numbers of them
};
template <class F>
inline int launch(const char* kernel, int kind, int blocks, F program, const Tensor* tensors,
                  int count, char* message, int64_t size);
}  // namespace tw

extern "C" TW_HIDDEN int tw_model_launch(const char* kernel, int kind, int blocks,
                                         void (*program)(void*), void* argument,
                                         const tw::Tensor* tensors, int count, char* message,
                                         int64_t size);

template <class F>
inline int tw::launch(const char* kernel, int kind, int blocks, F program, const Tensor* tensors,
                      int count, char* message, int64_t size) {
  return tw_model_launch(kernel, kind, blocks, [](void* f) TW_HOST_CODE { (*(F*)f)(); }, &program, tensors,
                         count, message, size);
}
