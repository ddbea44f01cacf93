// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// Who has read and written each byte of global and shared memory. The checked build compiles the kernels with
// -fsanitize=thread; its calls come here instead of to its library: a read of what nobody has written, an access
// outside of what the arguments have, and two accesses that nothing orders are errors, whatever order they came in.

#include <dlfcn.h>

#include <cstdio>

#include "running.h"

namespace cuda_on_cpu {
namespace {

enum Flags { kRead = 1, kWrite = 2, kKnown = 4 };

struct Access {
  uint64_t serial = 0;  // of the block; 0: none
  int thread = 0;
  uint32_t barriers = 0, warp_barriers = 0;  // before it
  bool atomic = false;
};

// Of one byte.
struct Cell {
  Access write, reads[3];  // the last read, the last of another thread, the last of another block
  uint64_t owner = 0;      // of shared memory: the block's serial
  bool known = false;
};

struct Range {
  uintptr_t begin, end;
  int flags;
  bool shared;
  uint64_t owner;  // of a shared array: the block that uses it
  std::vector<Cell> cells;

  const char* name() const { return shared ? "shared memory" : "an argument"; }
};

std::vector<Range> ranges;
Range* last_found;

Range* range_of(uintptr_t address) {
  if (last_found && address >= last_found->begin && address < last_found->end) return last_found;
  for (Range& range : ranges) {
    if (address >= range.begin && address < range.end) return last_found = &range;
  }
  return nullptr;
}

void add(Range range) {
  ranges.push_back(std::move(range));
  last_found = nullptr;
}

// In the library, one before where the call returns to.
size_t offset_of(void* code) {
  Dl_info info;
  if (!dladdr(code, &info)) return 0;
  return reinterpret_cast<uintptr_t>(code) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
}

// Whether nothing orders two accesses. Barriers of the block and of the warp do; shuffles and ballots imply no barrier of
// memory, by CUDA's programming guide.
bool unordered(const Access& before, const Access& now) {
  if (before.serial < running.first_serial) return false;  // of another launch, or none
  if (before.serial == now.serial && before.thread == now.thread) return false;
  if (before.atomic && now.atomic) return false;
  if (before.serial != now.serial) return true;
  if (before.barriers != now.barriers) return false;
  return before.thread / kWarp != now.thread / kWarp || before.warp_barriers == now.warp_barriers;
}

void note_read(Cell& cell, const Access& now) {
  Access* reads = cell.reads;
  if (reads[0].serial != now.serial) {
    reads[2] = reads[0];
    reads[1] = {};
  } else if (reads[0].thread != now.thread) {
    reads[1] = reads[0];
  }
  reads[0] = now;
}

void tell_race(const char* what, size_t byte, const Range& range, const char* did, const Access& other, void* code) {
  fail(
      "%s of byte %zu of %s that thread %d of %s %s, and nothing orders them (code %zx)", what, byte, range.name(),
      other.thread, other.serial == running.serial ? "its block" : "another block", did, offset_of(code));
}

void record_byte(Range& range, size_t byte, bool write, const Access& now, const char* what, void* code) {
  Cell& cell = range.cells[byte];
  if (range.shared && range.owner != cell.owner) cell = {.owner = range.owner};  // each block has its own
  if ((!write || now.atomic) && !cell.known) {
    return fail("%s of byte %zu of %s that nothing was written to (code %zx)", what, byte, range.name(), offset_of(code));
  }
  if (unordered(cell.write, now)) return tell_race(what, byte, range, "wrote", cell.write, code);
  for (const Access& read : cell.reads) {
    if (write && unordered(read, now)) return tell_race(what, byte, range, "read", read, code);
  }
  if (!write) return note_read(cell, now);
  cell.write = now;
  cell.known = true;
}

// Memory of no argument that kernels may read: the arguments themselves, after the launch's frame, and their indices.
bool is_of_launch(uintptr_t address) {
  constexpr uintptr_t kBefore = 4096, kBehind = 65536;
  const uintptr_t host = reinterpret_cast<uintptr_t>(running.host_frame), own = reinterpret_cast<uintptr_t>(&indices);
  return (address + kBefore >= host && address < host + kBehind) || (address >= own && address < own + sizeof(indices));
}

void note(void* address, size_t bytes, bool write, size_t alignment, void* code) {
  const uintptr_t number = reinterpret_cast<uintptr_t>(address);
  if (current && running.error.empty() && number % alignment) {
    fail("an access of %zu bytes at %zx is not aligned (code %zx)", bytes, number, offset_of(code));
  }
  record(number, bytes, write, false, code);
}

}  // namespace

void record(uintptr_t address, size_t bytes, bool write, bool atomic, void* code) {
  if (!current || !running.error.empty() || is_on_stack(*current, address, bytes)) return;
  const char* what = atomic ? "an atomic operation" : write ? "a write" : "a read";
  Range* range = range_of(address);
  if (!range) {
    if (!write && is_of_launch(address)) return;
    return fail("%s of %zu bytes at %zx, which no argument has (code %zx)", what, bytes, address, offset_of(code));
  }
  ++counts.accesses;
  if (address + bytes > range->end) {
    const size_t behind = address + bytes - range->end;
    return fail("%s of %zu bytes, %zu of them behind the end of an argument (code %zx)", what, bytes, behind, offset_of(code));
  }
  if (!(range->flags & (write ? kWrite : kRead))) {
    return fail("%s of an argument that must not have any (code %zx)", what, offset_of(code));
  }
  if (!range->shared) count_request(address, bytes, write, code);
  const Access now{running.serial, current->id, running.barriers, current->warp_barriers, atomic};
  for (size_t i = 0; i < bytes; ++i) record_byte(*range, address - range->begin + i, write, now, what, code);
}

void own_shared(uintptr_t begin, size_t bytes, bool* fresh) {
  Range* range = range_of(begin);
  if (!range) {
    add({begin, begin + bytes, kRead | kWrite, true, 0, std::vector<Cell>(bytes)});
    range = &ranges.back();
  }
  *fresh = range->owner != running.serial;
  range->owner = running.serial;
}

void written_by_host(uintptr_t begin, size_t bytes) {
  for (Range& range : ranges) {
    const uintptr_t end = std::min(begin + bytes, range.end);
    for (uintptr_t at = std::max(begin, range.begin); at < end; ++at) range.cells[at - range.begin].known = true;
  }
}

uint32_t atomic_or(uint32_t* address, uint32_t value) {
#if defined(CUDA_ON_CPU_CHECKED)
  record(reinterpret_cast<uintptr_t>(address), sizeof(value), true, true, __builtin_return_address(0));
#endif
  const uint32_t old = *address;
  *address = old | value;
  return old;
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

// Memory that kernels may use, until cuda_on_cpu_forget.
CALLED_BY_TESTS void cuda_on_cpu_allow(uintptr_t begin, size_t bytes, int flags) {
  Range range{begin, begin + bytes, flags, false, 0, std::vector<Cell>(bytes)};
  for (Cell& cell : range.cells) cell.known = (flags & kKnown) != 0;
  add(std::move(range));
}

CALLED_BY_TESTS void cuda_on_cpu_forget() {
  ranges.clear();
  last_found = nullptr;
}

// The calls of -fsanitize=thread.
extern "C" {

#define NOTE(name, bytes, write, alignment) \
  void __tsan_##name(void* address) { note(address, bytes, write, alignment, __builtin_return_address(0)); }
#define NOTE_ALL(bytes)                             \
  NOTE(read##bytes, bytes, false, bytes)            \
  NOTE(write##bytes, bytes, true, bytes)            \
  NOTE(unaligned_read##bytes, bytes, false, 1)      \
  NOTE(unaligned_write##bytes, bytes, true, 1)
NOTE_ALL(1)
NOTE_ALL(2)
NOTE_ALL(4)
NOTE_ALL(8)
NOTE_ALL(16)

void __tsan_read_range(void* address, size_t bytes) { note(address, bytes, false, 1, __builtin_return_address(0)); }
void __tsan_write_range(void* address, size_t bytes) { note(address, bytes, true, 1, __builtin_return_address(0)); }
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// Of the host's code in the same sources: reference counts of tensors.
int __tsan_atomic32_fetch_add(volatile int* address, int value, int) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_fetch_sub(volatile int* address, int value, int) {
  return __atomic_fetch_sub(address, value, __ATOMIC_SEQ_CST);
}
char __tsan_atomic8_load(const volatile char* address, int) { return __atomic_load_n(address, __ATOMIC_SEQ_CST); }
long long __tsan_atomic64_load(const volatile long long* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
}
