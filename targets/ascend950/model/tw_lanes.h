// Which threads of a vector function touched what in a phase: only a barrier ends one, so two
// threads that meet there race. A cell of 32 bytes has a mark for each two of them.
#pragma once
#include <stdint.h>
#include <string.h>

#include <unordered_map>

namespace tw {
constexpr int kCell = 32;
constexpr uint16_t kSeveral = 0xffff;

struct Touched {  // threads' numbers from 1 on, or 0: nobody
  uint16_t writer, reader;
};

// Who touched two bytes: a thread's number with kReads, kWrites or both; kReads alone: several.
// What does not fit, since threads have met there, is kMet and kept apart.
constexpr uint16_t kReads = 0x1000, kWrites = 0x2000, kMet = 0xffff;
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
  uint32_t extent = 0;  // bytes of UB; 0 while no thread runs
  uint32_t phase = 0;
  uint16_t thread = 0;  // its number
  uint8_t* bytes = nullptr;
  LaneCell* cells = nullptr;
  uint32_t low = 0, high = 0;  // what the launch has used
  static constexpr uint64_t kWidest = 16;
  uint64_t count[kWidest + 1] = {};  // accesses by their bytes; wider ones are the first
  uint64_t wide = 0;                 // bytes of those
  std::unordered_map<uint32_t, Touched> met;  // two bytes where threads have met in this phase

  void counted(uint64_t number) {
    ++count[number <= kWidest ? number : 0];
    if (number > kWidest) wide += number;
  }

  template <class Marks>
  static constexpr Marks repeated(uint16_t mark) {
    return (Marks)((Marks)~(Marks)0 / 0xffff * mark);
  }

  // A load or store of one, two, four or eight bytes at a multiple of them: true if pipes were
  // asked in this phase, what it reads was written, and only this thread has touched the bytes (or
  // several have read what it reads). `Marks`: a word as wide as the marks.
  template <class Marks, uint32_t kBytes>
  bool known(uintptr_t address, bool write) {
    uint64_t offset = address - (uintptr_t)bytes;
    if (offset >= extent || offset % kBytes || offset < low || offset + kBytes > high) return false;
    LaneCell& cell = cells[lane_place((uint32_t)offset / kCell)];
    if ((write ? cell.wrote : cell.read) != phase) return false;
    uint32_t first = (uint32_t)offset % kCell, mask = ((1u << kBytes) - 1) << first;
    if (!write && (cell.written & mask) != mask) return false;
    uint16_t one = write ? kWrites : kReads, other = write ? kReads : kWrites;
    Marks found, mine = repeated<Marks>(one | thread), both = mine | repeated<Marks>(other);
    memcpy(&found, &cell.mark[first / 2], sizeof found);
    if (found != mine && found != both) {
      if (found == 0) found = mine;
      else if (found == (mine ^ repeated<Marks>(kReads | kWrites))) found = both;
      else if (write || found != repeated<Marks>(kReads)) return false;
      memcpy(&cell.mark[first / 2], &found, sizeof found);
    }
    if (write) cell.written |= mask;
    ++count[kBytes];
    return true;
  }

  // Notes an access within one cell; false if another thread has touched the bytes.
  bool note(uint32_t offset, uint32_t count, bool write) {
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
    (write ? cell.wrote : cell.read) = phase;
    return free;
  }
};
}  // namespace tw
