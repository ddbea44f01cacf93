// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operators of lossless updates on CUDA, with a thread block for each tile. Its elements are taken in segments of
// 32 adjacent ones, one for each lane, so a ballot is a segment of the bitmap. The place of an element's nibble is the
// number of bits set below its own, plus the counts of the segments before it. A tile has as many segments as a warp
// has lanes.

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "cuda_launch.h"
#include "lossless.h"

namespace loco {
namespace lossless {
namespace {

#define LOCO_DEVICE __device__ __forceinline__

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kEach = kTile / kThreads;    // elements of a thread, kThreads apart
constexpr int kSegments = kTile / kWarp;   // a segment's index is that of its elements, divided by 32
constexpr int kNibbleUnits = kTile / 4;    // at most
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int64_t kMostRows = 65535;  // of a dimension of a grid

static_assert(kSegments == kWarp, "a warp scans the segments' counts");
static_assert(kNibbleUnits / 2 <= kThreads, "a thread clears at most one word of nibbles");

LOCO_DEVICE int lane() { return threadIdx.x % kWarp; }
LOCO_DEVICE int element_of(int i) { return i * kThreads + threadIdx.x; }
LOCO_DEVICE int segment_of(int i) { return i * kWarps + threadIdx.x / kWarp; }

// A thread's elements; zeros after the end of the row.
LOCO_DEVICE void load(const uint16_t* from, int count, uint16_t (&bits)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) bits[i] = element_of(i) < count ? from[element_of(i)] : 0;
}

LOCO_DEVICE int elements_of(int64_t width, int64_t tile) {
  return static_cast<int>(min(width - tile * kTile, static_cast<int64_t>(kTile)));
}

LOCO_DEVICE uint32_t load_word(const uint16_t* units) {
  return units[0] | static_cast<uint32_t>(units[1]) << 16;
}

// The ranks of the tile's flagged elements in their order, and how many there are. All threads of the block must call
// this. `shared` may be used once: a second use would need another barrier.
LOCO_DEVICE int rank_all(const bool (&flags)[kEach], int (&places)[kEach], int (&shared)[kSegments]) {
  uint32_t ballots[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    ballots[i] = __ballot_sync(kAllLanes, flags[i]);
    if (lane() == 0) shared[segment_of(i)] = __popc(ballots[i]);
  }
  __syncthreads();
  const int own = shared[lane()];
  int sum = own;  // of the segments up to that of this number
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    const int before = __shfl_up_sync(kAllLanes, sum, apart);
    if (lane() >= apart) sum += before;
  }
  const uint32_t below = (1u << lane()) - 1;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    places[i] = __shfl_sync(kAllLanes, sum - own, segment_of(i)) + __popc(ballots[i] & below);
  }
  return __shfl_sync(kAllLanes, sum, kSegments - 1);
}

__global__ void __launch_bounds__(kThreads) measure_tile(const Pack job) {
  __shared__ uint32_t shared[kWarps][2];
  const int64_t tile = blockIdx.x;
  const int count = elements_of(job.width, tile);
  uint16_t updated[kEach], held[kEach];
  load(job.updated + tile * kTile, count, updated);
  load(job.held + tile * kTile, count, held);
  uint32_t changed = 0, far = 0;  // upper halves count those without a nibble: a tile has fewer than 2^16 elements
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int16_t d = difference_of(updated[i], held[i]);
    changed += __popc(__ballot_sync(kAllLanes, is_picked<false>(d)));
    changed += __popc(__ballot_sync(kAllLanes, is_outside(d, kLowest, kHighest<false>))) << 16;
    far += __popc(__ballot_sync(kAllLanes, is_picked<true>(d)));
    far += __popc(__ballot_sync(kAllLanes, is_outside(d, kLowest, kHighest<true>))) << 16;
  }
  if (lane() == 0) {
    shared[threadIdx.x / kWarp][0] = changed;
    shared[threadIdx.x / kWarp][1] = far;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    changed += shared[warp][0];
    far += shared[warp][1];
  }
  job.measured[tile] = best_of(
      {static_cast<int>(changed & 0xffffu), static_cast<int>(changed >> 16), static_cast<int>(far & 0xffffu),
       static_cast<int>(far >> 16)});
}

// Bits 0 to 15 of a number at its even places.
LOCO_DEVICE uint32_t spread(uint32_t bits) {
  bits = (bits | bits << 8) & 0x00ff00ffu;
  bits = (bits | bits << 4) & 0x0f0f0f0fu;
  bits = (bits | bits << 2) & 0x33333333u;
  return (bits | bits << 1) & 0x55555555u;
}

