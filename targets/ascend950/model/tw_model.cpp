// The model's own object: everything behind the calls. Compiled once per library, without the
// instrumentation that kernels are compiled with.
#define TW_SIDE model_side
#include "tw_launch.h"
#include "tw_control.h"

namespace tw {
__thread Block* current_block = nullptr;
}

using tw::current_block;

static __attribute__((noinline)) void access_to(void* p, int bytes, bool write) {
  if (tw::Block* block = current_block) block->raw_access((uintptr_t)p, bytes, write);
}
template <class Marks, uint32_t kBytes, bool kWrite>
static inline void access_as(void* p) {
  tw::LaneAccess* lane = tw::seated();
  if (!lane || !lane->known<Marks, kBytes, kWrite>((uintptr_t)p)) access_to(p, kBytes, kWrite);
}

extern "C" {
int tw_block_id(void) { return current_block->id; }
int tw_num_blocks(void) { return current_block->launch->num_blocks; }
int tw_core_id(void) { return current_block->running; }
uint32_t tw_thread(int axis) { return current_block->vector->thread[axis]; }
uint32_t tw_threads(int axis) { return current_block->vector->extent[axis]; }
void tw_issue(const tw::Request* request) { current_block->issue(*request); }
void tw_set_register(int which, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t* r = current_block->core[current_block->running].registers[which];
  r[0] = a, r[1] = b, r[2] = c, r[3] = d;
}
void tw_barrier(void) { current_block->vector->wait(tw::Lane::kAtBarrier); }
uint64_t tw_shuffle(int kind, uint64_t value, int argument, int bytes) {
  tw::VectorRun& run = *current_block->vector;
  tw::Lane& lane = run.lanes[(size_t)run.current];
  lane.kind = kind, lane.value = value, lane.argument = argument, lane.bytes = bytes;
  int self = run.current;
  run.wait(tw::Lane::kAtShuffle);
  return run.lanes[(size_t)self].value;
}

void tw_simd_load(void* out, uint64_t from, int bytes, const char* name) {
  current_block->simd_access(from, bytes, nullptr, name);
  memcpy(out, current_block->simd_bytes(from), (size_t)bytes);
}
void tw_simd_store(uint64_t to, const void* in, const uint8_t* mask, int bytes, const char* name) {
  current_block->simd_access(to, bytes, mask, name);
  for (int i = 0; i < bytes; ++i)
    if (mask[i]) current_block->simd_bytes(to)[i] = ((const uint8_t*)in)[i];
}

// What the compiler calls for loads and stores of kernels.
#define TW_ACCESS(n, reads, writes)                         \
  TW_HIDDEN void __tsan_read##n(void* p) { reads; }         \
  TW_HIDDEN void __tsan_write##n(void* p) { writes; }       \
  TW_HIDDEN void __tsan_unaligned_read##n(void* p) { reads; }   \
  TW_HIDDEN void __tsan_unaligned_write##n(void* p) { writes; } \
  TW_HIDDEN void __tsan_volatile_read##n(void* p) { reads; }    \
  TW_HIDDEN void __tsan_volatile_write##n(void* p) { writes; }
TW_ACCESS(1, (access_as<uint16_t, 1, false>(p)), (access_as<uint16_t, 1, true>(p)))
TW_ACCESS(2, (access_as<uint16_t, 2, false>(p)), (access_as<uint16_t, 2, true>(p)))
TW_ACCESS(4, (access_as<uint32_t, 4, false>(p)), (access_as<uint32_t, 4, true>(p)))
TW_ACCESS(8, (access_as<uint64_t, 8, false>(p)), (access_as<uint64_t, 8, true>(p)))
TW_ACCESS(16, access_to(p, 16, false), access_to(p, 16, true))
#undef TW_ACCESS
TW_HIDDEN void __tsan_read_range(void* p, unsigned long n) { access_to(p, (int)n, false); }
TW_HIDDEN void __tsan_write_range(void* p, unsigned long n) { access_to(p, (int)n, true); }
TW_HIDDEN void __tsan_init(void) {}
TW_HIDDEN void __tsan_func_entry(void*) {}
TW_HIDDEN void __tsan_func_exit(void) {}
TW_HIDDEN void __tsan_vptr_update(void**, void*) {}
}
