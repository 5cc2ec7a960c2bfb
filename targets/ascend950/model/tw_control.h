// The C interface: launching, modes, and what launches did.
#pragma once
#include "tw_launch.h"
#ifdef TW_WITH_HOST
#include "tw_host.h"
#endif

namespace tw {
struct KernelFacts {
  std::string kernel;
  uint64_t launches = 0;
  Totals totals;
  uint32_t low[kPlaces], high[kPlaces];
  std::vector<Range> ranges;
};

struct Control {
  bool adversarial = false, trace = false, map = false;
  std::mutex mutex;
  std::vector<KernelFacts> facts;
  std::vector<Event> events;
  std::vector<std::string> event_kernels;
  double offset = 0;  // modelled time before the launch that runs
};
inline Control control;

inline const char* op_path(int op) {
  switch (op) {
    case kGmToUb: return "gm_to_ub";
    case kUbToGm: return "ub_to_gm";
    case kUbToL1: return "ub_to_l1";
    case kL1ToUb: return "l1_to_ub";
    case kGmToL1: return "gm_to_l1";
    case kL1ToL0A: return "l1_to_l0a";
    case kL1ToL0B: return "l1_to_l0b";
    case kL1ToL0AMx: return "l1_to_l0a_mx";
    case kL1ToL0BMx: return "l1_to_l0b_mx";
    case kL0cToUb: return "l0c_to_ub";
    case kL0cToGm: return "l0c_to_gm";
    default: return nullptr;
  }
}

inline void remember(Launch& launch) {
  std::lock_guard<std::mutex> hold(control.mutex);
  KernelFacts* found = nullptr;
  for (auto& f : control.facts) if (f.kernel == launch.kernel) found = &f;
  if (!found) {
    control.facts.emplace_back();
    found = &control.facts.back();
    found->kernel = launch.kernel;
    std::fill(found->low, found->low + kPlaces, ~0u);
    std::fill(found->high, found->high + kPlaces, 0u);
  }
  ++found->launches;
  for (int i = 0; i < kActors; ++i) found->totals.busy[i] += launch.totals.busy[i];
  for (int i = 0; i < kOps; ++i) found->totals.bytes[i] += launch.totals.bytes[i];
  found->totals.finish += launch.totals.finish;
  found->totals.instructions += launch.totals.instructions;
  for (int p = 0; p < kPlaces; ++p) {
    found->low[p] = std::min(found->low[p], launch.low[p]);
    found->high[p] = std::max(found->high[p], launch.high[p]);
  }
  if (found->ranges.empty()) found->ranges = launch.ranges;
  for (Event e : launch.events) {
    e.begin += control.offset, e.end += control.offset;
    control.events.push_back(e);
    control.event_kernels.push_back(launch.kernel);
  }
  control.offset += launch.totals.finish + 1000;
}

inline std::string facts_json() {
  std::string out = "[";
  for (const auto& f : control.facts) {
    out += text("%s{\"kernel\":\"%s\",\"launches\":%llu,\"cycles\":%.0f,\"instructions\":%llu,\"busy\":{",
                out.size() > 1 ? "," : "", f.kernel.c_str(), (unsigned long long)f.launches,
                f.totals.finish, (unsigned long long)f.totals.instructions);
    const char* comma = "";
    for (int i = 0; i < kActors; ++i)
      if (f.totals.busy[i] > 0)
        out += text("%s\"%s %s\":%.0f", comma, core_name(kActor[i].core), pipe_name(kActor[i].pipe),
                    f.totals.busy[i]), comma = ",";
    out += "},\"bytes\":{", comma = "";
    for (int i = 0; i < kOps; ++i)
      if (f.totals.bytes[i] && op_path(i))
        out += text("%s\"%s\":%llu", comma, op_path(i), (unsigned long long)f.totals.bytes[i]), comma = ",";
    out += "},\"buffers\":{", comma = "";
    for (int p = 0; p < kPlaces; ++p)
      if (f.high[p] > f.low[p])
        out += text("%s\"%s\":[%u,%u,%u]", comma, place_name(p), f.low[p], f.high[p], kUsable[p]), comma = ",";
    out += "},\"map\":[", comma = "";
    for (const Range& r : f.ranges) {
      const Actor& by = kActor[r.by.actor];
      std::string owner = r.place == UB ? std::string(" of ") + core_name(r.core) : "";
      out += text("%s[\"%s%s\",%u,%u,\"%s %s\",\"%s\",%d]", comma, place_name(r.place), owner.c_str(),
                  r.first, r.end, core_name(by.core), pipe_name(by.pipe), r.by.name, r.by.line);
      comma = ",";
    }
    out += "]}";
  }
  return out + "]";
}

// The Trace Event format, which Perfetto loads: a process per block, a thread per pipe. One unit
// of its time is one cycle.
inline std::string trace_json() {
  std::string out = "{\"traceEvents\":[";
  for (size_t i = 0; i < control.events.size(); ++i) {
    const Event& e = control.events[i];
    out += text("%s{\"name\":\"%s\",\"ph\":\"X\",\"ts\":%.1f,\"dur\":%.1f,\"pid\":%d,"
                "\"tid\":\"%s %s\",\"args\":{\"kernel\":\"%s\",\"line\":%d}}",
                i ? ",\n" : "", e.name, e.begin, e.end - e.begin, e.block,
                core_name(kActor[e.actor].core), pipe_name(kActor[e.actor].pipe),
                control.event_kernels[i].c_str(), e.line);
  }
  return out + "]}";
}

inline int64_t hand_out(const std::string& text, char* buffer, int64_t size) {
  if (buffer && size > (int64_t)text.size()) memcpy(buffer, text.c_str(), text.size() + 1);
  return (int64_t)text.size() + 1;
}
}  // namespace tw

