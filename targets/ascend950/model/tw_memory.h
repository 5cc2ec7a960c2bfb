// Local memories with their shadow: who wrote and read each 32-byte cell, and which bytes of it
// were ever written. A page is reset when it is first touched in a launch.
#pragma once
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "tw_lanes.h"
#include "tw_request.h"

namespace tw {
constexpr int kActors = 13;  // the pipes of one block's three cores
constexpr int kPageCells = 32, kPageLanes = lane_place(kPageCells), kPage = kCell * kPageCells;

enum Core { AIC, AIV0, AIV1 };
inline const char* core_name(int core) { return core == AIC ? "AIC" : core == AIV0 ? "AIV0" : "AIV1"; }
inline const char* pipe_name(int pipe) {
  static const char* names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "ALL", "FIX"};
  return names[pipe & 7];
}

struct Actor {
  int core, pipe;
};
// In the order of their numbers.
constexpr Actor kActor[kActors] = {
    {AIC, PIPE_S},     {AIC, PIPE_M},     {AIC, PIPE_MTE1}, {AIC, PIPE_MTE2}, {AIC, PIPE_FIX},
    {AIV0, PIPE_S},    {AIV0, PIPE_V},    {AIV0, PIPE_MTE2}, {AIV0, PIPE_MTE3},
    {AIV1, PIPE_S},    {AIV1, PIPE_V},    {AIV1, PIPE_MTE2}, {AIV1, PIPE_MTE3}};

inline int actor_of(int core, int pipe) {
  for (int i = 0; i < kActors; ++i)
    if (kActor[i].core == core && kActor[i].pipe == pipe) return i;
  return -1;
}

// Transfers of one engine may overtake each other; other pipes work in order.
inline bool in_order(int actor) {
  int pipe = kActor[actor].pipe;
  return pipe != PIPE_MTE1 && pipe != PIPE_MTE2 && pipe != PIPE_MTE3;
}

constexpr int kSlots = 6;
struct Cell {
  uint32_t writer_epoch, writer_site;
  uint8_t writer, padding[7];
  uint32_t reader_epoch[kSlots], reader_site[kSlots];
  bool is_read() const {
    uint64_t pairs[kSlots / 2];
    memcpy(pairs, reader_epoch, sizeof pairs);
    return pairs[0] | pairs[1] | pairs[2];
  }
};
static_assert(sizeof(Cell) == 64, "one cache line");

enum Place { UB, L1, L0A, L0B, L0C, L0AMX, L0BMX, kPlaces };
inline const char* place_name(int place) {
  static const char* names[] = {"UB", "L1", "L0A", "L0B", "L0C", "L0A_MX", "L0B_MX"};
  return names[place];
}
// Bytes that kernels may use.
constexpr uint32_t kUsable[kPlaces] = {kLaneBytes, 524288, 65536, 65536, 262144, 4096, 4096};
constexpr uint32_t kUbWithSimt = 221184;  // the rest is the cache of SIMT loads from GM
constexpr uint32_t kGuard = 1 << 18;      // what a wild access may hit without harm

struct Memory {
  int place = 0, core = 0;
  uint32_t usable = 0;
  uint8_t* bytes = nullptr;
  Cell* cells = nullptr;
  LaneCell* lanes = nullptr;    // of UB, which threads touch: in lane_of's order
  uint32_t* written = nullptr;  // of other memories: a bit per byte of each cell
  uint32_t* page_launch = nullptr;
  int8_t slot[kActors];
  uint8_t actor[kSlots];
  uint32_t low = ~0u, high = 0;  // what was used in this launch
  uint32_t high_site = 0;

  void create(int place_, int core_) {
    place = place_, core = core_, usable = kUsable[place];
    size_t size = usable + 2 * (size_t)kGuard, pages = usable / kPage + 1;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    auto map = [&](size_t n) { return mmap(nullptr, n, PROT_READ | PROT_WRITE, flags, -1, 0); };
    bytes = (uint8_t*)map(size) + kGuard;
    cells = (Cell*)map(pages * kPageCells * sizeof(Cell));
    if (place == UB) {
      lanes = (LaneCell*)map(pages * kPageLanes * sizeof(LaneCell));
    } else {
      written = (uint32_t*)map(pages * kPageCells * sizeof(uint32_t));
    }
    page_launch = (uint32_t*)map(pages * sizeof(uint32_t));
    memset(slot, -1, sizeof slot);
    memset(actor, 0, sizeof actor);
    int slots = 0;
    for (int i = 0; i < kActors; ++i)
      if (reaches(kActor[i])) slot[i] = (int8_t)slots, actor[slots++] = (uint8_t)i;
  }

  LaneCell& lane_of(uint32_t cell) { return lanes[lane_place(cell)]; }
  uint32_t& written_of(uint32_t cell) { return lanes ? lane_of(cell).written : written[cell]; }

  bool reaches(Actor a) const {
    bool same = a.core == core;
    switch (place) {
      case UB: return same || (a.core == AIC && (a.pipe == PIPE_FIX || a.pipe == PIPE_MTE1));
      case L1: return a.pipe == PIPE_MTE3 || (same && (a.pipe == PIPE_MTE1 || a.pipe == PIPE_MTE2 || a.pipe == PIPE_S));
      case L0C: return same && (a.pipe == PIPE_M || a.pipe == PIPE_FIX);
      default: return same && (a.pipe == PIPE_M || a.pipe == PIPE_MTE1);
    }
  }

  // Poisons a page (all ones is NaN in every float format) the first time a launch touches it.
  void open(uint32_t cell, uint32_t launch) {
    uint32_t page = cell / kPageCells;
    if (page_launch[page] == launch) return;
    page_launch[page] = launch;
    memset(bytes + (size_t)page * kPage, 0xff, kPage);
    size_t first = (size_t)page * kPageCells;
    memset((void*)(cells + first), 0, kPageCells * sizeof(Cell));
    if (lanes) memset((void*)(lanes + (size_t)page * kPageLanes), 0, kPageLanes * sizeof(LaneCell));
    else memset(written + first, 0, kPageCells * sizeof(uint32_t));
  }
};

inline uint32_t byte_mask(uint32_t first, uint32_t last) {  // inclusive, within a cell
  return (last == 31 ? ~0u : (1u << (last + 1)) - 1) & ~((1u << first) - 1);
}
}  // namespace tw
