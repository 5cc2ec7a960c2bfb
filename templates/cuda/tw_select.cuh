// Exact choice of the largest of many keys by a block of 1,024 threads, ties to those that came
// first. Counts are of whole numbers, so no order of theirs can change a result.
#pragma once
#include "tw_hopper.cuh"

#define TW_THREADS 1024
#define TW_WARPS (TW_THREADS / 32)
#define TW_ROUNDS 20        // keys of a thread: TW_ROUNDS * TW_THREADS are looked at together
#define TW_LISTED 4096      // keys that a list holds
#define TW_NO_KEY INT32_MIN
#define TW_KEY_OF_MINUS_INF (-2139095041)
#define TW_KEY_OF_INF 2139095040
#define TW_KEY_OF_NAN INT32_MAX

// Keys whose order as integers is the order of scores: the two zeros equal, NaN above all.
TW_DEVICE int tw_order_key(float x) {
  const int bits = __float_as_int(x);
  if (x != x) return TW_KEY_OF_NAN;
  return x == 0.0f ? 0 : bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

// What the threads of a block share while they choose.
struct tw_choice {
  int keys[TW_LISTED], ids[TW_LISTED];  // a list in order of arrival
  int counts[TW_ROUNDS][TW_WARPS];      // of each warp in each round
  int sums[2][2][TW_WARPS], before[TW_ROUNDS], total;
};

// Sums of two numbers of each thread. `turn` alternates, so that one barrier a call is enough.
TW_DEVICE void tw_block_sums(tw_choice* shared, int& x, int& y, int& turn) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  x = __reduce_add_sync(0xFFFFFFFFu, x);
  y = __reduce_add_sync(0xFFFFFFFFu, y);
  turn ^= 1;
  if (lane == 0) shared->sums[turn][0][warp] = x, shared->sums[turn][1][warp] = y;
  __syncthreads();
  x = __reduce_add_sync(0xFFFFFFFFu, lane < TW_WARPS ? shared->sums[turn][0][lane] : 0);
  y = __reduce_add_sync(0xFFFFFFFFu, lane < TW_WARPS ? shared->sums[turn][1][lane] : 0);
}

TW_DEVICE int tw_block_sum(tw_choice* shared, int x, int& turn) {
  int none = 0;
  tw_block_sums(shared, x, none, turn);
  return x;
}

// The k-th largest of at least k keys, two bits at a time from the highest down to bit `last`: bits below
// are 0, so that it may be less. Counts of a block fit in 16 bits, so that two are added as one.
template <int kRounds>
TW_DEVICE int tw_kth(tw_choice* shared, const int (&key)[kRounds], int rounds, int k, int& turn,
                     int last = 0) {
  static_assert(kRounds * TW_THREADS < 32768, "counts of 15 bits");
  uint32_t found = 0;  // of keys with the sign turned, which order as unsigned numbers
  for (int bit = 30; bit >= last; bit -= 2) {
    const int one = (int)((found | 1u << bit) ^ 1u << 31), two = (int)((found | 2u << bit) ^ 1u << 31);
    const int three = (int)((found | 3u << bit) ^ 1u << 31);
    int outer = 0, middle = 0;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r >= rounds) break;
      outer += (key[r] >= one) + ((key[r] >= three) << 16);
      middle += key[r] >= two;
    }
    tw_block_sums(shared, outer, middle, turn);
    const uint32_t digit = outer >> 16 >= k ? 3 : middle >= k ? 2 : (outer & 0xFFFF) >= k ? 1 : 0;
    found |= digit << bit;
  }
  return (int)(found ^ 1u << 31);
}

