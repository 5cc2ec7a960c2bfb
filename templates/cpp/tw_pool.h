// The thread pool of an engine: fork-join of one loop at a time over guided ranges of items.
//
// Only tw_host.cpp includes this. Workers spin briefly between loops, then sleep; a loop never
// waits for a worker that has not joined it.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <new>

#include "tw_host.h"

namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Rounding to nearest even, subnormals honoured, no traps: set while our code runs, then put back.
#if defined(__x86_64__)
typedef uint32_t FloatMode;
const FloatMode kFloatMode = 0x1F80;
FloatMode float_mode() {
  FloatMode mode;
  asm volatile("stmxcsr %0" : "=m"(mode));
  return mode;
}
void set_float_mode(FloatMode mode) { asm volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
#elif defined(__aarch64__)
typedef uint64_t FloatMode;
const FloatMode kFloatMode = 0;
FloatMode float_mode() {
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_float_mode(FloatMode mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
#error "tw_host.cpp: floating-point mode unknown: compile for x86-64 or aarch64"
#endif

struct FloatModeScope {
  FloatMode before;
  FloatModeScope() : before(float_mode()) { set_float_mode(kFloatMode); }
  ~FloatModeScope() { set_float_mode(before); }
};

// The gate is one word: generation | open bit | number of workers inside. A worker enters only
// while the gate is open and once per generation; the caller closes it and waits for those
// inside. A worker that is late or asleep is therefore never waited for.
const uint64_t kInside = 0xFFFF;
const uint64_t kOpen = 0x10000;
const int kGenerationShift = 17;

const int64_t kSpinNs = 100 * 1000;        // after this an idle worker offers its core to others
const int64_t kSleepAfterNs = 1000 * 1000; // after this it sleeps

struct Pool {
  // The job; written only while the gate is closed and nobody is inside.
  tw_body body;
  void* arg;
  int64_t num_items;
  int num_threads;
  int num_started;
  pid_t owner;
  pthread_t* workers;
  pthread_mutex_t run_lock;
  pthread_mutex_t sleep_lock;
  pthread_cond_t wake;
  alignas(64) std::atomic<uint64_t> gate;
  alignas(64) std::atomic<int64_t> next;
  alignas(64) std::atomic<int> num_sleeping;
  std::atomic<bool> stop;
};

struct Worker {
  Pool* pool;
  int thread_id;
};

struct Thread {
  Pool* pool;  // bound by tw_run; null in workers and inside a body, where loops run inline
  int thread_id;
  int num_threads;
};
thread_local Thread current = {nullptr, 0, 1};

// Guided assignment: large ranges first, single items last, so that nobody ends late by much.
void work(Pool* pool, int thread_id) {
  int64_t begin = pool->next.load(std::memory_order_relaxed);
  while (begin < pool->num_items) {
    int64_t take = (pool->num_items - begin) / (2 * pool->num_threads);
    if (take < 1) take = 1;
    if (pool->next.compare_exchange_weak(begin, begin + take, std::memory_order_relaxed)) {
      pool->body(pool->arg, begin, begin + take, thread_id);
      begin = pool->next.load(std::memory_order_relaxed);
    }
  }
}

bool is_unseen(uint64_t gate, uint64_t seen) {
  return (gate & kOpen) && (gate >> kGenerationShift) != seen;
}

bool enter(Pool* pool, uint64_t* seen) {
  uint64_t gate = pool->gate.load(std::memory_order_acquire);
  while (is_unseen(gate, *seen)) {
    if (pool->gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
      *seen = gate >> kGenerationShift;
      return true;
    }
  }
  return false;
}

// Sleeps until a generation other than the one on entry. Announcing the sleep before reading the
// gate, with the opener doing the reverse, makes sure that one of the two sees the other.
void sleep(Pool* pool, uint64_t seen) {
  pthread_mutex_lock(&pool->sleep_lock);
  pool->num_sleeping.fetch_add(1);
  uint64_t gate = pool->gate.load();
  while (!is_unseen(gate, seen) && !pool->stop.load() &&
         (pool->gate.load() >> kGenerationShift) == (gate >> kGenerationShift)) {
    pthread_cond_wait(&pool->wake, &pool->sleep_lock);
  }
  pthread_mutex_unlock(&pool->sleep_lock);
}

void wake_sleepers(Pool* pool) {
  pthread_mutex_lock(&pool->sleep_lock);
  pool->num_sleeping.store(0);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->sleep_lock);
}

bool wait_and_enter(Pool* pool, uint64_t* seen) {
  int64_t start = now_ns();
  while (!pool->stop.load(std::memory_order_relaxed)) {
    for (int i = 0; i < 32; ++i) {
      if (enter(pool, seen)) return true;
      pause_core();
    }
    int64_t idle = now_ns() - start;
    if (idle > kSleepAfterNs) {
      sleep(pool, *seen);
      start = now_ns();
    } else if (idle > kSpinNs) {
      sched_yield();
    }
  }
  return false;
}

void* run_worker(void* arg) {
  Worker* worker = static_cast<Worker*>(arg);
  Pool* pool = worker->pool;
  int thread_id = worker->thread_id;
  delete worker;
  set_float_mode(kFloatMode);
  current = {nullptr, thread_id, pool->num_threads};
  uint64_t seen = 0;
  while (wait_and_enter(pool, &seen)) {
    work(pool, thread_id);
    pool->gate.fetch_sub(1, std::memory_order_release);
  }
  return nullptr;
}

void open_gate(Pool* pool, int64_t num_items, tw_body body, void* arg) {
  pool->body = body;
  pool->arg = arg;
  pool->num_items = num_items;
  pool->next.store(0, std::memory_order_relaxed);
  uint64_t generation = (pool->gate.load(std::memory_order_relaxed) >> kGenerationShift) + 1;
  pool->gate.store((generation << kGenerationShift) | kOpen);
  if (pool->num_sleeping.load() > 0) wake_sleepers(pool);
}

void close_gate(Pool* pool) {
  pool->gate.fetch_and(~kOpen, std::memory_order_acq_rel);
  int64_t start = now_ns();
  for (int i = 1; pool->gate.load(std::memory_order_acquire) & kInside; ++i) {
    pause_core();
    if (i % 64 == 0 && now_ns() - start > kSpinNs) sched_yield();
  }
}

// Stops the workers and frees the pool; in a forked child, where they do not exist, does nothing.
void destroy_pool(Pool* pool) {
  if (pool->owner != getpid()) return;
  pool->stop.store(true);
  wake_sleepers(pool);
  for (int i = 0; i < pool->num_started; ++i) pthread_join(pool->workers[i], nullptr);
  pthread_cond_destroy(&pool->wake);
  pthread_mutex_destroy(&pool->sleep_lock);
  pthread_mutex_destroy(&pool->run_lock);
  delete[] pool->workers;
  delete pool;
}

// Starts num_threads - 1 workers (the caller of tw_run is thread 0); null if the system refuses.
Pool* create_pool(int num_threads) {
  Pool* pool = new (std::nothrow) Pool();
  if (pool == nullptr) return nullptr;
  pool->num_threads = num_threads;
  pool->owner = getpid();
  pool->workers = new pthread_t[num_threads];
  pthread_mutex_init(&pool->run_lock, nullptr);
  pthread_mutex_init(&pool->sleep_lock, nullptr);
  pthread_cond_init(&pool->wake, nullptr);
  sigset_t all, before;  // signals belong to the threads of the program, not to ours
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int id = 1; id < num_threads; ++id) {
    Worker* worker = new Worker{pool, id};
    if (pthread_create(&pool->workers[id - 1], nullptr, run_worker, worker) != 0) {
      delete worker;
      break;
    }
    ++pool->num_started;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pool->num_started == num_threads - 1) return pool;
  destroy_pool(pool);
  return nullptr;
}

}  // namespace
