// What a generated host function needs to launch its embedded kernels: argument checks and the
// driver, which is opened when first used, so that building needs no CUDA and loading no GPU.
//
//   TW_CUBIN(rows, "rows.cubin", "rows", 128, 0);    a kernel image: file, entry, threads, bytes
//   TW_KERNEL(scale) {
//     TW_ARGUMENTS(3);
//     TW_INT(num_rows, 2, 0, 4096);
//     TW_TENSOR(y, 0, kDLFloat, 32, 2);
//     TW_EXTENT(y, 0, num_rows);
//     ...
//     const int64_t grid[] = {num_rows, 1, 1};
//     TW_LAUNCH(rows, grid, parameters, y->device.device_id);
//     return 0;
//   }
//
// Launches go to the stream that TVM-FFI holds for the device. An image is loaded once per device,
// at its first launch: run a step once before capturing it.
#pragma once
#include <stdint.h>

#include <tvm/ffi/c_api.h>

#define TW_HIDDEN __attribute__((visibility("hidden")))
#define TW_MAX_DEVICES 64

struct tw_image {
  const char* entry;
  const unsigned char* bytes;
  unsigned threads, shared_bytes;
  void* functions[TW_MAX_DEVICES];  // by device, null before the first launch
};

// A tensor map: what the copy engine needs to know of a matrix whose tiles it brings.
struct alignas(64) tw_tensor_map {
  unsigned char bytes[128];
};

// Raises a ValueError "kernel '<kernel>': <text>" in TVM-FFI and returns -1.
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
TW_HIDDEN bool tw_map_rows(const char* kernel, tw_tensor_map* map, uint64_t data, int64_t rows,
                           int64_t cols, int element_bytes, int box_rows, int box_cols);
TW_HIDDEN bool tw_launch(const char* kernel, tw_image* image, const int64_t* grid,
                         void** parameters, int device_id);

// Embeds a file. The symbol is unique to the source, which holds one kernel of the model.
#define TW_CUBIN(name, file, entry, threads, shared_bytes)                                      \
  asm(".pushsection .rodata\n.balign 64\ntw_bytes_" #name ":\n.incbin \"" file                  \
      "\"\n.popsection\n");                                                                     \
  extern "C" TW_HIDDEN const unsigned char tw_bytes_##name[];                                   \
  static tw_image tw_image_##name = {entry, tw_bytes_##name, threads, shared_bytes, {}}

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

// Declares `const DLTensor* name`: on a GPU, one lane of that type, `ndim` axes, row-major without
// gaps, data not null and aligned to 64 bytes (an empty tensor may be anywhere).
#define TW_TENSOR(name, index, code, bits, ndim)                              \
  const DLTensor* name =                                                      \
      tw_check_tensor(tw_kernel, tw_args, (index), #name, (code), (bits), (ndim)); \
  if (name == nullptr) return -1

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

// Describes a matrix of `rows` rows of `cols` elements without gaps, read in tiles of
// box_rows x box_cols whose rows are 128 bytes, swizzled so. No rows: nothing is described.
#define TW_TENSOR_MAP(map, data, rows, cols, element_bytes, box_rows, box_cols)                   \
  if (!tw_map_rows(tw_kernel, &map, data, rows, cols, element_bytes, box_rows, box_cols)) return -1

#define TW_LAUNCH(name, grid, parameters, device_id)                                      \
  if (!tw_launch(tw_kernel, &tw_image_##name, grid, parameters, (device_id))) return -1
