// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// Runs the blocks of a launch one after another, and the threads of a block in turns. A thread that is at a warp's call
// waits until all lanes are at the same one, at a barrier until all threads of the block are: any other call, and a
// thread that has returned, is an error, for which a device has no word.

#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>

#include "running.h"

namespace cuda_on_cpu {

Settings settings;
Counts counts;

namespace {

constexpr const char* kCalls[] = {
    "__shfl_sync", "__shfl_up_sync", "__shfl_xor_sync", "__ballot_sync", "__syncwarp", "__syncthreads"};

Thread threads[kMostThreads];

bool same_call(const Thread& a, const Thread& b) {
  return a.call == b.call && a.line == b.line && !std::strcmp(a.file, b.file) && a.warp_calls == b.warp_calls;
}

std::string whereabouts(const Thread& thread) {
  if (thread.state == State::kDone) return "has returned";
  if (thread.state == State::kReady) return "runs";
  return std::string("is at ") + kCalls[static_cast<int>(thread.call)] + " of " + thread.file + ":" +
         std::to_string(thread.line) + " after " + std::to_string(thread.warp_calls) + " of a warp";
}

// Threads that can run, and in which order they do.
class Ready {
 public:
  void add(int first, int number) {
    for (int i = 0; i < number; ++i) {
      ids_.push_back(first + (settings.thread_order == kInOrder ? i : number - 1 - i));
    }
  }

  bool empty() const { return next_ == ids_.size(); }

  int take() {
    const size_t waiting = ids_.size() - next_;
    if (settings.thread_order == kShuffled) {
      std::swap(ids_[next_], ids_[next_ + settings.random() % waiting]);
    } else if (settings.thread_order == kWarpByWarp) {  // the thread that was released last continues
      std::swap(ids_[next_], ids_.back());
      if (waiting > 1) std::rotate(ids_.begin() + next_ + 1, ids_.end() - 1, ids_.end());
    }
    const int id = ids_[next_++];
    if (next_ > kRoom) {
      ids_.erase(ids_.begin(), ids_.begin() + next_);
      next_ = 0;
    }
    return id;
  }

