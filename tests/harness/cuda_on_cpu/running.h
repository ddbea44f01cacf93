// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the parts of the emulator share: the threads, what tests set, what is counted, and how a kernel fails.

#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "shim.h"

#define CALLED_BY_TESTS extern "C" __attribute__((visibility("default")))

namespace cuda_on_cpu {

constexpr int kWarp = 32;
constexpr int kMostThreads = 1024;  // of a block

enum class State { kReady, kAtWarp, kAtBarrier, kDone };

struct Thread {
  void* stack_pointer;
  void* fake_stack;  // AddressSanitizer's
  int id;            // in its block
  State state;
  // Where it waits, and for what.
  Call call;
  const char* file;
  int line;
  uint32_t mask, value, result;
  int argument;
  uint32_t warp_calls, warp_barriers;  // so far
};

enum Order { kInOrder, kReversed, kShuffled, kWarpByWarp };

struct Settings {
  int block_order = kInOrder, thread_order = kInOrder;
  int rcp_ulps = 0;        // what rcp.approx is off by
  bool device_nan = true;  // whether NaNs have the pattern of a device
  std::mt19937 random{0};
  std::vector<int64_t> only;  // the blocks that run; empty: all
  bool count_traffic = false;
};
extern Settings settings;

struct Counts {
  int64_t launches, blocks, warp_calls, barriers, unchecked_launches, accesses, memsets;
  // Of global memory: bytes, once for the lanes of a warp that share them; sectors of requests; of what is read, sectors
  // once for each block.
  int64_t read, written, read_sectors, written_sectors, fetched_sectors;
};
extern Counts counts;

// The launch that runs. Blocks have serial numbers over all launches, from 1 on.
struct Launch {
  const char* kernel;
  Run run;
  const void* of;
  const char* host_frame;  // of the function that has launched: the arguments lie after it
  uint64_t first_serial, serial;
  int64_t block;      // of the grid
  uint32_t barriers;  // of the block so far
  std::string error;
};
extern Launch running;
extern Thread* current;  // null: the host runs
extern std::string last_error;

// Note an error, the first one of a launch; in a kernel it does not come back.
__attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// fibers.cpp
void prepare(Thread& thread, int id);  // to begin the kernel
void to_thread(Thread& thread);        // until it waits or is done
void to_scheduler(bool forever);
bool is_on_stack(const Thread& thread, uintptr_t address, size_t bytes);

// accesses.cpp
void record(uintptr_t address, size_t bytes, bool write, bool atomic, void* code);
void own_shared(uintptr_t begin, size_t bytes, bool* fresh);  // by the block that runs; whether it has just begun to
void written_by_host(uintptr_t begin, size_t bytes);

// traffic.cpp
void count_request(uintptr_t address, size_t bytes, bool write, void* code);  // of global memory, by `current`

}  // namespace cuda_on_cpu
