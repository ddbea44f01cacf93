// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA kernels of gradients and of differences share: which elements a thread has, the scale of a block, how
// it gets to the wire and back, and the layout of a grid. Kernels pass over memory once: a thread keeps what it needs
// of its 16 elements in registers, and the threads of a block of numbers exchange only its largest magnitude.
//
// Sums and products are written out (sum, product), so that no compiler fuses what the reference rounds twice. Where a
// product is exact, fused or not is the same to the bit: an integer of at most 8 bits times a bfloat16 scale is, and
// there the fused operation saves one.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "block.h"
#include "cuda_runs.h"
#include "jobs.h"

namespace loco {

constexpr int kTile = kLargestBlock;  // elements of a thread block, so that no block of numbers needs two
constexpr int kThreads = kTile / kUnit;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kResident = 4;  // thread blocks of a multiprocessor: one loads while others compute
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int64_t kMostRows = 65535;  // of a dimension of a grid

struct Layout {
  int log_block;         // of the block size
  bool numbers, packed;  // whether all their runs are aligned: gradients or results, and wire and errors
};

// What a thread works on. Fields of the tile are the same for all threads, so an address is theirs plus a small offset.
struct Place {
  int64_t row, begin, first_block;  // of the tile; its first element and block in the row
  int elements, padded;             // that the row has in the tile, without and with the zeros after its end
  int element;                      // the thread's first, in the tile
  int block;                        // likewise
  bool inside;                      // there is such a block
};

LOCO_DEVICE Place find_place(int64_t width, int64_t blocks, int log_block) {
  Place at;
  at.row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  at.begin = static_cast<int64_t>(blockIdx.x) * kTile;
  at.first_block = at.begin >> log_block;
  at.elements = static_cast<int>(min(width - at.begin, static_cast<int64_t>(kTile)));
  at.padded = static_cast<int>(min((blocks << log_block) - at.begin, static_cast<int64_t>(kTile)));
  const int unit = threadIdx.x;
  at.element = (unit & ~1) * kUnit + (unit & 1) * kRun;
  at.block = at.element >> log_block;
  at.inside = at.element < at.padded;
  return at;
}

// The first thread of a block writes its scale; that of the row's last block also writes zeros up to the row's end.
LOCO_DEVICE void end_block(
    uint8_t* scales, const Place& at, const Layout& layout, int64_t blocks, uint16_t scale) {
  if (!at.inside || (at.element & ((1 << layout.log_block) - 1)) != 0) return;
  store_scale(scales, at.block, scale, layout.packed);
  const int64_t end = at.first_block + at.block + 1;
  if (end != blocks) return;
  const int padding = static_cast<int>(-end & (kAlignment / 2 - 1));
#pragma unroll 1
  for (int i = 1; i <= padding; ++i) store_scale(scales, at.block + i, 0, layout.packed);
}

// The bits of scale_of, without its branches and the slow paths of its divisions. For these divisors, the remainder
// corrects a quotient to the rounded one, which was tried with every magnitude. It also corrects the reciprocal, which
// is never close to a tie, since the step has only 8 significant bits.
template <int kBits>
LOCO_DEVICE Scale quick_scale_of(uint32_t most) {
  constexpr uint32_t kLargestStep = kBits == 4 ? 0x7e120000u : 0x7c010000u;  // times the largest integer it is finite
  constexpr float kInverse = 1.0f / kLargest<kBits>;
  const float value = as_float(most), near = product(value, kInverse);
  const float exact = __fmaf_rn(__fmaf_rn(-kLargest<kBits>, near, value), kInverse, near);
  const uint32_t up = (as_bits(exact) + 0xffffu) & 0xffff0000u;
  const bool finite = most < kInfinity && up <= kLargestStep;
  const uint32_t step = as_bits(exact) < kSmallestNormal ? 0 : up;
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(as_float(step)));
  inverse = __fmaf_rn(-__fmaf_rn(as_float(step), inverse, -1.0f), inverse, inverse);
  const uint32_t scale = finite ? step >> 16 : kScaleOfNotFinite;
  return {static_cast<uint16_t>(scale), as_float(step), step == 0 ? 0.0f : inverse, finite};
}