 private:
  static constexpr size_t kRoom = 65536;
  std::vector<int> ids_;
  size_t next_ = 0;
};

// All lanes of a warp wait: give each what it has asked for.
void serve(Thread* lanes) {
  uint32_t ballot = 0;
  for (int i = 0; i < kWarp; ++i) {
    if (!same_call(lanes[i], lanes[0]) || lanes[i].mask != 0xffffffffu) {
      return fail(
          "thread %d %s (mask %x), thread %d %s", lanes[i].id, whereabouts(lanes[i]).c_str(), lanes[i].mask,
          lanes[0].id, whereabouts(lanes[0]).c_str());
    }
    ballot |= (lanes[i].value & 1) << i;
  }
  for (int i = 0; i < kWarp; ++i) {
    const int argument = lanes[i].argument;
    int from = i;
    if (lanes[0].call == Call::kShuffle) from = argument & (kWarp - 1);
    if (lanes[0].call == Call::kShuffleXor) from = i ^ argument;
    if (lanes[0].call == Call::kShuffleUp && argument <= i) from = i - argument;
    if (from < 0 || from >= kWarp) return fail("lane %d asks for lane %d, and %s", i, from, whereabouts(lanes[i]).c_str());
    lanes[i].result = lanes[0].call == Call::kBallot ? ballot : lanes[from].value;
  }
  for (int i = 0; i < kWarp; ++i) {
    ++lanes[i].warp_calls;
    lanes[i].warp_barriers += lanes[i].call == Call::kWarpBarrier;
    lanes[i].state = State::kReady;
  }
  ++counts.warp_calls;
}

// All threads of a block are at a barrier.
void pass_barrier(int size) {
  for (int i = 0; i < size; ++i) {
    if (!same_call(threads[i], threads[0])) {
      return fail("thread %d %s, thread 0 %s", i, whereabouts(threads[i]).c_str(), whereabouts(threads[0]).c_str());
    }
  }
  for (int i = 0; i < size; ++i) threads[i].state = State::kReady;
  ++running.barriers;
  ++counts.barriers;
}

void tell_who_waits(int size) {
  std::map<std::string, int> seen;
  for (int i = 0; i < size; ++i) ++seen[whereabouts(threads[i])];
  std::string all;
  for (const auto& [text, number] : seen) all += std::to_string(number) + " x " + text + "; ";
  fail("threads wait for one another forever: %s", all.c_str());
}

void run_block(int size) {
  ++running.serial;
  ++counts.blocks;
  running.barriers = 0;
  for (int i = 0; i < size; ++i) prepare(threads[i], i);
  Ready ready;
  ready.add(0, size);
  int done = 0, at_barrier = 0;
  std::vector<int> waiting(size / kWarp);  // lanes of each warp
  while (!ready.empty()) {
    Thread& thread = threads[ready.take()];
    to_thread(thread);
    const int warp = thread.id / kWarp;
    if (!running.error.empty()) return;
    if (thread.state == State::kDone) {
      ++done;
    } else if (thread.state == State::kAtBarrier && ++at_barrier == size) {
      at_barrier = 0;
      pass_barrier(size);
      ready.add(0, size);
    } else if (thread.state == State::kAtWarp && ++waiting[warp] == kWarp) {
      waiting[warp] = 0;
      serve(threads + warp * kWarp);
      ready.add(warp * kWarp, kWarp);
    }
    if (!running.error.empty()) return;
  }
  if (done < size) tell_who_waits(size);
}

// The numbers of the blocks that run, in their order.
std::vector<int64_t> order_of(int64_t blocks) {
  std::vector<int64_t> order = settings.only;
  if (order.empty()) {
    order.resize(blocks);
    std::iota(order.begin(), order.end(), 0);
  }
  std::erase_if(order, [&](int64_t number) { return number >= blocks; });
  if (settings.block_order == kReversed) std::reverse(order.begin(), order.end());
  if (settings.block_order == kShuffled) std::shuffle(order.begin(), order.end(), settings.random);
  return order;
}

}  // namespace

void run_grid(dim3 grid, dim3 block) {
  indices.block_size = block;
  indices.grid_size = grid;
  running.first_serial = running.serial + 1;
  running.error.clear();
  for (const int64_t number : order_of(int64_t{grid.x} * grid.y * grid.z)) {
    running.block = number;
    indices.block = {
        static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
        static_cast<unsigned>(number / grid.x / grid.y)};
    run_block(static_cast<int>(block.x * block.y * block.z));
    if (!running.error.empty()) throw std::runtime_error(last_error = running.error);
  }
}

uint32_t meet(Call call, uint32_t mask, uint32_t value, int argument, const char* file, int line) {
  Thread& thread = *current;
  thread.call = call;
  thread.mask = mask;
  thread.value = value;
  thread.argument = argument;
  thread.file = file;
  thread.line = line;
  thread.state = call == Call::kBarrier ? State::kAtBarrier : State::kAtWarp;
  to_scheduler(false);
  return thread.result;
}

void use_shared(void* array, size_t bytes) {
  bool fresh = false;
  own_shared(reinterpret_cast<uintptr_t>(array), bytes, &fresh);
  for (size_t i = 0; fresh && i < bytes; ++i) static_cast<uint8_t*>(array)[i] = static_cast<uint8_t>(settings.random());
}

float rcp_approx_ftz(float value) {
  if (std::fpclassify(value) == FP_SUBNORMAL) value = std::copysign(0.0f, value);
  float result = 1.0f / value;
  for (int i = 0; i < std::abs(settings.rcp_ulps) && std::isfinite(result) && result != 0.0f; ++i) {
    result = std::nextafter(result, settings.rcp_ulps < 0 ? 0.0f : std::copysign(INFINITY, result));
  }
  if (std::fpclassify(result) == FP_SUBNORMAL) result = std::copysign(0.0f, result);
  return result_of(result);
}

float result_of(float value) {
  return value != value && settings.device_nan ? std::bit_cast<float>(0x7fffffffu) : value;
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

CALLED_BY_TESTS void cuda_on_cpu_set(int block_order, int thread_order, int seed, int rcp_ulps, int device_nan) {
  settings.block_order = block_order;
  settings.thread_order = thread_order;
  settings.random.seed(static_cast<unsigned>(seed));
  settings.rcp_ulps = rcp_ulps;
  settings.device_nan = device_nan != 0;
}

CALLED_BY_TESTS void cuda_on_cpu_only(const int64_t* blocks, int number) { settings.only.assign(blocks, blocks + number); }

CALLED_BY_TESTS void cuda_on_cpu_counts(int64_t* to) { std::memcpy(to, &counts, sizeof(counts)); }
