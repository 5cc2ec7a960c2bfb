// The arguments of a kernel: its entry point and the checks of what it is given. For every device.
//
// A check that fails raises a TVM-FFI ValueError of one sentence and returns from the kernel.
#pragma once
#include <stdint.h>

#include <tvm/ffi/c_api.h>

#define TW_HIDDEN __attribute__((visibility("hidden")))

// Where this artifact's tensors lie: each device's host part defines it.
TW_HIDDEN extern const int tw_device_type;

// Raises a ValueError of this text in TVM-FFI and returns -1.
TW_HIDDEN int tw_raise(const char* text);

// Raises a ValueError "kernel '<kernel>': <text>" in TVM-FFI and returns -1: `return tw_fail(...)`.
TW_HIDDEN int tw_fail(const char* kernel, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

TW_HIDDEN bool tw_check_count(const char* kernel, int32_t got, int32_t want);
TW_HIDDEN const DLTensor* tw_check_tensor(const char* kernel, const TVMFFIAny* args, int index,
                                          const char* name, int code, int bits, int ndim);
TW_HIDDEN bool tw_check_extent(const char* kernel, const DLTensor* tensor, const char* name,
                               int axis, int64_t want);
TW_HIDDEN bool tw_check_least(const char* kernel, const DLTensor* tensor, const char* name,
                              int64_t want);
TW_HIDDEN bool tw_check_device(const char* kernel, const DLTensor* tensor, const char* name,
                               const DLTensor* other);
TW_HIDDEN bool tw_check_int(const char* kernel, const TVMFFIAny* args, int index, const char* name,
                            int64_t lower, int64_t upper, int64_t* value);

// Opens the definition of a kernel that TVM-FFI finds by the name `symbol`.
#define TW_KERNEL(symbol)                                                                   \
  static int symbol##_call(const char*, const TVMFFIAny*, int32_t);                         \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##symbol(void*, const TVMFFIAny* args,        \
                                                       int32_t num_args, TVMFFIAny*) {      \
    return symbol##_call(#symbol, args, num_args);                                          \
  }                                                                                         \
  static int symbol##_call([[maybe_unused]] const char* tw_kernel,                          \
                           [[maybe_unused]] const TVMFFIAny* tw_args,                       \
                           [[maybe_unused]] int32_t tw_num_args)

// Exactly `count` arguments were given. Must come first: the other checks index the arguments.
#define TW_ARGUMENTS(count) \
  if (!tw_check_count(tw_kernel, tw_num_args, (count))) return -1

// Declares `const DLTensor* name`: on the artifact's device, one lane of that type, `ndim` axes,
// row-major without gaps, data not null and aligned to 64 bytes (an empty tensor may be anywhere).
#define TW_TENSOR(name, index, code, bits, ndim)                                                   \
  const DLTensor* name =                                                                           \
      tw_check_tensor(tw_kernel, tw_args, (index), #name, (code), (bits), (ndim));                 \
  if (name == nullptr) return -1

// The tensor has `want` entries along `axis`.
#define TW_EXTENT(name, axis, want) \
  if (!tw_check_extent(tw_kernel, name, #name, (axis), (want))) return -1

// The tensor, of one axis, has `want` or more entries.
#define TW_AT_LEAST(name, want) \
  if (!tw_check_least(tw_kernel, name, #name, (want))) return -1

#define TW_SAME_DEVICE(name, other) \
  if (!tw_check_device(tw_kernel, name, #name, other)) return -1

// Declares `int64_t name` with lower <= name <= upper.
#define TW_INT(name, index, lower, upper)                                                          \
  int64_t name = 0;                                                                                \
  if (!tw_check_int(tw_kernel, tw_args, (index), #name, (lower), (upper), &name)) return -1
