// Pipes: queues in order of issue, executed when what they wait for has happened. In normal mode
// the oldest instruction goes first; in adversarial mode the youngest, so that every pipe runs as
// late as its flags allow.
#pragma once
#include "tw_checks.h"

namespace tw {
constexpr size_t kQueueLimit = 64, kAdversarialLimit = 100000;

inline uint32_t site_of(Block& block, const Request& r, int actor) {
  uint64_t key = ((uint64_t)(uintptr_t)r.name * 31 + (uint64_t)(uintptr_t)r.file) * 131 +
                 (uint64_t)r.line * 16 + (uint64_t)actor;
  auto [found, fresh] = block.site_ids.try_emplace(key, (uint32_t)block.sites.size());
  if (fresh) block.sites.push_back({r.name, r.file, r.line, actor});
  return found->second;
}

inline bool Block::ids_fit(const Request& r) {
  switch (r.op) {
    case kNotify:
    case kWait:
      if (r.a[0] == PIPE_ALL || r.pipe == PIPE_ALL) {
        fail("field out of range", describe(now_site) + ": pipe: got ALL, want one pipe");
        return false;
      }
      return range("id", r.a[1], 0, 7);
    case kArrive:
    case kAwait: return range("sync id", r.a[0], 0, running == AIC ? 31 : 15);
    case kLock:
    case kUnlock: return range("mutex id", r.a[0], 0, 31);
    default: return true;
  }
}

inline void Block::issue(const Request& given) {
  CoreState& state = core[running];
  int actor = actor_of(running, given.pipe);
  Request r = given;
  r.seq = next_seq++;
  r.clock = issue_clock[running];
  r.issued = state.time += 4;
  if (actor < 0 || given.op == kIllegal) {
    now_actor = actor < 0 ? actor_of(running, PIPE_S) : actor;
    now_site = site_of(*this, r, now_actor);
    std::string why = given.op == kIllegal && actor >= 0
                          ? (const char*)(uintptr_t)given.a[0]
                          : text("%s has no pipe %s", core_name(running), pipe_name(given.pipe));
    return fail("illegal path", describe(now_site) + ": " + why);
  }
  now_actor = actor, now_site = site_of(*this, r, actor);
  if (!ids_fit(r)) return;
  if (r.op == kLock) {
    Lock& l = lock[running][r.a[0] & 31];
    if (l.locks_issued != l.unlocks_issued)
      fail("pairing", text("%s: mutex %d is held since %s: want asc_unlock first",
                           describe(now_site).c_str(), (int)r.a[0], describe(l.by).c_str()));
    l.locks_issued = l.unlocks_issued + 1;
    l.by = sites[now_site];
    r.a[15] = l.unlocks_issued;  // unlocks that must have happened
  } else if (r.op == kUnlock) {
    Lock& l = lock[running][r.a[0] & 31];
    if (l.locks_issued != l.unlocks_issued + 1)
      fail("pairing", text("%s: mutex %d is not held: want asc_lock first",
                           describe(now_site).c_str(), (int)r.a[0]));
    l.unlocks_issued = l.locks_issued;
  }
  if (given.pipe == PIPE_S) {  // the scalar program is its own pipe
    core[running].waits = r;
    if (!ready_to_run(r, actor)) {
      core[running].blocked = true;
      yield();
    }
    execute(r, actor);
    Clock seen = clock[actor];
    if (r.op != kBarrierAll) seen.at[actor] = 0;  // what S wrote itself needs a flag
    issue_clocks.push_back(seen);
    issue_clock[running] = (uint32_t)issue_clocks.size() - 1;
    state.time = ready[actor];
    return;
  }
  if (r.op == kGmToUb || r.op == kGmToL1)
    memcpy(&r.a[11], state.registers[r.op == kGmToL1], sizeof state.registers[0]);
  queue[actor].push_back(r);
  ++queued;
  if (!launch->adversarial) {
    while (step_any()) {
    }
  }
  if (queued > (launch->adversarial ? kAdversarialLimit : kQueueLimit)) yield();
}

inline bool Block::ready_to_run(const Request& r, int actor) {
  int c = kActor[actor].core;
  switch (r.op) {
    case kWait: return flag[c][r.a[0] & 7][r.pipe & 7][r.a[1] & 7].set;
    case kAwait: return !arrivals[c][r.a[0] & 31].clocks.empty();
    case kLock: return lock[c][r.a[0] & 31].unlocks_done >= r.a[15];
    case kBarrierAll:
      for (int i = 0; i < kActors; ++i)
        if (kActor[i].core == c && !queue[i].empty()) return false;
      return true;
    default: return true;
  }
}

inline bool Block::step(int actor) {
  if (queue[actor].empty() || !ready_to_run(queue[actor].front(), actor)) return false;
  Request r = queue[actor].front();
  queue[actor].pop_front();
  --queued;
  execute(r, actor);
  return true;
}

inline bool Block::step_any() {
  int best = -1;
  for (int i = 0; i < kActors; ++i) {
    if (queue[i].empty() || !ready_to_run(queue[i].front(), i)) continue;
    bool first = best < 0 || (queue[i].front().seq < queue[best].front().seq) != launch->adversarial;
    if (first) best = i;
  }
  return best >= 0 && step(best);
}

inline void Block::execute(const Request& r, int actor) {
  now = &r, now_actor = actor, now_site = site_of(*this, r, actor);
  Clock& mine = clock[actor];
  mine.join(issue_clocks[r.clock]);
  ++epoch[actor];
  if (in_order(actor)) mine.at[actor] = epoch[actor];
  double begin = r.issued > ready[actor] ? r.issued : ready[actor];
  ready[actor] = begin;
  double cycles = 0;
  if (r.op <= kBarrierAll) {
    order(r, actor);
  } else {
    cycles = transfer(r);
    totals.busy[actor] += cycles;
    ++totals.instructions;
  }
  begin = ready[actor];
  ready[actor] = begin + cycles;
  if (launch->trace && cycles > 0)
    events.push_back({r.name, id, actor, r.line, begin, ready[actor]});
}

// The edges. What an instruction before a notify did is known to whoever waits for it.
inline void Block::order(const Request& r, int actor) {
  int c = kActor[actor].core;
  Clock known = clock[actor];
  known.at[actor] = epoch[actor];
  double& time = ready[actor];
  auto reach = [&](double t) { time = t > time ? t : time; };
  switch (r.op) {
    case kNotify: {
      Flag& f = flag[c][r.pipe & 7][r.a[0] & 7][r.a[1] & 7];
      if (f.set)
        fail("pairing", text("%s: id %d from %s to %s is set since %s: want a wait between",
                             describe(now_site).c_str(), (int)r.a[1], pipe_name(r.pipe),
                             pipe_name((int)r.a[0]), describe(f.by).c_str()));
      f.set = true, f.clock = known, f.time = time, f.by = sites[now_site];
      return;
    }
    case kWait: {
      Flag& f = flag[c][r.a[0] & 7][r.pipe & 7][r.a[1] & 7];
      f.set = false;
      clock[actor].join(f.clock);
      return reach(f.time);
    }
    case kArrive: {
      if (launch->kind != 0) {
        fail("illegal path", describe(now_site) + ": want a kernel of __mix__(1, 2)");
        return;
      }
      int to = c != AIC ? AIC : r.a[0] < 16 ? AIV0 : AIV1;
      int slot = c == AIV1 ? (int)r.a[0] + 16 : (int)(r.a[0] & (c == AIC ? 15 : 31));
      Arrivals& a = arrivals[to][slot];
      if (a.clocks.size() >= 15)
        fail("pairing", text("%s: counter %d of %s holds 15 arrivals: want a wait between",
                             describe(now_site).c_str(), slot, core_name(to)));
      a.clocks.push_back({known, time});
      a.by = sites[now_site];
      return;
    }
    case kAwait: {
      Arrivals& a = arrivals[c][r.a[0] & 31];
      clock[actor].join(a.clocks.front().first);
      reach(a.clocks.front().second);
      a.clocks.pop_front();
      return;
    }
    case kLock: {
      Lock& l = lock[c][r.a[0] & 31];
      clock[actor].join(l.released);
      return reach(l.time);
    }
    case kUnlock: {
      Lock& l = lock[c][r.a[0] & 31];
      l.released.join(known);
      ++l.unlocks_done;
      l.time = time > l.time ? time : l.time;
      return;
    }
    case kBarrier: clock[actor].at[actor] = epoch[actor]; return;
    default:  // every pipe of the core has finished
      for (int i = 0; i < kActors; ++i)
        if (kActor[i].core == c) {
          Clock theirs = clock[i];
          theirs.at[i] = epoch[i];
          clock[actor].join(theirs);
          reach(ready[i]);
        }
      issue_clocks.push_back(clock[actor]);
      issue_clock[c] = (uint32_t)issue_clocks.size() - 1;
  }
}

inline bool Block::may_resume(const CoreState& state) {
  if (state.finished) return false;
  return !state.blocked || ready_to_run(state.waits, actor_of((int)(&state - core), PIPE_S));
}

inline void Block::yield() {
  int self = running;
  switch_to(core[self].fiber, scheduler);
  running = self;
}

inline void Block::die() {  // abandons the running program, and with it the block
  dead = true;
  __builtin_longjmp(abandoned, 1);
}

inline void Block::deadlock() {
  for (int i = 0; i < kActors; ++i) {
    const CoreState& state = core[kActor[i].core];
    bool scalar = kActor[i].pipe == PIPE_S;
    if (scalar ? state.finished || !state.blocked : queue[i].empty()) continue;
    const Request& r = scalar ? state.waits : queue[i].front();
    Where where{r.name, r.file, r.line, i};
    std::string what;
    if (r.op == kWait)
      what = text("waits for id %d from %s, which nothing notifies", (int)r.a[1], pipe_name((int)r.a[0]));
    else if (r.op == kAwait)
      what = text("waits for an arrival at %d, which never comes", (int)r.a[0]);
    else if (r.op == kLock)
      what = text("waits for mutex %d, which is never unlocked", (int)r.a[0]);
    else
      what = "waits for pipes that never finish";
    fail("deadlock", describe(where) + " " + what, describe(where));
  }
}
}  // namespace tw
