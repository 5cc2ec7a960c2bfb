// One block: three cores, their memories, pipes, flags and clocks.
//
// Every pipe has a vector clock. An instruction may touch a byte if its clock knows the epochs of
// those that touched it before: notify and wait, lock and unlock, barriers, arrivals and the order
// of one pipe carry clocks along; nothing else does.
#pragma once
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "tw_fiber.h"
#include "tw_gm.h"
#include "tw_memory.h"
#include "tw_report.h"

namespace tw {
struct Clock {
  uint32_t at[16] = {};
  void join(const Clock& other) {
    for (int i = 0; i < kActors; ++i)
      if (other.at[i] > at[i]) at[i] = other.at[i];
  }
};

struct Flag {  // notify and wait: one bit
  bool set = false;
  Clock clock;
  double time = 0;
  Where by{};
};
struct Arrivals {  // a counter of four bits
  std::deque<std::pair<Clock, double>> clocks;
  Where by{};
};
struct Lock {
  Clock released;
  double time = 0;
  uint32_t locks_issued = 0, unlocks_issued = 0, unlocks_done = 0;
  Where by{};
};

struct Totals {  // what `inspect` shows
  double busy[kActors] = {};
  double finish = 0;
  uint64_t bytes[kOps] = {};  // by Op
  uint64_t instructions = 0;
};

struct Event {  // for the timeline
  const char* name;
  int block, actor, line;
  double begin, end;
};

struct Range {  // bytes of a memory that one instruction wrote last
  int place, core;
  uint32_t first, end;
  Where by;
};

struct Launch {
  const char* kernel = "";
  int kind = 0;  // 0 mix(1,2), 1 vector, 2 cube
  int num_blocks = 1;
  bool adversarial = false, trace = false, map = false;
  void (*program)(void*) = nullptr;
  void* argument = nullptr;
  GlobalMemory gm;
  Reports reports;
  std::mutex mutex;
  Totals totals;
  std::vector<Event> events;
  std::vector<Range> ranges;  // of block 0
  uint32_t low[kPlaces], high[kPlaces];
};

struct CoreState {
  Fiber fiber;
  bool used = false, finished = true, blocked = false;
  Request waits;  // what a blocked program waits for
  uint64_t registers[4][4] = {};
  double time = 0;
};

struct VectorRun;

class Block {
 public:
  Launch* launch = nullptr;
  int id = 0;
  uint32_t serial = 0;  // of the launch: memories are poisoned once in each
  Memory ub[3], l1, l0a, l0b, l0c, l0a_mx, l0b_mx;
  std::deque<Request> queue[kActors];
  Clock clock[kActors];
  uint32_t epoch[kActors];
  double ready[kActors];
  double gm_free = 0;  // when the block's share of the memory's bandwidth is free
  Flag flag[3][8][8][8];
  Arrivals arrivals[3][32];
  Lock lock[3][32];
  std::vector<Clock> issue_clocks;
  uint32_t issue_clock[3];
  CoreState core[3];
  Fiber scheduler;
  uint32_t next_seq = 0;
  size_t queued = 0;
  int running = AIC;  // core whose program runs
  VectorRun* vector = nullptr;
  LaneAccess lane;  // of the vector function that runs
  int gm_tensor = -1;             // that was touched last
  uint32_t scalar_site[3] = {};  // of loads and stores of each scalar program
  Totals totals;
  std::vector<Event> events;
  std::vector<Where> sites;
  std::unordered_map<uint64_t, uint32_t> site_ids;
  // The instruction being executed.
  const Request* now = nullptr;
  int now_actor = 0;
  uint32_t now_site = 0;
  bool dead = false;  // a wild access ended the block

  void* abandoned[8];  // where a dead block goes on

  Block();
  void run(Launch* launch, int id, uint32_t serial);
  void issue(const Request& request);
  // `other` tells faults of one instruction apart.
  void fail(const char* kind, const std::string& rest, const std::string& other = "");
  std::string describe(uint32_t site) const;
  std::string describe(const Where& where) const;
  bool touch(Memory& memory, uint64_t offset, uint64_t bytes, bool write);
  bool touch_first(Memory& memory, uint64_t offset, uint64_t bytes, bool write);
  bool seen_before(Memory& memory, uint64_t offset, uint64_t bytes, bool write);
  bool touch_gm(uintptr_t address, uint64_t bytes, bool write);
  void simd_access(uint64_t offset, int bytes, const uint8_t* mask, const char* name);
  uint8_t* simd_bytes(uint64_t offset) { return ub[running].bytes + offset % kUsable[UB]; }
  int tensor_at(uintptr_t address, uint64_t bytes);
  void raw_access(uintptr_t address, int bytes, bool write);
  Memory* memory_of(int place, int core);
  void ranges(Memory& memory, std::vector<Range>& out) const;
  [[noreturn]] void die();
  void yield();

 private:
  void begin(Launch* launch, int id, uint32_t serial);
  void finish();
  bool step(int actor);
  bool step_any();
  bool ready_to_run(const Request& request, int actor);
  void execute(const Request& request, int actor);
  void order(const Request& request, int actor);
  double transfer(const Request& request);
  bool ids_fit(const Request& r);
  bool range(const char* field, uint64_t value, uint64_t low, uint64_t high);
  bool aligned(const char* what, uint64_t address, uint64_t to);
  double gm_cycles(double bytes);
  double gm_to_ub(const Request& r);
  double ub_to_gm(const Request& r);
  double blocks(const Request& r);
  double gm_to_l1(const Request& r);
  double fill_l1(const Request& r);
  double l1_to_l0(const Request& r);
  double scales_to_l0(const Request& r);
  double mmad(const Request& r);
  double from_l0c(const Request& r);
  double run_vector(const Request& r);
  void scalar_access();
  bool may_resume(const CoreState& core);
  void deadlock();
  bool ordered(int actor, uint32_t epoch_seen) const;
  bool outside(Memory& memory, uint64_t offset, uint64_t bytes, bool write);
  bool unreachable(Memory& memory);
  void unwritten(Memory& memory, uint32_t cell);
  void race(Memory& memory, uint32_t cell, uint32_t other, bool write, bool other_wrote);
  friend struct VectorRun;
};

extern __thread Block* current_block;
}  // namespace tw