// The bitmap or the pairs of one segment; all lanes of a warp must call this.
template <bool kInPairs>
LOCO_DEVICE void set_codes(uint16_t (&codes)[kBaseUnits<kInPairs>], int segment, int16_t d, bool picked) {
  if constexpr (kInPairs) {
    const uint32_t low = __ballot_sync(kAllLanes, !picked && (d & 1) != 0);
    const uint32_t high = __ballot_sync(kAllLanes, picked || d == -1);
    const int half = lane() / 2 % 2 * 16;  // lanes 0 and 1 have the first 16 elements, 2 and 3 the others
    const uint32_t pairs = spread(low >> half & 0xffffu) | spread(high >> half & 0xffffu) << 1;
    if (lane() < 4) codes[segment * 4 + lane()] = static_cast<uint16_t>(pairs >> (lane() % 2 * 16));
  } else {
    const uint32_t bitmap = __ballot_sync(kAllLanes, picked);
    if (lane() < 2) codes[segment * 2 + lane()] = static_cast<uint16_t>(bitmap >> (lane() * 16));
  }
}

// `room`: units from the section's start to the end of the wire's row. The section is put together in shared memory, so
// that a warp stores adjacent units; its own codes and escapes alone are less than a sector.
template <bool kInPairs>
LOCO_DEVICE void store_section(const int16_t (&d)[kEach], uint16_t* section, int64_t room) {
  __shared__ int picked_of[kSegments], escaped_of[kSegments];
  __shared__ uint32_t nibbles[kNibbleUnits / 2];
  __shared__ uint16_t codes[kBaseUnits<kInPairs>], escape_units[kTile];
  if (threadIdx.x < kNibbleUnits / 2) nibbles[threadIdx.x] = 0;  // visible to all after rank_all's barriers
  bool picked[kEach], escaped[kEach];
  int place[kEach], escape[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    picked[i] = is_picked<kInPairs>(d[i]);
    escaped[i] = is_outside(d[i], kLowest, kHighest<kInPairs>);
  }
  const int count = rank_all(picked, place, picked_of), escapes = rank_all(escaped, escape, escaped_of);
  const int behind = kBaseUnits<kInPairs> + nibble_units(count);
  if (behind + escapes > room) return;  // the same for the whole thread block
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    set_codes<kInPairs>(codes, segment_of(i), d[i], picked[i]);
    if (picked[i]) {
      atomicOr(&nibbles[place[i] / 8], static_cast<uint32_t>(nibble_of<kInPairs>(d[i])) << (place[i] % 8 * 4));
    }
    if (escaped[i]) escape_units[escape[i]] = static_cast<uint16_t>(d[i]);
  }
  __syncthreads();
  for (int unit = threadIdx.x; unit < behind + escapes; unit += kThreads) {
    const int nibble = unit - kBaseUnits<kInPairs>;
    if (nibble < 0) {
      section[unit] = codes[unit];
    } else if (unit < behind) {
      section[unit] = static_cast<uint16_t>(nibbles[nibble / 2] >> (nibble % 2 * 16));
    } else {
      section[unit] = escape_units[unit - behind];
    }
  }
}

// The wire was filled with zeros before.
__global__ void __launch_bounds__(kThreads) pack_tile(const Pack job) {
  const int64_t tile = blockIdx.x;
  const uint32_t word = job.header[tile], mode = word >> 30;
  if (threadIdx.x < 2) job.wire[2 * tile + threadIdx.x] = static_cast<uint16_t>(word >> (threadIdx.x * 16));
  if (mode == kSame) return;  // the same for the whole thread block
  const int64_t first = 2 * job.tiles + (word & kOffset), room = job.units - first;
  uint16_t* section = job.wire + first;
  const int count = elements_of(job.width, tile);
  uint16_t updated[kEach], held[kEach];
  load(job.updated + tile * kTile, count, updated);
  if (mode == kPlain) {
    if (kPlainUnits > room) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) section[element_of(i)] = updated[i];
    return;
  }
  load(job.held + tile * kTile, count, held);
  int16_t d[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) d[i] = difference_of(updated[i], held[i]);
  if (mode == kPairs) {
    store_section<true>(d, section, room);
  } else {
    store_section<false>(d, section, room);
  }
}

