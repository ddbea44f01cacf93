// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operators of differences between updated parameters and what is held of them, on CUDA.

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "cuda_block.h"
#include "cuda_launch.h"
#include "jobs.h"

namespace loco {
namespace {

// Of the difference between updated parameters and what is held; nothing is kept of it.
template <Type kType, int kBits>
__global__ void __launch_bounds__(kThreads, kResident) difference_tile(const Compress job, const Layout layout) {
  __shared__ uint32_t shared[kWarps];
  const Place at = find_place(job.width, job.blocks, layout.log_block);
  if (at.row >= job.rows) return;  // the same for the whole thread block
  Run<Element<kType>> updated[kRuns], held[kRuns];
  const Element<kType>* from =
      static_cast<const Element<kType>*>(job.gradient) + (at.row * job.gradient_stride + at.begin);
  const Element<kType>* old = static_cast<const Element<kType>*>(job.held) + (at.row * job.held_stride + at.begin);
  load_runs(from + at.element, at.elements - at.element, layout.numbers, updated);
  load_runs(old + at.element, at.elements - at.element, layout.numbers, held);
  float h[kRuns][kRun];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const float now = number<kType>(updated[i / kRun], i % kRun), before = number<kType>(held[i / kRun], i % kRun);
    h[i / kRun][i % kRun] = sum(now, -before);
  }
  const Scale scale = quick_scale_of<kBits>(largest_of_block(h, layout.log_block, shared));
  Run<uint8_t> bytes[kRuns];
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    float grid[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) grid[i] = on_grid(h[r][i], scale.inverse);
    bytes[r] = lowest_bytes(grid);
  }
  if (at.inside) store_packed<kBits>(job, at, layout, scale, bytes);
}

// held += what a row brings
template <Type kType, int kBits>
__global__ void __launch_bounds__(kThreads, kResident) apply_tile(const Apply job, const Layout layout) {
  const Place at = find_place(job.width, job.blocks, layout.log_block);
  if (at.row >= job.rows || !at.inside) return;
  const uint8_t* wire = job.wire + at.row * job.wire_stride;
  const uint8_t* scales = wire + (job.blocks << layout.log_block) * kBits / 8 + 2 * at.first_block;
  wire += at.begin * kBits / 8;
  Piece<kBits> piece;
  load_runs(wire + (kBits == 8 ? at.element : threadIdx.x * kRun), kTile, layout.packed, piece.runs);
  piece.scale = load_scale(scales, at.block, layout.packed);
  Element<kType>* held = static_cast<Element<kType>*>(job.held) + (at.row * job.held_stride + at.begin);
  Run<Element<kType>> runs[kRuns];
  load_runs(held + at.element, at.elements - at.element, layout.numbers, runs);
  float total[kRuns][kRun];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) total[i / kRun][i % kRun] = number<kType>(runs[i / kRun], i % kRun);
  piece.add_to(total);
#pragma unroll
  for (int r = 0; r < kRuns; ++r) runs[r] = run_of<kType>(total[r]);
  store_runs(held + at.element, at.elements - at.element, layout.numbers, runs);
}

void difference_cuda(Tensor updated, Tensor held, Tensor wire, int64_t bits, int64_t block_size) {
  const Compress job = make_difference(updated, held, wire, bits, block_size);
  check_device(wire, updated, "wire");
  check_device(held, updated, "what is held");
  if (job.rows * job.blocks == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(updated.get_device_index());
  const cudaStream_t stream = current_stream(updated);
  const dim3 grid = grid_of(job.rows, job.width);
  with_type(type_of(updated), [&](auto type) {
    constexpr Type kType = decltype(type)::value;
    const Layout layout{
        log_of(block_size),
        rows_aligned<kType>(job.gradient, job.rows, job.gradient_stride) &&
            rows_aligned<kType>(job.held, job.rows, job.held_stride),
        is_aligned(job.wire)};
    with_bits(bits, [&](auto wire_bits) {
      difference_tile<kType, decltype(wire_bits)::value><<<grid, kThreads, 0, stream>>>(job, layout);
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void apply_cuda(Tensor wire, Tensor held, int64_t bits, int64_t block_size) {
  const Apply job = make_apply(wire, held, bits, block_size);
  check_device(wire, held, "wire");
  if (job.rows * job.blocks == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(held.get_device_index());
  const cudaStream_t stream = current_stream(held);
  const dim3 grid = grid_of(job.rows, job.width);
  with_type(type_of(held), [&](auto type) {
    constexpr Type kType = decltype(type)::value;
    const Layout layout{
        log_of(block_size), rows_aligned<kType>(job.held, job.rows, job.held_stride), is_aligned(job.wire)};
    with_bits(bits, [&](auto wire_bits) {
      apply_tile<kType, decltype(wire_bits)::value><<<grid, kThreads, 0, stream>>>(job, layout);
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace loco

STABLE_TORCH_LIBRARY_IMPL(deepspeed_paro, CUDA, library) {
  library.impl("loco_difference", TORCH_BOX(&loco::difference_cuda));
  library.impl("loco_apply", TORCH_BOX(&loco::apply_cuda));
}