// Numbers what is flagged (bit r of `flags`: key r) in order of round, then thread, and gives each number
// to `take`. Returns how many are flagged.
template <int kRounds, class Take>
TW_DEVICE int tw_number(tw_choice* shared, uint32_t flags, int rounds, const Take& take) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if (r >= rounds) break;
    const uint32_t votes = __ballot_sync(0xFFFFFFFFu, flags >> r & 1);
    if (lane == 0) shared->counts[r][warp] = __popc(votes);
  }
  __syncthreads();
  for (int r = warp; r < rounds; r += TW_WARPS) {  // a warp sums the warps before each in a round
    const int count = lane < TW_WARPS ? shared->counts[r][lane] : 0;
    int upto = count;
    for (int step = 1; step < TW_WARPS; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane < TW_WARPS) shared->counts[r][lane] = upto - count;
    if (lane == TW_WARPS - 1) shared->before[r] = upto;
  }
  __syncthreads();
  if (warp == 0) {  // and one the rounds before each
    const int count = lane < rounds ? shared->before[lane] : 0;
    int upto = count;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane < rounds) shared->before[lane] = upto - count;
    if (lane == 31) shared->total = upto;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if (r >= rounds) break;
    const uint32_t votes = __ballot_sync(0xFFFFFFFFu, flags >> r & 1);
    const int earlier = __popc(votes & ((1u << lane) - 1));
    if (flags >> r & 1) take(r, shared->before[r] + shared->counts[r][warp] + earlier);
  }
  const int total = shared->total;
  __syncthreads();
  return total;
}

// Writes flagged keys to the list.
template <int kRounds, class Id>
TW_DEVICE int tw_list(tw_choice* shared, uint32_t flags, const int (&key)[kRounds], int rounds,
                      const Id& id) {
  return tw_number<kRounds>(shared, flags, rounds, [&](int r, int number) {
    shared->keys[number] = key[r];
    shared->ids[number] = id(r);
  });
}

// Leaves in the list, in order, the k largest of the keys; `id` gives the number of key r. Returns how
// many are listed: fewer than k where fewer keys are above -inf.
template <int kRounds, class Id>
TW_DEVICE int tw_list_largest(tw_choice* shared, const int (&key)[kRounds], int rounds, int k,
                              const Id& id) {
  int least = TW_KEY_OF_MINUS_INF, room = 0, turn = 0;
  const auto above = [&] {
    int count = 0;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r < rounds) count += key[r] > least;
    }
    return tw_block_sum(shared, count, turn);
  };
  if (above() > k) {
    least = tw_kth(shared, key, rounds, k, turn);
    room = k - above();
  }
  uint32_t flags = 0, equal = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    flags |= (uint32_t)(key[r] > least) << r;
    equal |= (uint32_t)(key[r] == least) << r;
  }
  if (room > 0) {
    tw_number<kRounds>(shared, equal, rounds, [&](int r, int number) {
      if (number < room) flags |= 1u << r;
    });
  }
  return tw_list<kRounds>(shared, flags, key, rounds, id);
}

// Cuts the list to its k largest.
TW_DEVICE int tw_cut_list(tw_choice* shared, int listed, int k) {
  constexpr int kRounds = TW_LISTED / TW_THREADS;
  int key[kRounds], ids[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int at = r * TW_THREADS + threadIdx.x;
    key[r] = at < listed ? shared->keys[at] : TW_NO_KEY;
    ids[r] = at < listed ? shared->ids[at] : 0;
  }
  return tw_list_largest(shared, key, kRounds, k, [&](int r) { return ids[r]; });
}

