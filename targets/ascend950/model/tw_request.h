// One instruction as the scalar program issues it; pipes execute it later.
#pragma once
#include <stdint.h>

#include "tw_keywords.h"

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace tw {
enum Op : uint8_t {
  kNotify,      // tpipe, id
  kWait,        // source pipe, id
  kArrive,      // id
  kAwait,       // id
  kLock,        // id
  kUnlock,      // id
  kBarrier,     //
  kBarrierAll,  //
  kGmToUb,      // dst, src, bursts, bytes, left pad, right pad, constant, element, strides
  kUbToGm,      // dst, src, bursts, bytes, dst stride, src stride
  kUbToL1,      // dst, src, bursts, blocks, src gap, dst gap
  kL1ToUb,      // dst, src, bursts, blocks, src gap, dst gap, sub block
  kGmToL1,      // dst, src, row stride, rows, columns, element, transposed
  kFillL1,      // dst, value, repeats, blocks, gap
  kL1ToL0A,     // dst, src, m start, k start, m step, k step, src stride, dst stride, element, transposed
  kL1ToL0B,     // likewise
  kL1ToL0AMx,   // dst, src, x start, y start, x step, y step, src stride, dst stride
  kL1ToL0BMx,   // likewise
  kMmad,        // c, a, b, m, k, n, clear, element code of a, of b, bias, scaled
  kL0cToUb,     // dst, src, n, m, dst stride, src stride, sub block, dual, quant, relu, nd
  kL0cToGm,     // dst, src, n, m, dst stride, src stride, quant, relu, nd
  kVector,      // thunk, x, y, z, arguments, number, pointer mask
  kIllegal,     // reason
  kOps,
};

enum Shuffle { kXor, kDown, kUp, kIndex, kSumF, kMaxF, kMinF, kSumI, kMaxI, kMinI, kMaxU, kMinU, kBallot };

struct Request {
  Op op;
  uint8_t pipe;
  int line;
  const char* file;
  const char* name;
  uint64_t a[16];
  uint32_t seq;    // order of issue in the block
  uint32_t clock;  // what the scalar program had waited for: index of a stored clock
  double issued;   // modelled time
};
}  // namespace tw

extern "C" {
TW_HIDDEN void tw_issue(const tw::Request* request);
TW_HIDDEN void tw_set_register(int which, uint64_t a, uint64_t b, uint64_t c, uint64_t d);
// SIMD loads and stores of UB: the vector pipe works off its queue first. `mask`: a byte per byte.
TW_HIDDEN void tw_simd_load(void* out, uint64_t from, int bytes, const char* name);
TW_HIDDEN void tw_simd_store(uint64_t to, const void* in, const uint8_t* mask, int bytes, const char* name);
}
