// Keywords of AscendC as plain C++: address spaces are numbers below 2^20 (an offset into the
// memory of the running core) or host addresses (global memory), so no type needs to differ.
#pragma once
#include <stdint.h>

#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __global__ __attribute__((noinline))
#define __aicore__
#define __vector__
#define __cube__
#define __mix__(aic, aiv)
#define __simt_vf__ __attribute__((noinline))
#define __simd_vf__
#define __simt_callee__
#define __simd_callee__
#define __launch_bounds__(threads)
#define __SIMT_DEVICE_FUNCTIONS_DECL__
#define __NPU_ARCH__ 3510

#ifndef TW_HIDDEN
#define TW_HIDDEN __attribute__((visibility("hidden")))
#endif

// Constant for the program that asks: one block of one core, or one thread of a vector function.
// (The compiler may keep the answer across a switch: the switch returns to the same asker.)
extern "C" {
TW_HIDDEN __attribute__((const)) int tw_block_id(void);
TW_HIDDEN __attribute__((const)) int tw_num_blocks(void);
TW_HIDDEN __attribute__((const)) int tw_core_id(void);  // 0 AIC, 1 AIV0, 2 AIV1
TW_HIDDEN __attribute__((const)) uint32_t tw_thread(int axis);
TW_HIDDEN __attribute__((const)) uint32_t tw_threads(int axis);
}

#define block_idx tw_block_id()
#define block_num tw_num_blocks()
#define ASC_IS_AIC (tw_core_id() == 0)
#define ASC_IS_AIV (tw_core_id() != 0)
inline int64_t asc_get_sub_block_id() { return tw_core_id() == 2; }
inline int64_t asc_get_sub_block_num() { return 2; }

// Host code beside a kernel: its loads and stores are none of the kernel's.
#define TW_HOST_CODE __attribute__((no_sanitize("thread")))
