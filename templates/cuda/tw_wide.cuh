// Products of a group of warps with many columns: d [64, n] += a [64, 16] b [n, 16]^T, a in
// registers, rows of b in shared memory.
#pragma once
#include "tw_hopper.cuh"

#define TW_N0 "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define TW_N16 "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define TW_N32 "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define TW_N48 "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define TW_N64 "%64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define TW_N80 "%80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define TW_H0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TW_H16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define TW_H32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define TW_H48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define TW_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TW_D8(d, i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TW_D16(d, i) TW_D8(d, i), TW_D8(d, i + 8)
#define TW_S(...) __VA_ARGS__

// How many columns, the names of the sums, and their registers; then the names of a and b.
#define TW_WIDE(kColumns, names, sums, a_names, b_name, left)                                \
  TW_DEVICE void tw_wide(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b) {        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #kColumns "k16.f32.bf16.bf16 {" names      \
                 "}, {" a_names "}, " b_name ", 1, 1, 1, 0;"                                    \
                 : sums                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
  }                                                                                             \
  template <int kLeft>                                                                          \
  TW_DEVICE void tw_unfinished(float (&d)[kColumns / 2]) {                                      \
    asm volatile("wgmma.wait_group.sync.aligned " left ";" : sums : "n"(kLeft) : "memory");     \
  }

TW_WIDE(32, TW_N0,
        TW_S(TW_D16(d, 0)),
        "%16, %17, %18, %19", "%20", "%16")
TW_WIDE(64, TW_N0 ", " TW_N16,
        TW_S(TW_D16(d, 0), TW_D16(d, 16)),
        "%32, %33, %34, %35", "%36", "%32")
TW_WIDE(96, TW_N0 ", " TW_N16 ", " TW_N32,
        TW_S(TW_D16(d, 0), TW_D16(d, 16), TW_D16(d, 32)),
        "%48, %49, %50, %51", "%52", "%48")
TW_WIDE(128, TW_N0 ", " TW_N16 ", " TW_N32 ", " TW_N48,
        TW_S(TW_D16(d, 0), TW_D16(d, 16), TW_D16(d, 32), TW_D16(d, 48)),
        "%64, %65, %66, %67", "%68", "%64")
TW_WIDE(160, TW_N0 ", " TW_N16 ", " TW_N32 ", " TW_N48 ", " TW_N64,
        TW_S(TW_D16(d, 0), TW_D16(d, 16), TW_D16(d, 32), TW_D16(d, 48), TW_D16(d, 64)),
        "%80, %81, %82, %83", "%84", "%80")
TW_WIDE(192, TW_N0 ", " TW_N16 ", " TW_N32 ", " TW_N48 ", " TW_N64 ", " TW_N80,
        TW_S(TW_D16(d, 0), TW_D16(d, 16), TW_D16(d, 32), TW_D16(d, 48), TW_D16(d, 64), TW_D16(d, 80)),
        "%96, %97, %98, %99", "%100", "%96")
TW_WIDE(48, TW_N0 ", " TW_H16,
        TW_S(TW_D16(d, 0), TW_D8(d, 16)),
        "%24, %25, %26, %27", "%28", "%24")
TW_WIDE(80, TW_N0 ", " TW_N16 ", " TW_H32,
        TW_S(TW_D16(d, 0), TW_D16(d, 16), TW_D8(d, 32)),
        "%40, %41, %42, %43", "%44", "%40")
TW_WIDE(112, TW_N0 ", " TW_N16 ", " TW_N32 ", " TW_H48,
        TW_S(TW_D16(d, 0), TW_D16(d, 16), TW_D16(d, 32), TW_D8(d, 48)),
        "%56, %57, %58, %59", "%60", "%56")
TW_WIDE(16, TW_H0,
        TW_S(TW_D8(d, 0)),
        "%8, %9, %10, %11", "%12", "%8")
TW_WIDE(24, TW_H0 ", %8, %9, %10, %11",
        TW_S(TW_D8(d, 0), TW_D4(d, 8)),
        "%12, %13, %14, %15", "%16", "%12")
TW_WIDE(40, TW_N0 ", %16, %17, %18, %19",
        TW_S(TW_D16(d, 0), TW_D4(d, 16)),
        "%20, %21, %22, %23", "%24", "%20")
TW_WIDE(56, TW_N0 ", " TW_H16 ", %24, %25, %26, %27",
        TW_S(TW_D16(d, 0), TW_D8(d, 16), TW_D4(d, 24)),
        "%28, %29, %30, %31", "%32", "%28")
TW_WIDE(72, TW_N0 ", " TW_N16 ", %32, %33, %34, %35",
        TW_S(TW_D16(d, 0), TW_D16(d, 16), TW_D4(d, 32)),
        "%36, %37, %38, %39", "%40", "%36")

// What x holds is made before and read after what stands here.
TW_DEVICE void tw_hold(uint32_t (&x)[4]) {
  asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3]));
}

// Waits until at most kLeft of the groups of products are on their way, then gives x.
template <int kLeft, int kParts>
TW_DEVICE void tw_products_but(uint32_t (&x)[kParts][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
#pragma unroll
  for (int i = 0; i < kParts; ++i) tw_hold(x[i]);
}
