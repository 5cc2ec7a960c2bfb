// The host side of an AscendC kernel. On the functional model (TW_MODEL) an exported TVM-FFI function
// checks its arguments and launches. In a build for the chip a C function launches on a stream: its
// tensors are addresses in device memory. That form has never been compiled or run by its authors.
#pragma once
#ifdef TW_MODEL
#include "tw_host.h"
#include "tw_launch_kernel.h"

static inline int64_t tw_bytes(const DLTensor* t) {
  int64_t count = (t->dtype.bits * t->dtype.lanes + 7) / 8;
  for (int32_t i = 0; i < t->ndim; ++i) count *= t->shape[i];
  return count;
}

static inline tw::Tensor tw_gm(const char* name, const DLTensor* t, bool writable, int unit) {
  return {name, (uintptr_t)t->data, (uint64_t)tw_bytes(t), writable, unit};
}

// Runs one kernel on all tensors of the entry; raises what the model found and returns from it.
#define TW_RUN(kernel, kind, blocks, call)                                                    \
  {                                                                                           \
    char text[4096];                                                                          \
    int used = snprintf(text, sizeof text, "kernel '%s': ", #kernel);                          \
    int failed = tw::launch(#kernel, kind, blocks, [&]() TW_HOST_CODE { call; }, tensors,       \
                            (int)(sizeof tensors / sizeof tensors[0]), text + used,           \
                            (int64_t)sizeof text - used);                                     \
    if (failed) return tw_raise(text);                                                        \
  }
#else
#include <stdint.h>

#include "acl/acl.h"

struct TwAddress {
  void* data;
};
#define TW_CHIP_KERNEL(name)                                                                    \
  extern "C" __attribute__((visibility("default"))) int32_t tw_chip_##name(                     \
      void* const* tensors, const int64_t* extents, aclrtStream stream)
#endif