// The k largest of n keys, those listed first: `load(i)` gives key i. At least k keys are not below the
// k-th largest of what each thread finds largest, of which a few bits are enough, and few others: those
// are listed, and the list is cut.
template <class Load>
TW_DEVICE int tw_choose(tw_choice* shared, int n, int k, const Load& load) {
  constexpr int kHeld = TW_LISTED / TW_THREADS, kFresh = TW_ROUNDS - kHeld;
  int listed = 0;
  for (int first = 0; first < n; first += kFresh * TW_THREADS) {
    int key[TW_ROUNDS], held[kHeld], most[1] = {TW_NO_KEY}, turn = 0, count = 0;
    const int left = min(n - first, kFresh * TW_THREADS);
    const int rounds = kHeld + (left + TW_THREADS - 1) / TW_THREADS;
#pragma unroll
    for (int r = 0; r < TW_ROUNDS; ++r) {
      const int at = (r < kHeld ? r : r - kHeld) * TW_THREADS + (int)threadIdx.x;
      key[r] = TW_NO_KEY;
      if (r < kHeld && at < listed) key[r] = shared->keys[at];
      if (r < kHeld) held[r] = at < listed ? shared->ids[at] : 0;
      if (r >= kHeld && at < left) key[r] = load(first + at);
    }
#pragma unroll
    for (int r = 0; r < TW_ROUNDS; ++r) most[0] = max(most[0], key[r]);
    const auto id = [&](int r) {
      return r < kHeld ? held[r < kHeld ? r : 0] : first + (r - kHeld) * TW_THREADS + (int)threadIdx.x;
    };
    uint32_t flags = 0;
    if (k <= TW_THREADS) {
      const int bound = max(tw_kth(shared, most, 1, k, turn, 18), TW_KEY_OF_MINUS_INF + 1);
#pragma unroll
      for (int r = 0; r < TW_ROUNDS; ++r) flags |= (uint32_t)(key[r] >= bound) << r;
      count = tw_block_sum(shared, __popc(flags), turn);
    }
    if (k > TW_THREADS || count > TW_LISTED) {
      listed = tw_list_largest(shared, key, rounds, k, id);
    } else {
      listed = tw_list<TW_ROUNDS>(shared, flags, key, rounds, id);
      if (listed > k) listed = tw_cut_list(shared, listed, k);
    }
  }
  return listed;
}

// Writes the listed ids in order, then -1, `width` in all; an id whose key is NaN is not written.
template <class Entry>
TW_DEVICE void tw_put(tw_choice* shared, int listed, int* out, int width, const Entry& entry) {
  constexpr int kRounds = TW_LISTED / TW_THREADS;
  uint32_t flags = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int at = r * TW_THREADS + threadIdx.x;
    if (at < listed && shared->keys[at] != TW_KEY_OF_NAN) flags |= 1u << r;
  }
  const int written = tw_number<kRounds>(shared, flags, kRounds, [&](int r, int number) {
    out[number] = entry(shared->ids[r * TW_THREADS + threadIdx.x]);
  });
  for (int i = written + threadIdx.x; i < width; i += TW_THREADS) out[i] = -1;
}

// A list of `width` numbers: those in 0 .. limit, ascending, each once. Returns how many they are.
template <int kWidth>
TW_DEVICE int tw_ascending(tw_choice* shared, const int* given, int limit, int* out) {
  constexpr int kRounds = (kWidth + TW_THREADS - 1) / TW_THREADS;
  uint32_t known = 0, strays = 0;
  int turn = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int at = r * TW_THREADS + threadIdx.x;
    const int number = at < kWidth ? given[at] : -1, before = at > 0 && at < kWidth ? given[at - 1] : -1;
    if (number < 0 || number >= limit) continue;
    known |= 1u << r;
    if (at > 0 && !(before >= 0 && before < number)) strays |= 1u << r;
  }
  if (tw_block_sum(shared, __popc(strays), turn) == 0) {
    return tw_number<kRounds>(shared, known, kRounds, [&](int r, int at) {
      out[at] = given[r * TW_THREADS + threadIdx.x];
    });
  }
  // Numbers out of order: each one's first place stays, and its rank is counted.
  for (int at = threadIdx.x; at < kWidth; at += TW_THREADS) {
    const int number = given[at];
    bool first = number >= 0 && number < limit;
    for (int j = 0; j < at && first; ++j) first = given[j] != number;
    shared->ids[at] = first ? number : -1;
  }
  __syncthreads();
  int count = 0;
  for (int at = threadIdx.x; at < kWidth; at += TW_THREADS) {
    const int number = shared->ids[at];
    if (number < 0) continue;
    int rank = 0;
    for (int j = 0; j < kWidth; ++j) rank += shared->ids[j] >= 0 && shared->ids[j] < number;
    out[rank] = number;
    ++count;
  }
  return tw_block_sum(shared, count, turn);
}
