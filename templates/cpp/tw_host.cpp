// The fixed host part of every CPU artifact: thread pool and launch loop.
//
// A step is one call of tw_run: patch the extents, then call the kernels in order. While it
// runs, its pool is bound to the calling thread, so that engines in one process do not meet.
#include "tw_host.h"

#include <stdio.h>
#include <string.h>

#include "tw_pool.h"

#define TW_EXPORT extern "C" __attribute__((visibility("default")))

extern const int tw_device_type = kDLCPU;

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
