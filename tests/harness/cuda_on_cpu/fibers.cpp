// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// A fiber for each thread of a block: a stack of its own, and a switch between it and the scheduler. For x86-64.

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "running.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_on_cpu {

Thread* current;
Indices indices;
Launch running;
std::string last_error;

namespace {

constexpr size_t kStack = 256 << 10;

void* scheduler_stack;
[[maybe_unused]] void* scheduler_fake_stack;
[[maybe_unused]] const void* scheduler_bottom;
[[maybe_unused]] size_t scheduler_size;

// Registers that a call keeps, by the System V ABI.
asm(R"(
.text
.globl cuda_on_cpu_switch
.hidden cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
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
)");
extern "C" void cuda_on_cpu_switch(void** save, void* load);

char* stack_of(int id) {
  static char* const stacks = static_cast<char*>(mmap(
      nullptr, kStack * kMostThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return stacks + id * kStack;
}

void thread_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
#endif
  running.run(running.of);
  current->state = State::kDone;
  to_scheduler(true);
}

}  // namespace

void prepare(Thread& thread, int id) {
  thread = Thread{};
  thread.id = id;
  char* bottom = stack_of(id);
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(bottom, kStack);
#endif
  void** top = reinterpret_cast<void**>(bottom + kStack);
  std::memset(top - 8, 0, 8 * sizeof(void*));
  top[-2] = reinterpret_cast<void*>(&thread_main);
  thread.stack_pointer = top - 8;
}

void to_thread(Thread& thread) {
  current = &thread;
  const unsigned x = indices.block_size.x, y = indices.block_size.y, id = static_cast<unsigned>(thread.id);
  indices.thread = {id % x, id / x % y, id / x / y};
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, stack_of(thread.id), kStack);
#endif
  cuda_on_cpu_switch(&scheduler_stack, thread.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
  current = nullptr;
}

void to_scheduler([[maybe_unused]] bool forever) {
  Thread* thread = current;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(forever ? nullptr : &thread->fake_stack, scheduler_bottom, scheduler_size);
#endif
  cuda_on_cpu_switch(&thread->stack_pointer, scheduler_stack);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(thread->fake_stack, nullptr, nullptr);
#endif
}

bool is_on_stack(const Thread& thread, uintptr_t address, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(stack_of(thread.id));
  return address >= begin && address + bytes <= begin + kStack;
}

void fail(const char* format, ...) {
  char text[2000];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  if (running.error.empty()) {
    running.error = std::string(running.kernel) + ", block " + std::to_string(running.block);
    if (current) running.error += ", thread " + std::to_string(current->id);
    running.error += std::string(": ") + text;
  }
  if (current) to_scheduler(false);
}

}  // namespace cuda_on_cpu

CALLED_BY_TESTS const char* cuda_on_cpu_error() { return cuda_on_cpu::last_error.c_str(); }