// The largest magnitude, as bits, of a block. `shared` may be used once: a second use would need another barrier.
LOCO_DEVICE uint32_t largest_of_block(const float (&h)[kRuns][kRun], int log_block, uint32_t* shared) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) most = max(most, as_bits(h[i / kRun][i % kRun]) & kMagnitude);
  const int threads = (1 << log_block) / kUnit;
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    if (apart < threads) most = max(most, __shfl_xor_sync(kAllLanes, most, apart));
  }
  if (threads <= kWarp) return most;
  const int warp = threadIdx.x / kWarp, warps = threads / kWarp;
  if (threadIdx.x % kWarp == 0) shared[warp] = most;
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < warps; ++i) most = max(most, shared[(warp & -warps) + i]);
  return most;
}

// Write a block to the wire: the lowest bytes of its numbers on the grid, in few bits, and their scale.
template <int kBits>
LOCO_DEVICE void store_packed(
    const Compress& job, const Place& at, const Layout& layout, const Scale& scale, const Run<uint8_t> (&bytes)[kRuns]) {
  uint8_t* wire = job.wire + at.row * job.wire_stride;
  uint8_t* scales = wire + (job.blocks << layout.log_block) * kBits / 8 + 2 * at.first_block;
  wire += at.begin * kBits / 8;
  constexpr int kStored = kBits / 4;
  Run<uint8_t> payload[kStored] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t first = bytes[0].words[i], second = bytes[1].words[i];
    const uint32_t nibbles = (first & 0x0f0f0f0fu) | ((second << 4) & 0xf0f0f0f0u);
    if (scale.finite) payload[0].words[i] = kBits == 8 ? first : nibbles;
    if (scale.finite && kBits == 8) payload[kStored - 1].words[i] = second;
  }
  store_runs(wire + (kBits == 8 ? at.element : threadIdx.x * kRun), kTile, layout.packed, payload);
  end_block(scales, at, layout, job.blocks, scale.stored);
}

// What a thread has of one piece.
template <int kBits>
struct Piece {
  Run<uint8_t> runs[kBits / 4];
  uint16_t scale;

  LOCO_DEVICE void add_to(float (&total)[kRuns][kRun]) const {
    float q[kRuns][kRun];
    if constexpr (kBits == 8) {
      for (int r = 0; r < kRuns; ++r) spread_bytes(runs[r], q[r]);
    } else {
      const uint32_t first = runs[0].words[0] ^ 0x88888888u, second = runs[0].words[1] ^ 0x88888888u;
      spread<8>(first & 0x0f0f0f0fu, second & 0x0f0f0f0fu, q[0]);
      spread<8>((first >> 4) & 0x0f0f0f0fu, (second >> 4) & 0x0f0f0f0fu, q[1]);
    }
    const float step = step_of(scale);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      float& to = total[i / kRun][i % kRun];
      to = __fmaf_rn(q[i / kRun][i % kRun], step, to);
    }
  }
};

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0; }

// Whether runs of all rows are aligned.
template <Type kType>
bool rows_aligned(const void* numbers, int64_t rows, int64_t stride) {
  return is_aligned(numbers) && (rows == 1 || stride * int{sizeof(Element<kType>)} % kAlignment == 0);
}

inline int log_of(int64_t block_size) {
  int log = 0;
  while (int64_t{1} << log < block_size) ++log;
  return log;
}

inline dim3 grid_of(int64_t rows, int64_t width) {
  const int64_t along = (width + kTile - 1) / kTile;
  const int64_t down = rows < kMostRows ? rows : kMostRows;
  return dim3(
      static_cast<unsigned>(along), static_cast<unsigned>(down), static_cast<unsigned>((rows + down - 1) / down));
}

}  // namespace loco
