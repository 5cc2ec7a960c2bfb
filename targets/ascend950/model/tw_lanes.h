// Which threads of a vector function touched what in a phase: only a barrier ends one, so two
// threads that meet there race. A cell of 32 bytes has a mark for each two of them.
#pragma once
#include <stdint.h>
#include <string.h>

#include <unordered_map>

namespace tw {
constexpr int kCell = 32;
constexpr uint32_t kLaneBytes = 253952;  // UB
constexpr uint16_t kSeveral = 0xffff;

struct Touched {  // threads' numbers from 1 on, or 0: nobody
  uint16_t writer, reader;
};

// Who touched two bytes: a thread's number with kReads, kWrites or both; kReads alone: several.
// What does not fit, since threads have met there, is kMet and kept apart.
constexpr uint16_t kReads = 0x1000, kWrites = 0x2000, kMet = 0xffff;
constexpr uint64_t kEach = 0x0001000100010001;  // times a mark: the marks of eight bytes
inline uint16_t mark_of(Touched by) {
  if (by.writer == 0) return by.reader == 0 ? 0 : (uint16_t)(kReads | (by.reader == kSeveral ? 0 : by.reader));
  if (by.reader == 0) return kWrites | by.writer;
  return by.reader == by.writer ? (uint16_t)(kReads | kWrites | by.writer) : kMet;
}
inline Touched touched_of(uint16_t mark) {
  uint16_t number = mark & 0xfff, reader = number ? number : kSeveral;
  return {(uint16_t)(mark & kWrites ? number : 0), (uint16_t)(mark & kReads ? reader : 0)};
}

// All that an access needs to know in the common case, in one line of the cache.
struct LaneCell {
  uint16_t mark[kCell / 2];
  uint32_t phase;        // in which the marks were made
  uint32_t read, wrote;  // the last in which pipes were checked for a load, for a store
  uint32_t written;      // of the memory's shadow: a bit per byte
  uint32_t padding[4];
};
static_assert(sizeof(LaneCell) == 64, "one cache line");
// One in 17 is left out: threads often stand powers of two apart, which would meet in few sets of a
// cache.
constexpr uint32_t lane_place(uint32_t cell) { return cell + cell / 16; }

// Loads and stores of the thread that runs.
struct LaneAccess {
  static constexpr uintptr_t kNowhere = (uintptr_t)1 << 62;
  static constexpr uint64_t kWidest = 16;
  uintptr_t begin = kNowhere;  // of UB, while a thread runs
  LaneCell* cells = nullptr;
  uint64_t reads = 0, writes = 0;  // the thread's marks, for eight bytes
  uint32_t phase = 0;
  uint16_t thread = 0;               // its number
  uint64_t count[kWidest + 1] = {};  // accesses by their bytes; wider ones are the first
  uint64_t wide = 0;                 // bytes of those
  std::unordered_map<uint32_t, Touched> met;  // two bytes where threads have met in this phase

  void turn_to(int lane) {
    thread = (uint16_t)(lane + 1);
    reads = kEach * (kReads | thread), writes = kEach * (kWrites | thread);
  }

  void counted(uint64_t number) {
    ++count[number <= kWidest ? number : 0];
    if (number > kWidest) wide += number;
  }

  // A load or store of one, two, four or eight bytes at a multiple of them: true if pipes were
  // asked in this phase, what it reads was written, and only this thread has touched the bytes (or
  // several have read what it reads). `Marks`: a word as wide as the marks.
  template <class Marks, uint32_t kBytes, bool kWrite>
  bool known(uintptr_t address) {
    uint64_t offset = address - begin;
    if (offset >= kLaneBytes || offset % kBytes) return false;
    LaneCell& cell = cells[lane_place((uint32_t)offset / kCell)];
    if ((kWrite ? cell.wrote : cell.read) != phase) return false;
    uint32_t first = (uint32_t)offset % kCell, all = (1u << kBytes) - 1;
    if (!kWrite && (~cell.written >> first & all)) return false;
    Marks found, mine = (Marks)(kWrite ? writes : reads), both = (Marks)(reads | writes);
    memcpy(&found, &cell.mark[first / 2], sizeof found);
    if (found != mine && found != both && (kWrite || found != (Marks)(kEach * kReads))) {
      if (found != 0 && found != (Marks)(kWrite ? reads : writes)) return false;
      if (found != 0) mine = both;
      memcpy(&cell.mark[first / 2], &mine, sizeof mine);
    }
    if (kWrite) cell.written |= all << first;
    ++count[kBytes];
    return true;
  }

  // Notes an access within one cell; false if another thread has touched the bytes. `settled`: the
  // pipes need not be asked again.
  bool note(uint32_t offset, uint32_t count, bool write, bool settled) {
    LaneCell& cell = cells[lane_place((uint32_t)offset / kCell)];
    if (cell.phase != phase) {
      memset(cell.mark, 0, sizeof cell.mark);
      cell.phase = phase;
    }
    bool free = true;
    uint32_t first = offset % kCell / 2, last = (offset % kCell + count - 1) / 2;
    for (uint32_t i = first; i <= last; ++i) {
      uint32_t unit = offset / kCell * (kCell / 2) + i;
      Touched by = cell.mark[i] == kMet ? met[unit] : touched_of(cell.mark[i]);
      bool unread = by.reader == 0 || by.reader == thread;
      free = free && (by.writer == 0 || by.writer == thread) && !(write && !unread);
      if (write) by.writer = thread;
      else by.reader = unread ? thread : kSeveral;
      cell.mark[i] = mark_of(by);
      if (cell.mark[i] == kMet) met[unit] = by;
    }
    if (settled) (write ? cell.wrote : cell.read) = phase;
    return free;
  }
};

// Where threads of this process find theirs faster than in thread-local memory, by the address of
// their own control block. Who finds a seat taken does without.
#if defined(__x86_64__)
struct Seat {
  uintptr_t thread;
  LaneAccess* access;
};
inline Seat seats[256];
inline uintptr_t own_block() {
  uintptr_t self;
  asm("movq %%fs:0, %0" : "=r"(self));
  return self;
}
inline Seat& own_seat(uintptr_t self) { return seats[self >> 12 & 255]; }
inline void sit_down(LaneAccess& access) {
  uintptr_t self = own_block(), free = 0;
  Seat& seat = own_seat(self);
  bool mine = __atomic_compare_exchange_n(&seat.thread, &free, self, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE) || free == self;
  if (mine) seat.access = &access;  // an ended thread may have sat at the same address
}
inline LaneAccess* seated() {
  uintptr_t self = own_block();
  Seat& seat = own_seat(self);
  return seat.thread == self ? seat.access : nullptr;
}
#else
inline thread_local LaneAccess* own_access = nullptr;
inline void sit_down(LaneAccess& access) { own_access = &access; }
inline LaneAccess* seated() { return own_access; }
#endif
}  // namespace tw
