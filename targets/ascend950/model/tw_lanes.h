// Which threads of a vector function touched what in a phase: only a barrier ends one, so two
// threads that meet there race. A cell of 32 bytes has a writer and a reader for each two of them.
#pragma once
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "tw_memory.h"

namespace tw {
constexpr uint16_t kSeveral = 0xffff;

struct LaneCell {
  uint16_t writer[kCell / 2], reader[kCell / 2];  // a thread's number from 1 on, or 0: nobody
};
static_assert(sizeof(LaneCell) == 64, "one cache line");

struct LaneMarks {
  LaneCell* cells = nullptr;
  uint32_t* phase = nullptr;  // in which a cell was last touched

  void create() {
    constexpr size_t kCount = kUsable[UB] / kCell + 1;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    auto map = [&](size_t n) { return mmap(nullptr, n, PROT_READ | PROT_WRITE, flags, -1, 0); };
    cells = (LaneCell*)map(kCount * sizeof(LaneCell));
    phase = (uint32_t*)map(kCount * sizeof(uint32_t));
  }

  // Notes an access within one cell; false if another thread has touched the bytes.
  bool note(uint32_t offset, uint32_t bytes, bool write, uint16_t mine, uint32_t now) {
    LaneCell& cell = cells[offset / kCell];
    if (phase[offset / kCell] != now) {
      memset((void*)&cell, 0, sizeof cell);
      phase[offset / kCell] = now;
    }
    uint32_t first = offset % kCell / 2, last = (offset % kCell + bytes - 1) / 2;
    if (last == first + 1) {  // four bytes, what most accesses are
      uint32_t both = mine * 0x10001u, writers, readers;
      memcpy(&writers, &cell.writer[first], 4);
      memcpy(&readers, &cell.reader[first], 4);
      bool unread = readers == 0 || readers == both;
      if ((writers == 0 || writers == both) && (unread || (!write && readers == ~0u))) {
        if (unread) memcpy(write ? &cell.writer[first] : &cell.reader[first], &both, 4);
        return true;
      }
    }
    bool free = true;
    for (uint32_t i = first; i <= last; ++i) {
      uint16_t &writer = cell.writer[i], &reader = cell.reader[i];
      free = free && (writer == 0 || writer == mine) && !(write && reader != 0 && reader != mine);
      if (write) writer = mine;
      else reader = reader == 0 || reader == mine ? mine : kSeveral;
    }
    return free;
  }
};
}  // namespace tw
