// SIMT vector functions: launch, barrier, shuffles. Loads and stores are plain C++: the compiler
// calls the model for each of them (-fsanitize=thread without its run time).
#pragma once
#include <type_traits>
#include <utility>

#include "tw_calls.h"

namespace cce {
struct dim3 {
  uint32_t x, y, z;
  dim3(uint32_t x_, uint32_t y_ = 1, uint32_t z_ = 1) : x(x_), y(y_), z(z_) {}
};
}  // namespace cce
using cce::dim3;

struct tw_thread_axes {
  struct Axis {
    int axis;
    operator uint32_t() const { return tw_thread(axis); }
  };
  static constexpr Axis x{0}, y{1}, z{2};
};
struct tw_block_axes {
  struct Axis {
    int axis;
    operator uint32_t() const { return tw_threads(axis); }
  };
  static constexpr Axis x{0}, y{1}, z{2};
};
struct tw_grid_axes {
  struct Axis {
    int axis;
    operator uint32_t() const { return axis ? 0 : (uint32_t)tw_block_id(); }
  };
  static constexpr Axis x{0}, y{1}, z{2};
};
#define blockIdx tw_grid_axes()
#define threadIdx tw_thread_axes()
#define blockDim tw_block_axes()

namespace tw {
template <auto kFunction, class R, class... P>
struct Thunk {
  template <size_t... I>
  TW_HOST_CODE static void call(const uint64_t* words, std::index_sequence<I...>) {
    kFunction(unpack<P>(words[I])...);
  }
  TW_HOST_CODE static void run(const uint64_t* words) { call(words, std::index_sequence_for<P...>{}); }
  template <class T>
  TW_HOST_CODE static T unpack(uint64_t word) {
    T value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
  }
};

template <class T>
inline uint64_t pack(T value) {
  uint64_t word = 0;
  static_assert(sizeof value <= 8, "vector functions take scalars and pointers");
  __builtin_memcpy(&word, &value, sizeof value);
  return word;
}

template <auto kFunction, class R, class... P, class... A>
inline void call_vector(R (*)(P...), dim3 threads, const char* file, int line, A... args) {
  static_assert(sizeof...(P) == sizeof...(A), "as many arguments as parameters");
  static_assert(sizeof...(P) <= 12, "the model passes at most twelve arguments");
  uint64_t pointers = 0, bit = 1;
  ((pointers |= std::is_pointer_v<P> ? bit : 0, bit <<= 1), ...);
  issue(kVector, PIPE_V, "asc_vf_call", file, line, (uintptr_t)&Thunk<kFunction, R, P...>::run,
        (uint64_t)threads.x | (uint64_t)threads.y << 16 | (uint64_t)threads.z << 32, sizeof...(P),
        pointers, pack<P>(args)...);
}

struct Threads {  // a default argument cannot follow a pack
  dim3 extent;
  const char* file;
  int line;
  Threads(dim3 extent_, TW_HERE) : extent(extent_), file(file), line(line) {}
};
}  // namespace tw

template <auto kFunction, class... A>
inline void asc_vf_call(tw::Threads threads, A... args) {
  tw::call_vector<kFunction>(kFunction, threads.extent, threads.file, threads.line, args...);
}

extern "C" {
TW_HIDDEN void tw_barrier(void);
TW_HIDDEN uint64_t tw_shuffle(int kind, uint64_t value, int argument, int bytes);
}
inline void asc_syncthreads() { tw_barrier(); }
inline void asc_threadfence() {}
inline void asc_threadfence_block() {}

namespace tw {
template <class T>
inline T shuffle(int kind, T value, int argument) {
  uint64_t word = tw_shuffle(kind, pack(value), argument, sizeof value);
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}
template <class T>
inline T reduce(int f, int i, int u, T value) {
  return shuffle(std::is_floating_point_v<T> ? f : std::is_signed_v<T> ? i : u, value, 0);
}
}  // namespace tw

template <class T> inline T asc_shfl_xor(T v, int mask) { return tw::shuffle(tw::kXor, v, mask); }
template <class T> inline T asc_shfl_down(T v, int d) { return tw::shuffle(tw::kDown, v, d); }
template <class T> inline T asc_shfl_up(T v, int d) { return tw::shuffle(tw::kUp, v, d); }
template <class T> inline T asc_shfl(T v, int lane) { return tw::shuffle(tw::kIndex, v, lane); }
template <class T> inline T asc_reduce_add(T v) {
  return tw::reduce(tw::kSumF, tw::kSumI, tw::kSumI, v);
}
template <class T> inline T asc_reduce_max(T v) {
  return tw::reduce(tw::kMaxF, tw::kMaxI, tw::kMaxU, v);
}
template <class T> inline T asc_reduce_min(T v) {
  return tw::reduce(tw::kMinF, tw::kMinI, tw::kMinU, v);
}
inline uint32_t asc_ballot(int predicate) {
  return tw::shuffle<uint32_t>(tw::kBallot, predicate != 0, 0);
}
inline uint32_t asc_activemask() { return 0xffffffffu; }
