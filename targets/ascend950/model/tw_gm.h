// Global memory: the tensors of a launch, and a shadow of those it may write. Blocks run in
// parallel and nothing orders them, so two that meet in one place are a race.
#pragma once
#include <sched.h>
#include <stdint.h>
#include <sys/mman.h>

#include <mutex>
#include <vector>

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

// Units that are touched together nearly always have one mark for all of them.
constexpr uint64_t kChunk = 32;
struct GmChunk {
  GmCell all;       // of each unit, unless they differ
  uint32_t launch;  // that used it last: a chunk of another one is empty
  uint8_t busy, differ;
};

inline uint32_t next_serial() {
  static uint32_t serial = 0;
  return __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED);
}

struct Shadow {
  GmChunk* chunks = nullptr;
  GmCell* cells = nullptr;  // of units that differ from their neighbours
  uint64_t room = 0;        // chunks

  void create(uint64_t wanted) {
    for (room = 64; room < wanted;) room *= 2;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    auto map = [&](size_t n) { return mmap(nullptr, n, PROT_READ | PROT_WRITE, flags, -1, 0); };
    chunks = (GmChunk*)map(room * sizeof(GmChunk));
    cells = (GmCell*)map(room * kChunk * sizeof(GmCell));
  }
  void destroy() {
    munmap((void*)chunks, room * sizeof(GmChunk));
    munmap((void*)cells, room * kChunk * sizeof(GmCell));
  }

  // Calls check(cell) once for each mark of `count` units, which it may change.
  template <class F>
  void visit(uint64_t begin, uint64_t count, uint32_t launch, F check) {
    for (uint64_t at = begin, end = begin + count; at < end;) {
      uint64_t first = at / kChunk * kChunk, stop = end < first + kChunk ? end : first + kChunk;
      GmChunk& chunk = chunks[at / kChunk];
      while (__atomic_exchange_n(&chunk.busy, (uint8_t)1, __ATOMIC_ACQUIRE)) sched_yield();
      if (chunk.launch != launch) chunk.all = GmCell{}, chunk.launch = launch, chunk.differ = 0;
      if (!chunk.differ && stop - at < kChunk) {
        for (uint64_t i = first; i < first + kChunk; ++i) cells[i] = chunk.all;
        chunk.differ = 1;
      }
      if (chunk.differ)
        for (uint64_t i = at; i < stop; ++i) check(cells[i]);
      else
        check(chunk.all);
      __atomic_store_n(&chunk.busy, (uint8_t)0, __ATOMIC_RELEASE);
      at = stop;
    }
  }
};

// Shadows that a launch has left, for the next one: what they hold is another launch's.
class Shadows {
 public:
  Shadow take(uint64_t chunks) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (size_t i = 0; i < left_.size(); ++i)
      if (left_[i].room >= chunks) {
        Shadow found = left_[i];
        left_.erase(left_.begin() + (ptrdiff_t)i);
        return found;
      }
    Shadow fresh;
    fresh.create(chunks);
    return fresh;
  }
  void leave(Shadow shadow) {
    constexpr uint64_t kRoom = (32 << 20) / (kChunk * sizeof(GmCell));
    std::lock_guard<std::mutex> hold(mutex_);
    if (shadow.room > kRoom || left_.size() >= 6) shadow.destroy();
    else left_.push_back(shadow);
  }

 private:
  std::mutex mutex_;
  std::vector<Shadow> left_;
};
inline Shadows shadows;

constexpr int kMaxTensors = 48;
struct GlobalMemory {
  Tensor tensor[kMaxTensors];
  Shadow shadow[kMaxTensors];
  int count = 0;
  uint32_t launch = 0;
  bool apart = true;  // no two of them overlap

  void open(const Tensor* tensors, int number) {
    count = number, launch = next_serial();
    for (int i = 0; i < number; ++i) {
      tensor[i] = tensors[i];
      uint64_t units = tensor[i].bytes / (uint64_t)tensor[i].unit + 2;
      if (tensor[i].writable) shadow[i] = shadows.take(units / kChunk + 1);
      for (int j = 0; j < i; ++j)
        apart = apart && (tensor[j].base + tensor[j].bytes <= tensor[i].base ||
                          tensor[i].base + tensor[i].bytes <= tensor[j].base);
    }
  }
  void close() {
    for (int i = 0; i < count; ++i)
      if (tensor[i].writable) shadows.leave(shadow[i]);
    count = 0;
  }
  bool holds(int i, uintptr_t address, uint64_t bytes) const {
    return address >= tensor[i].base && address + bytes <= tensor[i].base + tensor[i].bytes;
  }
  // The first tensor that holds all of these bytes, or -1; `guess`: where it was before.
  int find(uintptr_t address, uint64_t bytes, int guess) const {
    if (apart && guess >= 0 && guess < count && holds(guess, address, bytes)) return guess;
    for (int i = 0; i < count; ++i)
      if (holds(i, address, bytes)) return i;
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
