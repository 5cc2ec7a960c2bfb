// Calls of the scalar program of a core. Each is checked for the ranges of its fields when it
// executes on its pipe; docs/ascend950.md lists arguments, units, pipes and sources.
#pragma once
#include <assert.h>
#include <stdio.h>

#include <type_traits>

#include "tw_request.h"
#include "tw_types.h"

#define TW_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define TW_AT file, line

namespace tw {
template <class... A>
inline void issue(Op op, pipe_t pipe, const char* name, const char* file, int line, A... args) {
  Request request{op, (uint8_t)pipe, line, file, name, {(uint64_t)args...}, 0, 0, 0};
  tw_issue(&request);
}
template <class T>
inline uint64_t at(T* p) { return (uint64_t)(uintptr_t)p; }

// Codes of element types for the matrix unit.
template <class T> struct ElementCode { static constexpr int value = 0; };
template <> struct ElementCode<float> { static constexpr int value = 1; };
template <> struct ElementCode<bfloat16_t> { static constexpr int value = 2; };
template <> struct ElementCode<half> { static constexpr int value = 3; };
template <> struct ElementCode<float8_e4m3_t> { static constexpr int value = 4; };
template <> struct ElementCode<float8_e5m2_t> { static constexpr int value = 5; };
template <> struct ElementCode<int8_t> { static constexpr int value = 6; };
template <> struct ElementCode<int4b_t> { static constexpr int value = 7; };
template <> struct ElementCode<fp4x2_e2m1_t> { static constexpr int value = 8; };
template <> struct ElementCode<fp4x2_e1m2_t> { static constexpr int value = 9; };
}  // namespace tw

enum asc_load_l2_cache_mode { TW_LOAD_L2 };
enum asc_store_l2_cache_mode { TW_STORE_L2 };
enum asc_dual_dst_mode { TW_DUAL };
enum asc_unit_flag_mode { TW_UNIT_FLAG };
enum asc_quant_mode { TW_QUANT };
enum asc_relu_pre_mode { TW_RELU };
enum ascMutexExecuteMode { ASC_LOCK_BLOCK, ASC_LOCK_NON_BLOCK };
struct asc_fill_value_config { uint64_t repeat, blk_num, dst_gap; };

inline void asc_init() {}

// --- order --------------------------------------------------------------------------------------

inline void asc_sync_notify(pipe_t pipe, pipe_t tpipe, int id, TW_HERE) {
  tw::issue(tw::kNotify, pipe, "asc_sync_notify", TW_AT, tpipe, id);
}
inline void asc_sync_wait(pipe_t pipe, pipe_t tpipe, int id, TW_HERE) {
  tw::issue(tw::kWait, tpipe, "asc_sync_wait", TW_AT, pipe, id);
}
inline void asc_sync_intra_arrive(pipe_t pipe, int id, TW_HERE) {
  tw::issue(tw::kArrive, pipe, "asc_sync_intra_arrive", TW_AT, id);
}
inline void asc_sync_intra_wait(pipe_t pipe, int id, TW_HERE) {
  tw::issue(tw::kAwait, pipe, "asc_sync_intra_wait", TW_AT, id);
}
inline void asc_lock(pipe_t pipe, int id, ascMutexExecuteMode mode = ASC_LOCK_BLOCK, TW_HERE) {
  tw::issue(tw::kLock, pipe, "asc_lock", TW_AT, id, mode);
}
inline void asc_unlock(pipe_t pipe, int id, ascMutexExecuteMode mode = ASC_LOCK_BLOCK, TW_HERE) {
  tw::issue(tw::kUnlock, pipe, "asc_unlock", TW_AT, id, mode);
}
inline void asc_sync(TW_HERE) { tw::issue(tw::kBarrierAll, PIPE_S, "asc_sync", TW_AT); }
inline void asc_sync_pipe(pipe_t pipe, TW_HERE) {
  if (pipe == PIPE_ALL) return asc_sync(TW_AT);
  tw::issue(tw::kBarrier, pipe, "asc_sync_pipe", TW_AT);
}

// --- copies -------------------------------------------------------------------------------------

inline void asc_set_copy_pad_val(uint64_t value) { tw_set_register(0, value, 0, 0, 0); }
inline void asc_set_gm2l1_nz_para(int nd_num, int row_stride, int c0_stride, int nd_stride) {
  tw_set_register(1, nd_num, row_stride, c0_stride, nd_stride);
}
inline void asc_set_l0c_copy_nz_para(int nd_num, int src_stride, int dst_stride) {
  tw_set_register(2, nd_num, src_stride, dst_stride, 0);
}

