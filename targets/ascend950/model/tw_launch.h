// Launches: blocks in parallel threads, each on a machine of its own; the C interface.
#pragma once
#include <algorithm>
#include <thread>

#include "tw_vector.h"
#if defined(__SSE2__)
#include <xmmintrin.h>
#include <pmmintrin.h>
#endif

namespace tw {
inline Block::Block() {
  for (int c = 0; c < 3; ++c) ub[c].create(UB, c);
  l1.create(L1, AIC), l0a.create(L0A, AIC), l0b.create(L0B, AIC), l0c.create(L0C, AIC);
  l0a_mx.create(L0AMX, AIC), l0b_mx.create(L0BMX, AIC);
}

inline void Block::begin(Launch* launch_, int id_, uint32_t serial_) {
  launch = launch_, id = id_, serial = serial_;
  Memory* memories[] = {&ub[0], &ub[1], &ub[2], &l1, &l0a, &l0b, &l0c, &l0a_mx, &l0b_mx};
  for (Memory* m : memories) m->low = ~0u, m->high = 0, m->high_site = 0;
  for (int i = 0; i < kActors; ++i) {
    queue[i].clear(), clock[i] = Clock(), epoch[i] = 0, ready[i] = 0;
  }
  for (auto& c : flag) for (auto& a : c) for (auto& b : a) for (auto& f : b) f.set = false;
  for (auto& c : arrivals) for (auto& a : c) a.clocks.clear();
  for (auto& c : lock) for (auto& l : c) l = Lock();
  issue_clocks.assign(1, Clock());
  queued = 0, next_seq = 0, gm_free = 0, dead = false, vector = nullptr, gm_tensor = -1;
  lane.begin = LaneAccess::kNowhere;
  totals = Totals(), events.clear(), sites.clear(), site_ids.clear();
  sites.push_back({"nothing", "", 0, 0});
  for (int c = 0; c < 3; ++c) {
    issue_clock[c] = 0, scalar_site[c] = 0;
    core[c].used = launch->kind == 0 || c == (launch->kind == 1 ? AIV0 : AIC);
    core[c].finished = !core[c].used, core[c].blocked = false, core[c].time = 0;
    memset(core[c].registers, 0, sizeof core[c].registers);
  }
}

struct Start {
  Block* block;
  int core;
};
inline void run_program(void* argument) {
  Start* s = (Start*)argument;
  Block* block = s->block;
  int core = s->core;
  block->launch->program(block->launch->argument);
  block->core[core].finished = true;
  switch_to(block->core[core].fiber, block->scheduler);
}

inline void Block::run(Launch* launch_, int id_, uint32_t serial_) {
  begin(launch_, id_, serial_);
  Block* volatile outer = current_block;
  current_block = this;
  static thread_local Start starts[3];
  for (int c = 0; c < 3; ++c) {
    if (!core[c].used) continue;
    starts[c] = {this, c};
    start(core[c].fiber, 512 << 10, run_program, &starts[c]);
  }
  if (__builtin_setjmp(abandoned) == 0) {
    for (bool moved = true; moved;) {
      moved = false;
      for (int c = 0; c < 3; ++c) {
        if (!may_resume(core[c])) continue;
        core[c].blocked = false, moved = true, running = c;
        starting = &core[c].fiber;
        switch_to(scheduler, core[c].fiber);
      }
      while (step_any()) {
        moved = true;
        if (launch->adversarial && queued < kAdversarialLimit) break;
      }
    }
    finish();
  }
  current_block = outer;
}

inline void Block::finish() {
  bool stuck = queued > 0;
  for (auto& state : core) stuck = stuck || !state.finished;
  if (stuck) return deadlock();
  for (int c = 0; c < 3; ++c) {
    for (int s = 0; s < 8; ++s)
      for (int t = 0; t < 8; ++t)
        for (int i = 0; i < 8; ++i)
          if (flag[c][s][t][i].set)
            fail("pairing", text("%s: id %d from %s to %s is still set at the end: want a wait",
                                 describe(flag[c][s][t][i].by).c_str(), i, pipe_name(s), pipe_name(t)),
                 text("%d %d %d %d", c, s, t, i));
    for (int i = 0; i < 32; ++i) {
      if (!arrivals[c][i].clocks.empty())
        fail("pairing", text("%s: %d arrivals at counter %d of %s are left at the end: want a wait",
                             describe(arrivals[c][i].by).c_str(), (int)arrivals[c][i].clocks.size(),
                             i, core_name(c)), text("%d %d", c, i));
      if (lock[c][i].locks_issued != lock[c][i].unlocks_issued)
        fail("pairing", text("%s: mutex %d is held at the end: want asc_unlock",
                             describe(lock[c][i].by).c_str(), i), text("%d %d", c, i));
    }
  }
  bool simt = false;
  for (const Where& site : sites) simt = simt || site.name == std::string("asc_vf_call");
  for (Memory& m : ub)
    if (simt && m.high > kUbWithSimt)
      fail("overflow", text("%s uses UB of %s up to byte %u: want at most %u in a kernel with SIMT "
                            "functions, whose cache takes the rest", describe(m.high_site).c_str(),
                            core_name(m.core), m.high - 1, kUbWithSimt), core_name(m.core));
}

// The map of a memory at the end of a launch: who wrote what stands there.
inline void Block::ranges(Memory& m, std::vector<Range>& out) const {
  uint32_t last = 0;
  for (uint32_t c = 0; c < m.usable / kCell; ++c) {
    const Cell& cell = m.cells[c];
    uint32_t site = m.page_launch[c / kPageCells] == serial && cell.writer_epoch ? cell.writer_site : 0;
    if (site && site == last) out.back().end = (c + 1) * kCell;
    else if (site) out.push_back({m.place, m.core, c * kCell, (c + 1) * kCell, sites[site]});
    last = site;
  }
}

inline void merge(Launch& launch, Block& block) {
  std::lock_guard<std::mutex> hold(launch.mutex);
  for (int i = 0; i < kActors; ++i) launch.totals.busy[i] += block.totals.busy[i];
  for (int i = 0; i < kActors; ++i) launch.totals.finish = std::max(launch.totals.finish, block.ready[i]);
  for (int i = 0; i < kOps; ++i) launch.totals.bytes[i] += block.totals.bytes[i];
  launch.totals.instructions += block.totals.instructions;
  launch.events.insert(launch.events.end(), block.events.begin(), block.events.end());
  Memory* memories[] = {&block.ub[0], &block.ub[1], &block.ub[2], &block.l1, &block.l0a, &block.l0b,
                        &block.l0c, &block.l0a_mx, &block.l0b_mx};
  for (Memory* m : memories) {
    launch.low[m->place] = std::min(launch.low[m->place], m->low);
    launch.high[m->place] = std::max(launch.high[m->place], m->high);
    if (launch.map && block.id == 0) block.ranges(*m, launch.ranges);
  }
}

inline void run_blocks(Launch* launch, int begin, int end) {
  thread_local Block* block = new Block();
  sit_down(block->lane);
#if defined(__SSE2__)
  unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // the chip has no subnormals
#endif
  for (int i = begin; i < end; ++i) {
    block->run(launch, i, next_serial());
    merge(*launch, *block);
  }
#if defined(__SSE2__)
  _mm_setcsr(saved);
#endif
}
}  // namespace tw
