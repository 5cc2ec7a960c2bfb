// SIMT vector functions: threads are fibers, run one after the other until they end or wait. A
// thread that never waits costs no switch of its own: the next one starts on the same stack.
#pragma once
#include <vector>

#include "tw_cube.h"

namespace tw {
constexpr size_t kLaneStack = 80 << 10, kLaneSkips = 16 << 10;  // what a stack may skip of it
struct Lane {
  enum State { kReady, kAtBarrier, kAtShuffle, kDone } state = kReady;
  Fiber* fiber = nullptr;
  int kind = 0, argument = 0, bytes = 0;
  uint64_t value = 0;
};

struct VectorRun {
  Block* block = nullptr;
  void (*thunk)(const uint64_t*) = nullptr;
  uint64_t words[12];
  uint32_t extent[3];
  uint32_t thread[3];
  int core = AIV0, count = 0, current = 0, begun = 0;
  int following = 0, left = 0, step = 1;  // threads to go on after the one that runs
  std::vector<Lane> lanes;
  std::vector<Fiber*> pool, idle;
  Fiber host;

  static void entry(void* self);
  bool next_lane();
  void place(int lane);
  double run(const Request& r);
  Fiber& next_fiber();
  void resume(int first, int number);
  bool release();
  bool shuffle_warp(int warp);
  void wait(Lane::State state);
  void next_phase();
  void mark(uint32_t offset, uint32_t bytes, bool write);
};

inline void VectorRun::place(int lane) {
  current = lane;
  block->lane.turn_to(lane);
  if (extent[0] == (uint32_t)count) {  // one axis
    thread[0] = (uint32_t)lane, thread[1] = thread[2] = 0;
    return;
  }
  thread[0] = (uint32_t)lane % extent[0];
  thread[1] = (uint32_t)lane / extent[0] % extent[1];
  thread[2] = (uint32_t)lane / extent[0] / extent[1];
}

// A stack runs fresh threads until one of them waits; then it belongs to that thread.
inline void VectorRun::entry(void* argument) {
  VectorRun& self = *(VectorRun*)argument;
  for (;;) {
    self.thunk(self.words);
    Lane& lane = self.lanes[(size_t)self.current];
    lane.state = Lane::kDone;
    Fiber* mine = lane.fiber;
    if (self.next_lane()) {
      self.lanes[(size_t)self.current].fiber = mine;
      continue;
    }
    self.idle.push_back(mine);
    switch_to(*mine, self.next_fiber());
  }
}

// Turns to the next thread that has not begun, if any.
inline bool VectorRun::next_lane() {
  if (begun == count) return false;
  place(block->launch->adversarial ? count - 1 - begun : begun);
  ++begun;
  return true;
}

// Whoever runs when the running thread stops: the next of those that go on, or the host.
inline Fiber& VectorRun::next_fiber() {
  if (left == 0) return host;
  --left;
  place(following);
  following += step;
  Lane& lane = lanes[(size_t)current];
  lane.state = Lane::kReady;
  return *lane.fiber;
}

// Lets so many threads go on, each until it waits or ends.
inline void VectorRun::resume(int first, int number) {
  step = block->launch->adversarial ? -1 : 1;
  following = step < 0 ? first + number - 1 : first, left = number;
  switch_to(host, next_fiber());
}

inline void VectorRun::wait(Lane::State state) {
  Lane& lane = lanes[(size_t)current];
  lane.state = state;
  Fiber& mine = *lane.fiber;
  switch_to(mine, next_fiber());
}

inline double VectorRun::run(const Request& r) {
  thunk = (void (*)(const uint64_t*))(uintptr_t)r.a[0];
  extent[0] = r.a[1] & 0xffff, extent[1] = r.a[1] >> 16 & 0xffff, extent[2] = r.a[1] >> 32 & 0xffff;
  count = (int)(extent[0] * extent[1] * extent[2]);
  if (!block->range("threads", (uint64_t)count, 1, 2048)) return 0;
  core = kActor[block->now_actor].core;
  for (uint64_t i = 0; i < r.a[2]; ++i) {
    words[i] = r.a[4 + i];
    // A pointer below 1 MB is an offset into UB; here loads and stores need its address.
    if ((r.a[3] >> i & 1) && words[i] < (1 << 20)) words[i] += (uintptr_t)block->ub[core].bytes;
  }
  LaneAccess& access = block->lane;
  access.begin = (uintptr_t)block->ub[core].bytes, access.cells = block->ub[core].lanes;
  memset(access.count, 0, sizeof access.count), access.wide = 0;
  next_phase();
  begun = 0, left = 0;
  lanes.assign((size_t)count, Lane());
  block->vector = this;
  while (next_lane()) {
    if (idle.empty()) {
      pool.push_back(new Fiber());
      pool.back()->skipped = (pool.size() * 9 * 64) % kLaneSkips;
      idle.push_back(pool.back());
    }
    Fiber* fiber = idle.back();
    idle.pop_back();
    lanes[(size_t)current].fiber = fiber;
    start(*fiber, kLaneStack, entry, this);
    switch_to(host, *fiber);
  }
  while (release()) {
  }
  block->vector = nullptr, access.begin = LaneAccess::kNowhere;
  uint64_t accesses = 0, traffic = access.wide;
  for (uint64_t i = 0; i <= LaneAccess::kWidest; ++i)
    accesses += access.count[i], traffic += access.count[i] * i;
  double issue_cycles = (double)accesses / 32 / 4, bytes_cycles = (double)traffic / 256;
  return 20 + (issue_cycles > bytes_cycles ? issue_cycles : bytes_cycles);
}

// Lets threads go on whose warp has met, or, if none, whose block has; false when all are done.
inline bool VectorRun::release() {
  int waiting = 0, at_barrier = 0;
  bool moved = false;
  for (int warp = 0; warp * 32 < count; ++warp) moved = shuffle_warp(warp) || moved;
  if (moved) return true;
  for (auto& lane : lanes) {
    waiting += lane.state != Lane::kDone;
    at_barrier += lane.state == Lane::kAtBarrier;
  }
  if (waiting == 0) return false;
  if (at_barrier != count) {
    block->fail("divergence",
                text("%s: %d of %d threads wait at a barrier or shuffle that the others do not "
                     "reach", block->describe(block->now_site).c_str(), waiting, count));
    block->die();
  }
  next_phase();
  resume(0, count);
  return true;
}

template <class T, class F>
inline void fold(Lane** lanes, int count, F combine) {
  T values[32];
  for (int i = 0; i < count; ++i) memcpy(&values[i], &lanes[i]->value, sizeof(T));
  // A tree over adjacent lanes, as for in-register sums.
  for (int width = 1; width < count; width *= 2)
    for (int i = 0; i + width < count; i += 2 * width) values[i] = combine(values[i], values[i + width]);
  for (int i = 0; i < count; ++i) memcpy(&lanes[i]->value, &values[0], sizeof(T));
}

inline bool VectorRun::shuffle_warp(int warp) {
  int first = warp * 32, size = count - first < 32 ? count - first : 32;
  Lane* members[32] = {};
  for (int i = 0; i < size; ++i) {
    members[i] = &lanes[(size_t)(first + i)];
    if (members[i]->state != Lane::kAtShuffle || members[i]->kind != members[0]->kind) return false;
  }
  uint64_t given[32], ballot = 0;
  for (int i = 0; i < size; ++i) {
    given[i] = members[i]->value;
    ballot |= (given[i] & 1) << i;
  }
  switch (members[0]->kind) {
    case kSumF: fold<float>(members, size, [](float a, float b) { return a + b; }); break;
    case kMaxF: fold<float>(members, size, [](float a, float b) { return a > b ? a : b; }); break;
    case kMinF: fold<float>(members, size, [](float a, float b) { return a < b ? a : b; }); break;
    case kSumI: fold<uint32_t>(members, size, [](uint32_t a, uint32_t b) { return a + b; }); break;
    case kMaxI: fold<int32_t>(members, size, [](int32_t a, int32_t b) { return a > b ? a : b; }); break;
    case kMinI: fold<int32_t>(members, size, [](int32_t a, int32_t b) { return a < b ? a : b; }); break;
    case kMaxU: fold<uint32_t>(members, size, [](uint32_t a, uint32_t b) { return a > b ? a : b; }); break;
    case kMinU: fold<uint32_t>(members, size, [](uint32_t a, uint32_t b) { return a < b ? a : b; }); break;
    case kBallot: for (int i = 0; i < size; ++i) members[i]->value = ballot; break;
    default:
      for (int i = 0; i < size; ++i) {
        int argument = members[i]->argument, from = i;
        if (members[0]->kind == kXor) from = i ^ argument;
        if (members[0]->kind == kDown) from = i + argument;
        if (members[0]->kind == kUp) from = i - argument;
        if (members[0]->kind == kIndex) from = argument & 31;
        if (from >= 0 && from < size) members[i]->value = given[from];
      }
  }
  for (int i = 0; i < size; ++i) members[i]->state = Lane::kReady;
  resume(first, size);
  return true;
}

inline void VectorRun::next_phase() {
  LaneAccess& access = block->lane;
  access.met.clear();
  if (++access.phase) return;
  access.phase = 1;  // numbers begin again
  for (Memory& m : block->ub)
    for (uint32_t c = 0; c < m.usable / kCell; ++c)
      m.lane_of(c).phase = m.lane_of(c).read = m.lane_of(c).wrote = 0;
}

inline void VectorRun::mark(uint32_t offset, uint32_t bytes, bool write) {
  const Memory& memory = block->ub[core];
  for (uint32_t at = offset, end = offset + bytes; at < end;) {
    uint32_t next = (at / kCell + 1) * kCell, stop = next < end ? next : end;
    // A cell at an end of what was used stays unsettled: an access may reach further.
    bool settled = next - kCell >= memory.low && next <= memory.high;
    if (!block->lane.note(at, stop - at, write, settled))
      block->fail("race", text("%s: a thread %s UB byte %u that another thread touches: want "
                               "asc_syncthreads between", block->describe(block->now_site).c_str(),
                               write ? "writes" : "reads", at));
    at = stop;
  }
}

inline double Block::run_vector(const Request& r) {
  thread_local VectorRun* run = nullptr;
  if (!run) run = new VectorRun();
  run->block = this;
  return run->run(r);
}

// A SIMD function runs where the scalar program calls it: the vector pipe first works off what was
// issued to it before.
inline void Block::simd_access(uint64_t offset, int bytes, const uint8_t* mask, const char* name) {
  int actor = actor_of(running, PIPE_V);
  while (!queue[actor].empty()) {
    if (!step_any()) {
      core[running].waits = Request{};
      core[running].waits.op = kBarrierAll;
      core[running].blocked = true;
      yield();
    }
  }
  Request r{};
  r.name = name, r.file = "", r.clock = issue_clock[running];
  now_actor = actor, now_site = site_of(*this, r, actor);
  clock[actor].join(issue_clocks[r.clock]);
  clock[actor].at[actor] = ++epoch[actor];
  for (int i = 0; i < bytes;) {
    int begin = i;
    if (mask && !mask[i]) {
      ++i;
      continue;
    }
    while (i < bytes && (!mask || mask[i])) ++i;
    touch(ub[running], offset + (uint64_t)begin, (uint64_t)(i - begin), mask != nullptr);
  }
  ready[actor] += 1;
}

// A load or store of the kernel's own code, in a vector function or the scalar program.
inline void Block::raw_access(uintptr_t address, int bytes, bool write) {
  int on = vector ? vector->core : running;
  uint64_t offset = address - (uintptr_t)ub[on].bytes;
  if (offset + kGuard < kUsable[UB] + 2 * (uint64_t)kGuard) {
    if (vector) lane.counted((uint64_t)bytes);
    if (touch(ub[on], offset, (uint64_t)bytes, write) && vector)
      vector->mark((uint32_t)offset, (uint32_t)bytes, write);
    if (offset % (uint64_t)bytes && bytes <= 16) aligned("a load or store", offset, (uint64_t)bytes);
    return;
  }
  Fiber& stack = vector ? *vector->lanes[(size_t)vector->current].fiber : core[running].fiber;
  if (address - (uintptr_t)stack.stack < stack.size) return;
  int found = tensor_at(address, (uint64_t)bytes);
  if (found < 0) {
    extern const char __executable_or_library[] asm("__dso_handle");
    uintptr_t image = (uintptr_t)__executable_or_library;
    if (address - (image - (64u << 20)) < (128u << 20)) return;  // constants of this library
  }
  if (vector) lane.counted((uint64_t)bytes);
  else scalar_access();
  if (found >= 0 && !write && !launch->gm.tensor[found].writable) return;  // nothing to check
  if (!touch_gm(address, (uint64_t)bytes, write)) die();
}

// The scalar program executes at once.
inline void Block::scalar_access() {
  now_actor = actor_of(running, PIPE_S);
  uint32_t& site = scalar_site[running];
  if (site == 0) {
    Request r{};
    r.name = "scalar access", r.file = "";
    site = site_of(*this, r, now_actor);
  }
  now_site = site;
  if (epoch[now_actor] == 0) epoch[now_actor] = 1, clock[now_actor].at[now_actor] = 1;
}
}  // namespace tw