template <class T>
inline void asc_copy_gm2ub_align(T* dst, T* src, int64_t bursts, int64_t bytes, int left, int right,
                                 bool constant, int, int64_t src_stride, int64_t dst_stride,
                                 TW_HERE) {
  tw::issue(tw::kGmToUb, PIPE_MTE2, "asc_copy_gm2ub_align", TW_AT, tw::at(dst), tw::at(src), bursts,
            bytes, left, right, constant, sizeof(T), src_stride, dst_stride);
}
template <class T>
inline void asc_copy_gm2ub_align(T* dst, T* src, uint32_t size, TW_HERE) {
  asc_copy_gm2ub_align(dst, src, 1, size, 0, 0, false, 0, size, size, TW_AT);
}
template <class T>
inline void asc_copy_ub2gm_align(T* dst, T* src, int64_t bursts, int64_t bytes, int,
                                 int64_t dst_stride, int64_t src_stride, TW_HERE) {
  tw::issue(tw::kUbToGm, PIPE_MTE3, "asc_copy_ub2gm_align", TW_AT, tw::at(dst), tw::at(src), bursts,
            bytes, dst_stride, src_stride, sizeof(T));
}
template <class T>
inline void asc_copy_ub2gm_align(T* dst, T* src, uint32_t size, TW_HERE) {
  asc_copy_ub2gm_align(dst, src, 1, size, 0, size, size, TW_AT);
}
inline void asc_copy_ub2l1(void* dst, void* src, int bursts, int blocks, int src_gap, int dst_gap,
                           TW_HERE) {
  tw::issue(tw::kUbToL1, PIPE_MTE3, "asc_copy_ub2l1", TW_AT, tw::at(dst), tw::at(src), bursts,
            blocks, src_gap, dst_gap);
}
inline void asc_copy_ub2l1(void* dst, void* src, uint32_t size, TW_HERE) {
  asc_copy_ub2l1(dst, src, 1, (int)(size / 32), 0, 0, TW_AT);
}
inline void asc_copy_l12ub(void* dst, void* src, bool sub_block, int bursts, int blocks,
                           int src_gap, int dst_gap, TW_HERE) {
  tw::issue(tw::kL1ToUb, PIPE_MTE1, "asc_copy_l12ub", TW_AT, tw::at(dst), tw::at(src), bursts,
            blocks, src_gap, dst_gap, sub_block);
}
template <class T>
inline void asc_copy_gm2l1_nd2nz(T* dst, T* src, int64_t row_bytes, int, int64_t rows,
                                 int64_t columns, int64_t matrix_stride, bool, TW_HERE) {
  tw::issue(tw::kGmToL1, PIPE_MTE2, "asc_copy_gm2l1_nd2nz", TW_AT, tw::at(dst), tw::at(src),
            row_bytes, rows, columns, matrix_stride, sizeof(T), 0);
}
template <class T>
inline void asc_copy_gm2l1_dn2nz(T* dst, T* src, int64_t row_bytes, int, int64_t rows,
                                 int64_t columns, int64_t matrix_stride, bool, TW_HERE) {
  tw::issue(tw::kGmToL1, PIPE_MTE2, "asc_copy_gm2l1_dn2nz", TW_AT, tw::at(dst), tw::at(src),
            row_bytes, rows, columns, matrix_stride, sizeof(T), 1);
}
template <class T>
inline void asc_fill_l1(T* dst, uint32_t value, const asc_fill_value_config& config, TW_HERE) {
  tw::issue(tw::kFillL1, PIPE_MTE2, "asc_fill_l1", TW_AT, tw::at(dst), value, config.repeat,
            config.blk_num, config.dst_gap);
}

#define TW_L1_TO_L0(call, op, transposed)                                                        \
  template <class T>                                                                             \
  inline void call(T* dst, T* src, int m_start, int k_start, int m_step, int k_step,             \
                   int src_stride, int dst_stride, TW_HERE) {                                    \
    tw::issue(tw::op, PIPE_MTE1, #call, TW_AT, tw::at(dst), tw::at(src), m_start, k_start,       \
              m_step, k_step, src_stride, dst_stride, tw::ElementCode<T>::value == 7 ? 0         \
              : sizeof(T), transposed);                                                          \
  }
TW_L1_TO_L0(asc_copy_l12l0a, kL1ToL0A, 0)
TW_L1_TO_L0(asc_copy_l12l0b, kL1ToL0B, 0)
TW_L1_TO_L0(asc_copy_l12l0a_transpose, kL1ToL0A, 1)
TW_L1_TO_L0(asc_copy_l12l0b_transpose, kL1ToL0B, 1)
#undef TW_L1_TO_L0
// `dst`: the address of the operands in L0, divided by 16.
inline void asc_copy_l12l0a_mx(uint64_t dst, fp8_e8m0_t* src, int x_start, int y_start, int x_step,
                               int y_step, int src_stride, int dst_stride, TW_HERE) {
  tw::issue(tw::kL1ToL0AMx, PIPE_MTE1, "asc_copy_l12l0a_mx", TW_AT, dst, tw::at(src), x_start,
            y_start, x_step, y_step, src_stride, dst_stride);
}
inline void asc_copy_l12l0b_mx(uint64_t dst, fp8_e8m0_t* src, int x_start, int y_start, int x_step,
                               int y_step, int src_stride, int dst_stride, TW_HERE) {
  tw::issue(tw::kL1ToL0BMx, PIPE_MTE1, "asc_copy_l12l0b_mx", TW_AT, dst, tw::at(src), x_start,
            y_start, x_step, y_step, src_stride, dst_stride);
}

