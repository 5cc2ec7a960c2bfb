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

#include "tw_arguments.h"

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

// Describes a matrix of `rows` rows of `cols` elements without gaps, read in tiles of
// box_rows x box_cols whose rows are 128 bytes, swizzled so. No rows: nothing is described.
#define TW_TENSOR_MAP(map, data, rows, cols, element_bytes, box_rows, box_cols)                   \
  if (!tw_map_rows(tw_kernel, &map, data, rows, cols, element_bytes, box_rows, box_cols)) return -1

#define TW_LAUNCH(name, grid, parameters, device_id)                                      \
  if (!tw_launch(tw_kernel, &tw_image_##name, grid, parameters, (device_id))) return -1
