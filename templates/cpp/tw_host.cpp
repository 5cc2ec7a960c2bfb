// The fixed host part of every CPU artifact: thread pool, launch loop and argument checks.
//
// A step is one call of tw_run: patch the extents, then call the kernels in order. While it
// runs, its pool is bound to the calling thread, so that engines in one process do not meet.
#include "tw_host.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tw_pool.h"

#define TW_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

void run_inline(int64_t num_items, tw_body body, void* arg) {
  FloatModeScope scope;
  body(arg, 0, num_items, current.thread_id);
}

// Moves the error that a kernel raised in this thread into `text`.
void take_error(char* text, int64_t num_bytes) {
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == nullptr) {
    snprintf(text, num_bytes, "failed without a message");
    return;
  }
  const TVMFFIErrorCell* cell =
      reinterpret_cast<const TVMFFIErrorCell*>(static_cast<char*>(error) + sizeof(TVMFFIObject));
  snprintf(text, num_bytes, "%.*s", int(cell->message.size), cell->message.data);
  TVMFFIObjectDecRef(error);
}

}  // namespace

void tw_parallel(int64_t num_items, tw_body body, void* arg) {
  if (num_items <= 0) return;
  Pool* pool = current.pool;
  if (pool == nullptr || pool->num_threads == 1 || num_items == 1) {
    run_inline(num_items, body, arg);
    return;
  }
  open_gate(pool, num_items, body, arg);
  current.pool = nullptr;
  work(pool, 0);
  current.pool = pool;
  close_gate(pool);
}

int tw_num_threads(void) { return current.num_threads; }

int tw_fail(const char* kernel, const char* format, ...) {
  char text[320];
  int used = snprintf(text, 128, "kernel '%s': ", kernel);
  va_list values;
  va_start(values, format);
  vsnprintf(text + (used < 127 ? used : 127), 192, format, values);
  va_end(values);
  // By hand: TVMFFIErrorSetRaisedFromCStr also walks the stack, which takes seconds under torch.
  TVMFFIByteArray kind = {"ValueError", 10}, message = {text, strlen(text)}, backtrace = {"", 0};
  TVMFFIObjectHandle error = nullptr;
  if (TVMFFIErrorCreate(&kind, &message, &backtrace, &error) != 0) return -1;
  TVMFFIErrorSetRaised(error);
  TVMFFIObjectDecRef(error);
  return -1;
}

struct tw_launch {
  TVMFFISafeCallType call;
  const TVMFFIAny* args;
  int64_t num_args;
};

struct tw_patch {
  int64_t* target;
  int64_t value_id;
};

TW_EXPORT void* tw_pool_create(int32_t num_threads) { return create_pool(num_threads); }

TW_EXPORT void tw_pool_destroy(void* pool) { destroy_pool(static_cast<Pool*>(pool)); }

// Runs one step: writes values[patch.value_id] to every patch target, then calls the launches in
// order. Returns -1 when all is done, the index of the launch that failed, or -2 if the pool is
// of another process; then `error` holds the reason. `seconds`, if not null, receives the time
// of each launch.
TW_EXPORT int64_t tw_run(void* handle, const tw_launch* launches, int64_t num_launches,
                         const tw_patch* patches, int64_t num_patches, const int64_t* values,
                         double* seconds, char* error, int64_t error_bytes) {
  Pool* pool = static_cast<Pool*>(handle);
  if (pool->owner != getpid()) {  // before the lock: a fork may have copied it locked
    snprintf(error, error_bytes, "made by process %d and used in its fork %d", int(pool->owner),
             int(getpid()));
    return -2;
  }
  pthread_mutex_lock(&pool->run_lock);
  FloatModeScope scope;
  Thread before = current;
  current = {pool, 0, pool->num_threads};
  for (int64_t i = 0; i < num_patches; ++i) *patches[i].target = values[patches[i].value_id];
  int64_t failed = -1;
  for (int64_t i = 0; i < num_launches && failed < 0; ++i) {
    int64_t start = seconds ? now_ns() : 0;
    TVMFFIAny result = {};
    if (launches[i].call(nullptr, launches[i].args, int32_t(launches[i].num_args), &result) != 0) {
      failed = i;
      take_error(error, error_bytes);
    }
    if (seconds) seconds[i] = 1e-9 * double(now_ns() - start);
  }
  current = before;
  pthread_mutex_unlock(&pool->run_lock);
  return failed;
}

