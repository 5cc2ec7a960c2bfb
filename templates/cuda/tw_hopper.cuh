// Matrix products and barriers of Hopper's cores, as thin functions over PTX.
#pragma once
#include <stdint.h>

#define TW_DEVICE static __device__ __forceinline__
#define TW_EACH(many) _Pragma("unroll") for (int m = 0; m < many; ++m)

TW_DEVICE uint32_t tw_shared(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

TW_DEVICE void tw_barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Barriers that one thread has set up are seen by all after the block's next barrier.
TW_DEVICE void tw_barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Brings constant memory to the L2: for what a block reads itself, before it may read what others
// write. A multiple of 16 bytes.
TW_DEVICE void tw_ahead(const void* from, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(num_bytes)
               : "memory");
}

// Waits until the kernels before this one are complete. One of few blocks lets the next one's come
// at once (targets/nvidia/overlap.py, which lets all other kernels begin likewise, gives TW_FEW_BLOCKS).
TW_DEVICE void tw_wait_for_others() {
  if (gridDim.x * gridDim.y * gridDim.z <= TW_FEW_BLOCKS) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Waits for `kThreads` threads of the block to come to a barrier of their own.
template <int kName, int kThreads>
TW_DEVICE void tw_meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}

// Registers of a thread from here on, for the whole group of four warps.
template <int kCount>
TW_DEVICE void tw_more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
TW_DEVICE void tw_fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

TW_DEVICE void tw_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrivals of a warp: one lane's, for all that the warp has done so far. Race checkers do not follow
// what __syncwarp orders: for them a kernel is built so that every lane arrives.
#ifdef TW_EVERY_LANE_ARRIVES
#define TW_ARRIVALS 32
TW_DEVICE void tw_arrive_warp(uint32_t barrier, int) { tw_arrive(barrier); }
TW_DEVICE void tw_arrive_after_products(uint32_t barrier, int) { tw_arrive(barrier); }
#else
#define TW_ARRIVALS 1
TW_DEVICE void tw_arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) tw_arrive(barrier);
}
// Waiting for matrix products has brought the warp together.
TW_DEVICE void tw_arrive_after_products(uint32_t barrier, int lane) {
  if (lane == 0) tw_arrive(barrier);
}
#endif

TW_DEVICE void tw_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Rows of 128 bytes, eight to a swizzled block of 1024; `lead` is between blocks of columns.
TW_DEVICE uint64_t tw_tile(uint32_t address, uint32_t lead) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(lead >> 4) << 16 |
         (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

// The tile that begins so many bytes further on.
TW_DEVICE uint64_t tw_tile_at(uint64_t tile, uint32_t num_bytes) {
  return (tile & 0xFFFFFFFF00000000ull) | (uint32_t)((uint32_t)tile + (num_bytes >> 4));
}

#define TW_REGS16(d)                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),          \
      "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),  \
      "+f"(d[14]), "+f"(d[15])
#define TW_REGS32(d)                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),          \
      "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),  \
      "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),            \
      "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),            \
      "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define TW_NAMES16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define TW_NAMES32                                                                             \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19," \
  " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

// d [64, 64] = a [64, 16] b [64, 16]^T, plus d where `adds`; rows of a and b in shared memory.
TW_DEVICE void tw_scores(float (&d)[32], uint64_t a, uint64_t b, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " TW_NAMES32
      ", %32, %33, p, 1, 1, 0, 0;\n}\n"
      : TW_REGS32(d)
      : "l"(a), "l"(b), "r"(adds));
}

// d [64, 64] = a [64, 16] b [16, 64], plus d where `adds`; a in registers.
TW_DEVICE void tw_mix(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " TW_NAMES32
      ", {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
      : TW_REGS32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

// The same for 32 columns.
TW_DEVICE void tw_mix(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " TW_NAMES16
      ", {%16, %17, %18, %19}, %20, p, 1, 1, 1;\n}\n"
      : TW_REGS16(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

// d [64, heads] = a [64, 16] b [heads, 16]^T, plus d where `adds`; a in registers, 64 or 32 heads.
TW_DEVICE void tw_score_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " TW_NAMES32
      ", {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
      : TW_REGS32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}
TW_DEVICE void tw_score_rows(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      TW_NAMES16
      ", {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
      : TW_REGS16(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

TW_DEVICE void tw_fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TW_DEVICE void tw_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
TW_DEVICE void tw_finish(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : TW_REGS32(d)::"memory");
}
TW_DEVICE void tw_finish(float (&d)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : TW_REGS16(d)::"memory");
}
// What this thread stored to shared memory is seen by matrix products after the next barrier.
TW_DEVICE void tw_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

TW_DEVICE uint32_t tw_pack(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Four of the eight bytes of a (low) and b, by the low four fours of bits of `which`; its top bit set,
// the sign of the byte eight times.
TW_DEVICE uint32_t tw_permute(uint32_t a, uint32_t b, uint32_t which) {
  uint32_t found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(which));
  return found;
}

// Bits of a where kMask has them, else of b.
template <uint32_t kMask>
TW_DEVICE uint32_t tw_choose(uint32_t a, uint32_t b) {
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(found) : "r"(a), "r"(b), "n"(kMask));
  return found;
}

TW_DEVICE uint32_t tw_times(uint32_t a, uint32_t b) {
  uint32_t both;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
}

// The larger one; NaN where either is.
TW_DEVICE float tw_max_or_nan(float a, float b) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
  return found;
}

TW_DEVICE void tw_store16(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
TW_DEVICE void tw_store8(uint32_t address, uint2 x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
TW_DEVICE void tw_store4(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
TW_DEVICE uint4 tw_load16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

TW_DEVICE uint32_t tw_load4(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
TW_DEVICE uint32_t tw_load1(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// 16 bytes to shared memory, on their way until tw_copied.
TW_DEVICE void tw_copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
TW_DEVICE void tw_copied() { asm volatile("cp.async.wait_all;" ::: "memory"); }

TW_DEVICE void tw_prefetch(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

// Arrives, and keeps the phase from ending before so many bytes have come by tw_bulk.
TW_DEVICE void tw_arrive_for(uint32_t barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}
// Brings bytes that lie together, a multiple of 16, to shared memory.
TW_DEVICE void tw_bulk(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(num_bytes), "r"(barrier)
      : "memory");
}
// Both at once: one arrival at the barrier when the bytes are there.
TW_DEVICE void tw_copy_bytes(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier) {
  tw_arrive_for(barrier, num_bytes);
  tw_bulk(to, from, num_bytes, barrier);
}
// Arrives once all that this thread began to copy by tw_copy16 is there.
TW_DEVICE void tw_arrive_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Copies so far are one group; waits until at most kLeft of the groups are on their way.
TW_DEVICE void tw_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
TW_DEVICE void tw_copied_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Four matrices of eight rows of 16 bytes; lane 8 i + r names row r of matrix i, and gets word
// lane % 4 of row lane / 4 of each.
TW_DEVICE void tw_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
// d [16, 8] += a [16, 16] b [8, 16]^T, of one warp.
TW_DEVICE void tw_product(float (&d)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}
