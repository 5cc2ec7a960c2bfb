// Checks of every access: bounds, bytes never written, order.
#pragma once
#include "tw_block.h"

namespace tw {
inline std::string Block::describe(const Where& where) const {
  const char* core = core_name(kActor[where.actor].core);
  const char* pipe = pipe_name(kActor[where.actor].pipe);
  if (where.line == 0) return text("%s on %s %s", where.name, core, pipe);
  return text("%s on %s %s (%s:%d)", where.name, core, pipe, base_name(where.file), where.line);
}

inline std::string Block::describe(uint32_t site) const { return describe(sites[site]); }

inline void Block::fail(const char* kind, const std::string& rest, const std::string& other) {
  const Where& where = sites[now_site];
  std::string key = text("%s %s %d %d ", kind, where.name, where.line, where.actor) + other;
  launch->reports.add(key, std::string(kind) + ": " + rest);
}

inline Memory* Block::memory_of(int place, int core_id) {
  switch (place) {
    case UB: return &ub[core_id];
    case L1: return &l1;
    case L0A: return &l0a;
    case L0B: return &l0b;
    default: return &l0c;
  }
}

inline bool Block::ordered(int actor, uint32_t seen) const {
  if (actor == now_actor && in_order(actor)) return true;
  // Of its own pipe an engine for transfers knows what a barrier or another pipe's answer told it.
  return seen <= clock[now_actor].at[actor] || (actor == now_actor && seen == epoch[actor]);
}

__attribute__((cold, noinline)) inline void Block::race(Memory& memory, uint32_t cell, uint32_t other, bool write, bool other_wrote) {
  const Where& there = sites[other];
  const char* mine = pipe_name(kActor[now_actor].pipe);
  const char* theirs = pipe_name(kActor[there.actor].pipe);
  const char* owner = memory.place == UB ? core_name(memory.core) : "AIC";
  std::string want = kActor[there.actor].core != kActor[now_actor].core
                         ? text("an arrival of %s %s that %s %s waits for",
                                core_name(kActor[there.actor].core), theirs,
                                core_name(kActor[now_actor].core), mine)
                     : there.actor == now_actor
                         ? text("asc_sync_pipe(PIPE_%s) between them", mine)
                         : text("a notify of %s that %s waits for", theirs, mine);
  fail("race", text("%s %s %s of %s, bytes %u to %u, that %s %s: nothing orders them, want %s",
                    describe(now_site).c_str(), write ? "writes" : "reads",
                    place_name(memory.place), owner, cell * kCell, cell * kCell + kCell - 1,
                    describe(other).c_str(), other_wrote ? "wrote" : "reads", want.c_str()), describe(other) + place_name(memory.place));
}

// Says whether this instruction has touched the cell in the same way: then it was checked.
inline bool Block::seen_before(Memory& m, uint64_t offset, uint64_t bytes, bool write) {
  uint32_t c = (uint32_t)offset / kCell, first = (uint32_t)offset % kCell;
  if (first + bytes > kCell || offset >= m.usable || m.slot[now_actor] < 0) return false;
  if (m.page_launch[c / kPageCells] != serial) return false;
  Cell& cell = m.cells[c];
  uint32_t now = epoch[now_actor], mask = byte_mask(first, first + (uint32_t)bytes - 1);
  uint32_t& written = m.written_of(c);
  if (write) {
    if (cell.writer_epoch != now || cell.writer != now_actor) return false;
    written |= mask;
    return true;
  }
  return cell.reader_epoch[m.slot[now_actor]] == now && (written & mask) == mask;
}

inline bool Block::touch(Memory& m, uint64_t offset, uint64_t bytes, bool write) {
  if (bytes == 0) return true;
  if (seen_before(m, offset, bytes, write)) {
    if (offset < m.low) m.low = (uint32_t)offset;
    if (offset + bytes > m.high) m.high = (uint32_t)(offset + bytes), m.high_site = now_site;
    return true;
  }
  return touch_first(m, offset, bytes, write);
}

__attribute__((cold, noinline)) inline bool Block::outside(Memory& m, uint64_t offset, uint64_t bytes,
                                                            bool write) {
  fail("overflow", text("%s %s %s bytes %llu to %llu: want at most %u bytes",
                        describe(now_site).c_str(), write ? "writes" : "reads", place_name(m.place),
                        (unsigned long long)offset, (unsigned long long)(offset + bytes - 1),
                        m.usable));
  return false;
}

__attribute__((cold, noinline)) inline bool Block::unreachable(Memory& m) {
  fail("illegal path", text("%s: %s %s does not reach %s", describe(now_site).c_str(),
                            core_name(kActor[now_actor].core), pipe_name(kActor[now_actor].pipe),
                            place_name(m.place)));
  return false;
}

__attribute__((cold, noinline)) inline void Block::unwritten(Memory& m, uint32_t cell) {
  fail("uninitialised read",
       text("%s reads %s bytes %u to %u, of which some were never written",
            describe(now_site).c_str(), place_name(m.place), cell * kCell, cell * kCell + 31));
}

inline bool Block::touch_first(Memory& m, uint64_t offset, uint64_t bytes, bool write) {
  if (offset + bytes > m.usable) return outside(m, offset, bytes, write);
  if (m.slot[now_actor] < 0) return unreachable(m);
  if (offset < m.low) m.low = (uint32_t)offset;
  if (offset + bytes > m.high) m.high = (uint32_t)(offset + bytes), m.high_site = now_site;
  uint32_t first = (uint32_t)offset / kCell, last = (uint32_t)(offset + bytes - 1) / kCell;
  uint32_t mine = epoch[now_actor];
  int slot = m.slot[now_actor];
  uint64_t fine = 0;  // the writer that was asked last, and its epoch: it is in order
  for (uint32_t c = first; c <= last; ++c) {
    if (c == first || c % kPageCells == 0) m.open(c, serial);
    Cell& cell = m.cells[c];
    uint32_t& written = m.written_of(c);
    uint32_t mask = byte_mask(c == first ? offset % kCell : 0,
                              c == last ? (offset + bytes - 1) % kCell : 31);
    uint64_t writer = (uint64_t)cell.writer << 32 | cell.writer_epoch;
    if (cell.writer_epoch && writer != fine) {
      if (ordered(cell.writer, cell.writer_epoch)) fine = writer;
      else race(m, c, cell.writer_site, write, true);
    }
    if (write) {
      if (cell.is_read())
        for (int s = 0; s < kSlots; ++s)
          if (cell.reader_epoch[s] && s != slot && !ordered(m.actor[s], cell.reader_epoch[s]))
            race(m, c, cell.reader_site[s], write, false);
      cell.writer = (uint8_t)now_actor, cell.writer_epoch = mine, cell.writer_site = now_site;
      written |= mask;
      memset(cell.reader_epoch, 0, sizeof cell.reader_epoch);
      if (m.lanes) m.lane_of(c).read = 0;  // a thread that reads on is noted again
    } else {
      if ((written & mask) != mask) unwritten(m, c);
      cell.reader_epoch[slot] = mine, cell.reader_site[slot] = now_site;
    }
  }
  return true;
}

// The tensor that holds these bytes, or -1.
inline int Block::tensor_at(uintptr_t address, uint64_t bytes) {
  int found = launch->gm.find(address, bytes, gm_tensor);
  if (found >= 0) gm_tensor = found;
  return found;
}

inline bool Block::touch_gm(uintptr_t address, uint64_t bytes, bool write) {
  GlobalMemory& gm = launch->gm;
  int index = tensor_at(address, bytes);
  const char* verb = write ? "writes" : "reads";
  if (index < 0) {
    int near = gm.nearest(address);
    if (near < 0) return false;
    const Tensor& t = gm.tensor[near];
    long long begin = (long long)(address - t.base);
    fail("out of bounds", text("%s %s bytes %lld to %lld of tensor '%s': want 0 to %llu",
                               describe(now_site).c_str(), verb, begin,
                               begin + (long long)bytes - 1, t.name,
                               (unsigned long long)t.bytes - 1));
    return false;
  }
  const Tensor& tensor = gm.tensor[index];
  if (!tensor.writable) {
    if (write)
      fail("out of bounds", text("%s writes tensor '%s', which is an input",
                                 describe(now_site).c_str(), tensor.name));
    return !write;
  }
  uint64_t unit = (uint64_t)tensor.unit, begin = address - tensor.base;
  uint64_t count = (begin + bytes + unit - 1) / unit - begin / unit;
  Mark mine{};
  mine.block = (uint64_t)id & 0xffff, mine.actor = (uint64_t)now_actor;
  mine.epoch = epoch[now_actor], mine.line = (uint64_t)sites[now_site].line;
  auto conflict = [&](Mark seen) {
    return seen.epoch && (seen.block != mine.block || !ordered((int)seen.actor, (uint32_t)seen.epoch));
  };
  auto say = [&](Mark seen, bool wrote) {
    std::string who = text("%s %s of block %d (line %d)", core_name(kActor[seen.actor].core),
                           pipe_name(kActor[seen.actor].pipe), (int)seen.block, (int)seen.line);
    fail("race", text("%s of block %d %s tensor '%s' where %s %s: nothing orders them",
                      describe(now_site).c_str(), id, verb, tensor.name, who.c_str(),
                      wrote ? "wrote" : "reads"), tensor.name);
  };
  gm.shadow[index].visit(begin / unit, count, gm.launch, [&](GmCell& cell) {
    if (conflict(cell.writer)) say(cell.writer, true);
    if (write && conflict(cell.reader)) say(cell.reader, false);
    (write ? cell.writer : cell.reader) = mine;
  });
  return true;
}

inline bool Block::range(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return true;
  fail("field out of range", text("%s: %s: got %lld, want %llu to %llu", describe(now_site).c_str(),
                                  field, (long long)value, (unsigned long long)low,
                                  (unsigned long long)high), field);
  return false;
}

inline bool Block::aligned(const char* what, uint64_t address, uint64_t to) {
  if (address % to == 0) return true;
  fail("misaligned", text("%s: %s at byte %llu: want a multiple of %llu",
                          describe(now_site).c_str(), what, (unsigned long long)address,
                          (unsigned long long)to), what);
  return false;
}
}  // namespace tw