extern "C" {
// Runs a kernel; returns 0, or 1 with its faults as one line in `message`.
TW_HIDDEN int tw_model_launch(const char* kernel, int kind, int blocks, void (*program)(void*),
                              void* argument, const tw::Tensor* tensors, int count, char* message,
                              int64_t size) {
  tw::Launch launch;
  launch.kernel = kernel, launch.kind = kind, launch.num_blocks = blocks;
  launch.adversarial = tw::control.adversarial, launch.trace = tw::control.trace;
  launch.map = tw::control.map;
  launch.program = program, launch.argument = argument;
  std::fill(launch.low, launch.low + tw::kPlaces, ~0u);
  std::fill(launch.high, launch.high + tw::kPlaces, 0u);
  launch.gm.open(tensors, count);
#ifdef TW_WITH_HOST
  tw_parallel(blocks, [](void* l, int64_t begin, int64_t end, int) {
    tw::run_blocks((tw::Launch*)l, (int)begin, (int)end);
  }, &launch);
#else
  tw::run_blocks(&launch, 0, blocks);
#endif
  launch.gm.close();
  tw::remember(launch);
  if (launch.reports.empty()) return 0;
  auto found = launch.reports.sorted();
  std::string all;
  for (size_t i = 0; i < found.size() && i < 8; ++i) all += (i ? "; " : "") + found[i];
  if (found.size() > 8) all += tw::text("; and %d more", (int)found.size() - 8);
  if (size > 0) snprintf(message, (size_t)size, "%s", all.c_str());
  return 1;
}

#define TW_EXPORTED __attribute__((visibility("default")))
// `keep`: 1 a timeline, 2 who wrote what stands in the memories of block 0, 3 both.
TW_EXPORTED void tw_model_set(int adversarial, int keep) {
  tw::control.adversarial = adversarial, tw::control.trace = keep & 1, tw::control.map = keep & 2;
}
TW_EXPORTED void tw_model_reset(void) {
  tw::control.facts.clear(), tw::control.events.clear(), tw::control.event_kernels.clear();
  tw::control.offset = 0;
}
// Both return the bytes they need; they write if those fit.
TW_EXPORTED int64_t tw_model_facts(char* buffer, int64_t size) {
  return tw::hand_out(tw::facts_json(), buffer, size);
}
TW_EXPORTED int64_t tw_model_trace(char* buffer, int64_t size) {
  return tw::hand_out(tw::trace_json(), buffer, size);
}
}