// The differences of a section in `room` units; returns whether it fits into them, the same for all threads.
template <bool kInPairs>
LOCO_DEVICE bool load_section(const uint16_t* section, int64_t room, int16_t (&d)[kEach]) {
  __shared__ int picked_of[kSegments], escaped_of[kSegments];
  constexpr int kBits = kInPairs ? 2 : 1;
  constexpr int kInUnit = 16 / kBits;  // elements
  if (room < kBaseUnits<kInPairs>) return false;
  bool picked[kEach], escaped[kEach];
  int place[kEach], escape[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int element = element_of(i);
    const int code = section[element / kInUnit] >> (element % kInUnit * kBits) & (kInPairs ? 3 : 1);
    picked[i] = code == (kInPairs ? 2 : 1);
    d[i] = static_cast<int16_t>(code == 3 ? -1 : code & 1);  // of a picked one it is written over below
  }
  const int count = rank_all(picked, place, picked_of);
  const int behind = kBaseUnits<kInPairs> + nibble_units(count);
  if (room < behind) return false;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    escaped[i] = false;
    if (!picked[i]) continue;
    const int nibble = section[kBaseUnits<kInPairs> + place[i] / 4] >> (place[i] % 4 * 4) & 15;
    escaped[i] = nibble == kEscape;
    d[i] = of_nibble<kInPairs>(nibble);
  }
  const int escapes = rank_all(escaped, escape, escaped_of);
  if (room < behind + escapes) return false;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (escaped[i]) d[i] = static_cast<int16_t>(section[behind + escape[i]]);
  }
  return true;
}

__global__ void __launch_bounds__(kThreads) apply_tile(const Apply job) {
  const int64_t tile = blockIdx.x, row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  if (row >= job.rows) return;  // the same for the whole thread block
  const uint16_t* wire = job.wire + row * job.units;
  const uint32_t word = load_word(wire + 2 * tile), mode = word >> 30;
  if (mode == kSame) return;
  const int64_t first = 2 * job.tiles + (word & kOffset), room = job.units - first;
  const uint16_t* section = wire + first;
  uint16_t* held = job.held + row * job.held_stride + tile * kTile;
  const int count = elements_of(job.width, tile);
  if (mode == kPlain) {
    if (room < kPlainUnits) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (element_of(i) < count) held[element_of(i)] = section[element_of(i)];
    }
    return;
  }
  int16_t d[kEach];
  if (!(mode == kPairs ? load_section<true>(section, room, d) : load_section<false>(section, room, d))) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (element_of(i) >= count) continue;
    uint16_t& own = held[element_of(i)];
    own = ordinal(static_cast<uint16_t>(ordinal(own) + static_cast<uint16_t>(d[i])));
  }
}

void measure_cuda(Tensor updated, Tensor held, Tensor tiles) {
  const Pack job = make_measure(updated, held, tiles);
  check_device(held, updated, "what is held");
  check_device(tiles, updated, "tiles");
  if (job.tiles == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(updated.get_device_index());
  measure_tile<<<static_cast<unsigned>(job.tiles), kThreads, 0, current_stream(updated)>>>(job);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void pack_cuda(Tensor updated, Tensor held, Tensor header, Tensor wire) {
  const Pack job = make_pack(updated, held, header, wire);
  check_device(held, updated, "what is held");
  check_device(header, updated, "header");
  check_device(wire, updated, "wire");
  if (job.tiles == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(updated.get_device_index());
  const cudaStream_t stream = current_stream(updated);
  STD_CUDA_CHECK(cudaMemsetAsync(job.wire, 0, job.units * sizeof(job.wire[0]), stream));
  pack_tile<<<static_cast<unsigned>(job.tiles), kThreads, 0, stream>>>(job);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void apply_cuda(Tensor wire, Tensor held) {
  const Apply job = make_apply(wire, held);
  check_device(wire, held, "wire");
  if (job.rows * job.tiles == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(held.get_device_index());
  const int64_t down = job.rows < kMostRows ? job.rows : kMostRows;
  const dim3 grid(
      static_cast<unsigned>(job.tiles), static_cast<unsigned>(down),
      static_cast<unsigned>((job.rows + down - 1) / down));
  apply_tile<<<grid, kThreads, 0, current_stream(held)>>>(job);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace lossless
}  // namespace loco

STABLE_TORCH_LIBRARY_IMPL(deepspeed_paro, CUDA, library) {
  library.impl("lossless_measure", TORCH_BOX(&loco::lossless::measure_cuda));
  library.impl("lossless_pack", TORCH_BOX(&loco::lossless::pack_cuda));
  library.impl("lossless_apply", TORCH_BOX(&loco::lossless::apply_cuda));
}