namespace {

struct Flaw {
  const char* what;  // null: none
  char got[32], want[32];
};

void name_type(char* text, int code, int bits, int lanes) {
  const char* prefix = code == kDLInt      ? "i"
                       : code == kDLUInt   ? "u"
                       : code == kDLFloat  ? "f"
                       : code == kDLBfloat ? "bf"
                                           : "other";
  snprintf(text, 32, lanes == 1 ? "%s%d" : "%s%dx%d", prefix, bits, lanes);
}

bool differs(Flaw* flaw, const char* what, int64_t got, int64_t want) {
  if (got == want) return false;
  flaw->what = what;
  snprintf(flaw->got, 32, "%lld", (long long)got);
  snprintf(flaw->want, 32, "%lld", (long long)want);
  return true;
}

void find_flaw(const DLTensor* t, int code, int bits, int ndim, Flaw* flaw) {
  if (t->dtype.code != code || t->dtype.bits != bits || t->dtype.lanes != 1) {
    flaw->what = "element type";
    name_type(flaw->got, t->dtype.code, t->dtype.bits, t->dtype.lanes);
    name_type(flaw->want, code, bits, 1);
    return;
  }
  if (differs(flaw, "number of axes", t->ndim, ndim)) return;
  if (differs(flaw, "device type", t->device.device_type, kDLCPU)) return;
  int64_t count = 1;
  for (int axis = ndim - 1; axis >= 0; --axis) {
    bool strided = t->strides != nullptr && t->shape[axis] > 1;
    if (strided && differs(flaw, "stride", t->strides[axis], count)) return;
    count *= t->shape[axis];
  }
  if (count == 0) return;
  if (differs(flaw, "byte offset", int64_t(t->byte_offset), 0)) return;
  if (differs(flaw, "data address modulo 64", int64_t(uintptr_t(t->data) % 64), 0)) return;
  differs(flaw, "data is not null", t->data != nullptr, 1);
}

}  // namespace

bool tw_check_count(const char* kernel, int32_t got, int32_t want) {
  if (got != want) tw_fail(kernel, "number of arguments: got %d, want %d", got, want);
  return got == want;
}

const DLTensor* tw_check_tensor(const char* kernel, const TVMFFIAny* args, int index,
                                const char* name, int code, int bits, int ndim) {
  const TVMFFIAny& arg = args[index];
  const DLTensor* tensor = nullptr;
  if (arg.type_index == kTVMFFIDLTensorPtr) tensor = static_cast<const DLTensor*>(arg.v_ptr);
  if (arg.type_index == kTVMFFITensor) {  // an object: its DLTensor follows the header
    tensor = reinterpret_cast<const DLTensor*>(reinterpret_cast<char*>(arg.v_obj) +
                                               sizeof(TVMFFIObject));
  }
  if (tensor == nullptr) {
    tw_fail(kernel, "argument %d '%s': got type index %d, want a tensor", index, name,
            arg.type_index);
    return nullptr;
  }
  Flaw flaw = {};
  find_flaw(tensor, code, bits, ndim, &flaw);
  if (flaw.what == nullptr) return tensor;
  tw_fail(kernel, "argument %d '%s': %s: got %s, want %s", index, name, flaw.what, flaw.got,
          flaw.want);
  return nullptr;
}

bool tw_check_extent(const char* kernel, const DLTensor* tensor, const char* name, int axis,
                     int64_t want) {
  int64_t got = axis < tensor->ndim ? tensor->shape[axis] : -1;
  if (got == want) return true;
  tw_fail(kernel, "tensor '%s': extent of axis %d: got %lld, want %lld", name, axis, (long long)got,
          (long long)want);
  return false;
}

bool tw_check_int(const char* kernel, const TVMFFIAny* args, int index, const char* name,
                  int64_t lower, int64_t upper, int64_t* value) {
  const TVMFFIAny& arg = args[index];
  if (arg.type_index != kTVMFFIInt) {
    tw_fail(kernel, "argument %d '%s': got type index %d, want an int", index, name,
            arg.type_index);
    return false;
  }
  *value = arg.v_int64;
  if (*value >= lower && *value <= upper) return true;
  tw_fail(kernel, "argument %d '%s': got %lld, want %lld to %lld", index, name, (long long)*value,
          (long long)lower, (long long)upper);
  return false;
}
