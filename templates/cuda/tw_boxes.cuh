// Tiles of matrices by the copy engine, and products of e4m3 codes, as thin functions over PTX.
#pragma once
#include "tw_wide.cuh"

// Arrives at a barrier of `kThreads` threads, others of which wait there by tw_meet.
template <int kName, int kThreads>
TW_DEVICE void tw_let() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}

// What the copy engine needs to know of a matrix: the host describes it (tw_cuda.h).
struct alignas(64) tw_map {
  unsigned char bytes[128];
};

// Brings a tile whose rows have 128 bytes; bytes outside of the matrix are zeros.
TW_DEVICE void tw_box(uint32_t to, const tw_map* map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Bytes that lie together, a multiple of 16, from shared memory; a thread's groups of such copies:
// those so far are one; waits until they have been read, or are done.
TW_DEVICE void tw_bulk_out(void* to, uint32_t from, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(num_bytes)
               : "memory");
}
TW_DEVICE void tw_bulk_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
TW_DEVICE void tw_bulk_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
TW_DEVICE void tw_bulk_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// d [64, 128] = a [64, 32] b [128, 32]^T, plus d where `adds`; rows of codes in shared memory.
TW_DEVICE void tw_codes(float (&d)[64], uint64_t a, uint64_t b, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" TW_N0 ", " TW_N16 ", " TW_N32
      ", " TW_N48 "}, %64, %65, p, 1, 1;\n}\n"
      : TW_D16(d, 0), TW_D16(d, 16), TW_D16(d, 32), TW_D16(d, 48)
      : "l"(a), "l"(b), "r"(adds));
}
