// The fixed host part of every CUDA artifact: the driver, launches.
#include "tw_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <tvm/ffi/extra/c_env_api.h>

extern const int tw_device_type = kDLCUDA;

namespace {

// Names and numbers of the driver API, as its documentation gives them.
typedef int Result;
constexpr int ATTRIBUTE_MAX_DYNAMIC_SHARED = 8;
constexpr int64_t MAX_GRID[] = {(int64_t(1) << 31) - 1, 65535, 65535};
constexpr unsigned FREE_SHARED_BYTES = 48 << 10;  // more must be asked for

// How a kernel is launched, and the one attribute that we give.
struct alignas(8) Attribute {
  int name;
  char padding[4];
  union {
    int value;
    char bytes[64];
  };
};
struct Launch {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
};
// The kernel may begin while the one before it in the stream ends: it waits on its own.
constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct Driver {
  void* library;
  char error[160];
  Result (*init)(unsigned);
  Result (*get_device)(int*, int);
  Result (*retain_context)(void**, int);
  Result (*get_current)(void**);
  Result (*push_current)(void*);
  Result (*pop_current)(void**);
  Result (*load_module)(void**, const void*);
  Result (*get_function)(void**, void*, const char*);
  Result (*set_attribute)(void*, int, int);
  Result (*launch)(const Launch*, void*, void**, void**);
  Result (*encode_tiled)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*,
                         const unsigned*, const unsigned*, int, int, int, int);
  Result (*error_string)(Result, const char**);
};

Driver driver;
pthread_once_t driver_once = PTHREAD_ONCE_INIT;
pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;

template <class Function>
void find(Function* function, const char* name) {
  *function = reinterpret_cast<Function>(dlsym(driver.library, name));
  if (*function == nullptr && driver.error[0] == 0) {
    snprintf(driver.error, sizeof driver.error,
             "the CUDA driver is too old: it has no %s; install a driver of CUDA 12 or later", name);
  }
}

void open_driver() {
  driver.library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver.library == nullptr) {
    snprintf(driver.error, sizeof driver.error,
             "no CUDA driver: libcuda.so.1 cannot be opened on this machine");
    return;
  }
  find(&driver.init, "cuInit");
  find(&driver.get_device, "cuDeviceGet");
  find(&driver.retain_context, "cuDevicePrimaryCtxRetain");
  find(&driver.get_current, "cuCtxGetCurrent");
  find(&driver.push_current, "cuCtxPushCurrent_v2");
  find(&driver.pop_current, "cuCtxPopCurrent_v2");
  find(&driver.load_module, "cuModuleLoadData");
  find(&driver.get_function, "cuModuleGetFunction");
  find(&driver.set_attribute, "cuFuncSetAttribute");
  find(&driver.launch, "cuLaunchKernelEx");
  find(&driver.encode_tiled, "cuTensorMapEncodeTiled");
  find(&driver.error_string, "cuGetErrorString");
  if (driver.error[0] == 0 && driver.init(0) != 0) {
    snprintf(driver.error, sizeof driver.error, "no CUDA device: the driver cannot be initialised");
  }
}

bool fails(const char* kernel, const char* what, Result result) {
  if (result == 0) return false;
  const char* text = nullptr;
  driver.error_string(result, &text);
  tw_fail(kernel, "%s: CUDA error %d: %s", what, result, text == nullptr ? "unknown" : text);
  return true;
}

// Loads the image in the device's primary context, the one that torch uses.
bool load(const char* kernel, tw_image* image, int device_id) {
  int device = 0;
  void *context = nullptr, *module = nullptr, *function = nullptr;
  if (fails(kernel, "device", driver.get_device(&device, device_id))) return false;
  if (fails(kernel, "context", driver.retain_context(&context, device))) return false;
  if (fails(kernel, "context", driver.push_current(context))) return false;
  bool ok = !fails(kernel, "loading its image", driver.load_module(&module, image->bytes)) &&
            !fails(kernel, image->entry, driver.get_function(&function, module, image->entry));
  if (ok && image->shared_bytes > FREE_SHARED_BYTES) {
    ok = !fails(kernel, "shared memory",
                driver.set_attribute(function, ATTRIBUTE_MAX_DYNAMIC_SHARED, image->shared_bytes));
  }
  driver.pop_current(&context);
  if (ok) __atomic_store_n(&image->functions[device_id], function, __ATOMIC_RELEASE);
  return ok;
}

bool opened(const char* kernel) {
  pthread_once(&driver_once, open_driver);
  if (driver.error[0] != 0) tw_fail(kernel, "%s", driver.error);
  return driver.error[0] == 0;
}

bool prepare(const char* kernel, tw_image* image, int device_id) {
  if (!opened(kernel)) return false;
  if (device_id < 0 || device_id >= TW_MAX_DEVICES) {
    tw_fail(kernel, "device: got %d, want 0 to %d", device_id, TW_MAX_DEVICES - 1);
    return false;
  }
  pthread_mutex_lock(&load_lock);
  bool ok = image->functions[device_id] != nullptr || load(kernel, image, device_id);
  pthread_mutex_unlock(&load_lock);
  return ok;
}

}  // namespace

bool tw_map_rows(const char* kernel, tw_tensor_map* map, uint64_t data, int64_t rows, int64_t cols,
                 int element_bytes, int box_rows, int box_cols) {
  if (rows <= 0) return true;
  if (!opened(kernel)) return false;
  // In the driver's numbers: bytes or bf16; no interleave, swizzle of 128 bytes, zeros outside.
  const int type = element_bytes == 1 ? 0 : 9, interleave = 0, swizzle = 3, promotion = 2, fill = 0;
  const uint64_t extents[] = {uint64_t(cols), uint64_t(rows)};
  const uint64_t strides[] = {uint64_t(cols * element_bytes)};
  const unsigned box[] = {unsigned(box_cols), unsigned(box_rows)}, steps[] = {1, 1};
  return !fails(kernel, "tensor map",
                driver.encode_tiled(map->bytes, type, 2, reinterpret_cast<void*>(data), extents,
                                    strides, box, steps, interleave, swizzle, promotion, fill));
}

bool tw_launch(const char* kernel, tw_image* image, const int64_t* grid, void** parameters,
               int device_id) {
  if (grid[0] <= 0 || grid[1] <= 0 || grid[2] <= 0) return true;
  for (int axis = 0; axis < 3; ++axis) {
    if (grid[axis] <= MAX_GRID[axis]) continue;
    tw_fail(kernel, "grid axis %d: got %lld blocks, want at most %lld", axis,
            (long long)grid[axis], (long long)MAX_GRID[axis]);
    return false;
  }
  bool known = device_id >= 0 && device_id < TW_MAX_DEVICES;
  void* function =
      known ? __atomic_load_n(&image->functions[device_id], __ATOMIC_ACQUIRE) : nullptr;
  if (function == nullptr) {
    if (!prepare(kernel, image, device_id)) return false;
    function = image->functions[device_id];
  }
  void* stream = TVMFFIEnvGetStream(kDLCUDA, device_id);
  Attribute attribute = {PROGRAMMATIC_STREAM_SERIALIZATION, {}, {1}};
  Launch launch = {{unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])},
                   {image->threads, 1, 1},
                   image->shared_bytes,
                   stream,
                   &attribute,
                   1};
  return !fails(kernel, "launch", driver.launch(&launch, function, parameters, nullptr));
}
