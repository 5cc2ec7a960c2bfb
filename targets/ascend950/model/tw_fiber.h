// Programs that stop and go on: scalar programs of cores, and threads of vector functions.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace tw {
struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
  char* stack = nullptr;
  size_t size = 0;
  size_t skipped = 0;  // bytes at its top, so that stacks do not all meet in the same lines of a cache
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
};

#if defined(__x86_64__)
// Saves the registers a call must keep, swaps stacks, restores.
extern "C" void tw_switch(void** save, void* load);
asm(R"(
.text
.hidden tw_switch
.globl tw_switch
.type tw_switch, @function
tw_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tw_switch, .-tw_switch
)");

inline void switch_to(Fiber& from, Fiber& to) { tw_switch(&from.stack_pointer, to.stack_pointer); }

inline thread_local Fiber* starting = nullptr;
inline void fiber_main() {
  Fiber* self = starting;
  self->entry(self->argument);
  abort();  // an entry ends by switching away
}

inline void prepare(Fiber& fiber) {
  void** top = (void**)((uintptr_t)(fiber.stack + fiber.size - fiber.skipped) & ~(uintptr_t)15);
  *--top = nullptr;
  *--top = (void*)&fiber_main;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
  starting = &fiber;
}
#else
inline void switch_to(Fiber& from, Fiber& to) { swapcontext(&from.registers, &to.registers); }
inline thread_local Fiber* starting = nullptr;
inline void fiber_main() {
  Fiber* self = starting;
  self->entry(self->argument);
  abort();
}
inline void prepare(Fiber& fiber) {
  getcontext(&fiber.registers);
  fiber.registers.uc_stack.ss_sp = fiber.stack;
  fiber.registers.uc_stack.ss_size = fiber.size - fiber.skipped;
  fiber.registers.uc_link = nullptr;
  makecontext(&fiber.registers, fiber_main, 0);
  starting = &fiber;
}
#endif

// Gives a fiber its stack once; `start` must be followed by the first switch to it.
inline void start(Fiber& fiber, size_t size, void (*entry)(void*), void* argument) {
  if (!fiber.stack) {
    fiber.stack = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fiber.size = size;
  }
  fiber.entry = entry;
  fiber.argument = argument;
  prepare(fiber);
}
}  // namespace tw
