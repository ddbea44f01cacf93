// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// What moves between a kernel and global memory, as a profiler of a device counts it: the accesses that the lanes of a
// warp make together are one request, which moves whole sectors. Lanes run one after another here, so an access belongs
// to the request of its warp that is at the same place of the code for the same time.

#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <tuple>

#include "running.h"

namespace cuda_on_cpu {
namespace {

constexpr size_t kSector = 32;  // bytes
constexpr size_t kWidest = 16;  // bytes of a lane in one instruction

using Place = std::tuple<void*, size_t, bool>;  // of the code, which instruction of its access, whether it writes
using Sectors = std::map<uintptr_t, uint32_t>;  // by number: the bytes that are used

uint64_t block;                                            // the thread block that makes these requests, by its serial
std::map<std::pair<Place, int>, int> times;                // by place and thread: accesses so far
std::map<std::tuple<Place, int, int>, Sectors> requests;  // by place, warp and time

void finish_block() {
  std::set<uintptr_t> fetched;
  for (const auto& [key, sectors] : requests) {
    const bool write = std::get<2>(std::get<0>(key));
    (write ? counts.written_sectors : counts.read_sectors) += static_cast<int64_t>(sectors.size());
    for (const auto& [number, bytes] : sectors) {
      (write ? counts.written : counts.read) += std::popcount(bytes);
      if (!write) fetched.insert(number);
    }
  }
  counts.fetched_sectors += static_cast<int64_t>(fetched.size());
  requests.clear();
  times.clear();
}

}  // namespace

void count_request(uintptr_t address, size_t bytes, bool write, void* code) {
  if (!settings.count_traffic) return;
  if (block != running.serial) finish_block();
  block = running.serial;
  const int thread = current->id;
  for (size_t part = 0; part * kWidest < bytes; ++part) {
    const Place place{code, part, write};
    Sectors& sectors = requests[{place, thread / kWarp, times[{place, thread}]++}];
    for (size_t i = part * kWidest; i < std::min(bytes, (part + 1) * kWidest); ++i) {
      sectors[(address + i) / kSector] |= 1u << (address + i) % kSector;
    }
  }
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

// Count from now on, or no longer; what was counted is in cuda_on_cpu_counts.
CALLED_BY_TESTS void cuda_on_cpu_count_traffic(int whether) {
  finish_block();
  settings.count_traffic = whether != 0;
}