// --- matrices -----------------------------------------------------------------------------------

template <class C, class A, class B>
inline void asc_mmad(C* c, A* a, B* b, int m, int k, int n, int, bool, bool from_bias, bool clear,
                     TW_HERE) {
  tw::issue(tw::kMmad, PIPE_M, "asc_mmad", TW_AT, tw::at(c), tw::at(a), tw::at(b), m, k, n, clear,
            tw::ElementCode<A>::value, tw::ElementCode<B>::value, from_bias, 0);
}
template <class C, class A, class B>
inline void asc_mmad_mx(C* c, A* a, B* b, int m, int k, int n, int, bool, bool from_bias, bool clear,
                        TW_HERE) {
  tw::issue(tw::kMmad, PIPE_M, "asc_mmad_mx", TW_AT, tw::at(c), tw::at(a), tw::at(b), m, k, n, clear,
            tw::ElementCode<A>::value, tw::ElementCode<B>::value, from_bias, 1);
}
template <class D, class C>
inline void asc_copy_l0c2ub(D* dst, C* src, int n, int m, int dst_stride, int src_stride,
                            int sub_block, int dual, int, int quant, int relu, bool, bool nd,
                            bool dn, bool, TW_HERE) {
  tw::issue(tw::kL0cToUb, PIPE_FIX, "asc_copy_l0c2ub", TW_AT, tw::at(dst), tw::at(src), n, m,
            dst_stride, src_stride, sub_block, dual, quant, relu, nd, dn, sizeof(D));
}
template <class D, class C>
inline void asc_copy_l0c2gm(D* dst, C* src, int n, int m, int dst_stride, int src_stride, int, int,
                            int quant, int relu, bool, bool nd, bool dn, bool, TW_HERE) {
  tw::issue(tw::kL0cToGm, PIPE_FIX, "asc_copy_l0c2gm", TW_AT, tw::at(dst), tw::at(src), n, m,
            dst_stride, src_stride, 0, 0, quant, relu, nd, dn, sizeof(D));
}
enum class asc_hf32_round_mode { NEAREST_AWAY, NEAREST_EVEN };
inline void asc_disable_hf32() {}

// --- paths that this chip does not have, and what the model does not have -----------------------

// Macros, so that the line reported is the caller's.
#define TW_ILLEGAL(pipe, call, reason) \
  tw::issue(tw::kIllegal, pipe, call, __FILE__, __LINE__, tw::at((const char*)reason))
#define asc_copy_l12gm(...) \
  TW_ILLEGAL(PIPE_MTE1, "asc_copy_l12gm", "this chip has no path from L1 to GM: go through UB")
#define asc_copy_gm2l0a(...) \
  TW_ILLEGAL(PIPE_MTE2, "asc_copy_gm2l0a", "this chip has no path from GM to L0A: go through L1")
#define asc_copy_gm2l0b(...) \
  TW_ILLEGAL(PIPE_MTE2, "asc_copy_gm2l0b", "this chip has no path from GM to L0B: go through L1")
#define asc_mmad_s4(...) \
  TW_ILLEGAL(PIPE_M, "asc_mmad_s4", "this chip has no int4 matrices: want int8, fp8 or fp4")
#define asc_mmad_sparse(...) \
  TW_ILLEGAL(PIPE_M, "asc_mmad_sparse", "this chip has no structured sparsity")
#define TW_UNMODELLED "the model does not have it yet"
#define asc_enable_hf32(...) TW_ILLEGAL(PIPE_M, "asc_enable_hf32", TW_UNMODELLED)
#define TW_UNORDERED "an atomic has no fixed order of accumulation"
#define asc_set_atomic_add(...) TW_ILLEGAL(PIPE_MTE3, "asc_set_atomic_add", TW_UNORDERED)
#define asc_set_atomic_max(...) TW_ILLEGAL(PIPE_MTE3, "asc_set_atomic_max", TW_UNORDERED)
#define asc_set_atomic_min(...) TW_ILLEGAL(PIPE_MTE3, "asc_set_atomic_min", TW_UNORDERED)
inline void asc_set_atomic_none() {}
inline void asc_set_hf32_round_mode(asc_hf32_round_mode) {}
inline void asc_set_mmad_direction_m() {}
inline void asc_set_mmad_direction_n() {}
