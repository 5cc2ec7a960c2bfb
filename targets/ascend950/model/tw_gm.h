// Global memory: the tensors of a launch, and a shadow of those it may write. Blocks run in
// parallel and nothing orders them, so two that meet in one place are a race.
#pragma once
#include <stdint.h>
#include <sys/mman.h>

#include "tw_launch_kernel.h"
#include "tw_report.h"

namespace tw {
// Last writer and last reader of a unit of one or two bytes: block, actor, epoch, and the site's line.
struct Mark {
  uint64_t block : 16, actor : 4, epoch : 28, line : 16;
};
struct GmCell {
  Mark writer, reader;
};
static_assert(sizeof(Mark) == 8, "one word, so that threads see whole marks");

struct Shadow {
  GmCell* cells = nullptr;
  size_t bytes = 0;
  void create(uint64_t tensor_bytes, int unit) {
    bytes = (tensor_bytes / (uint64_t)unit + 2) * sizeof(GmCell);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    cells = (GmCell*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  }
  void destroy() {
    if (cells) munmap((void*)cells, bytes);
    cells = nullptr;
  }
};

inline Mark load(const Mark& mark) {
  uint64_t word = __atomic_load_n((const uint64_t*)&mark, __ATOMIC_RELAXED);
  Mark result;
  __builtin_memcpy(&result, &word, sizeof result);
  return result;
}
inline void store(Mark& mark, Mark value) {
  uint64_t word;
  __builtin_memcpy(&word, &value, sizeof word);
  __atomic_store_n((uint64_t*)&mark, word, __ATOMIC_RELAXED);
}

constexpr int kMaxTensors = 48;
struct GlobalMemory {
  Tensor tensor[kMaxTensors];
  Shadow shadow[kMaxTensors];
  int count = 0;

  void open(const Tensor* tensors, int number) {
    count = number;
    for (int i = 0; i < number; ++i) {
      tensor[i] = tensors[i];
      if (tensor[i].writable) shadow[i].create(tensor[i].bytes, tensor[i].unit);
    }
  }
  void close() {
    for (int i = 0; i < count; ++i) shadow[i].destroy();
    count = 0;
  }
  // The tensor that holds all of these bytes, or -1.
  int find(uintptr_t address, uint64_t bytes) const {
    for (int i = 0; i < count; ++i)
      if (address >= tensor[i].base && address + bytes <= tensor[i].base + tensor[i].bytes) return i;
    return -1;
  }
  // The tensor nearest to an address outside all of them.
  int nearest(uintptr_t address) const {
    int best = -1;
    uint64_t distance = ~(uint64_t)0;
    for (int i = 0; i < count; ++i) {
      uintptr_t base = tensor[i].base, end = base + tensor[i].bytes;
      uint64_t d = address < base ? base - address : address >= end ? address - end + 1 : 0;
      if (d < distance) distance = d, best = i;
    }
    return best;
  }
};
}  // namespace tw
