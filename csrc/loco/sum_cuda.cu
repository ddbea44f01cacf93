// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The sum of the parts of a bucket, on CUDA: each part is read once, and the sum is written once.

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "cuda_block.h"
#include "cuda_launch.h"
#include "jobs.h"

namespace loco {
namespace {

constexpr int kLogTile = 12;
static_assert(kTile == 1 << kLogTile, "a tile is a block");

// Parts that are loaded at the same time. More would take too many registers.
template <Type kType>
constexpr int kLoaded = kType == Type::kFloat ? 1 : 4;

template <Type kType>
__global__ void __launch_bounds__(kThreads, kResident) sum_tile(const Sum job, const bool aligned) {
  const Place at = find_place(job.width, job.blocks, kLogTile);
  const int left = at.elements - at.element;
  const Element<kType>* from = static_cast<const Element<kType>*>(job.parts) + at.begin + at.element;
  float total[kRuns][kRun];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) total[i / kRun][i % kRun] = -0.0f;  // what is added to it stays what it is
  for (int64_t first = 0; first < job.count; first += kLoaded<kType>) {  // in the order of ranks
    Run<Element<kType>> parts[kLoaded<kType>][kRuns];
#pragma unroll
    for (int i = 0; i < kLoaded<kType>; ++i) {
      if (first + i < job.count) load_runs(from + (first + i) * job.stride, left, aligned, parts[i]);
    }
#pragma unroll
    for (int i = 0; i < kLoaded<kType>; ++i) {
      if (first + i >= job.count) break;
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        float& to = total[j / kRun][j % kRun];
        to = sum(to, number<kType>(parts[i][j / kRun], j % kRun));
      }
    }
  }
  Run<Element<kType>> runs[kRuns];
#pragma unroll
  for (int r = 0; r < kRuns; ++r) runs[r] = run_of<kType>(total[r]);
  store_runs(static_cast<Element<kType>*>(job.out) + at.begin + at.element, left, aligned, runs);
}

void sum_cuda(Tensor parts, Tensor out) {
  const Sum job = make_sum(parts, out, kTile);
  check_device(parts, out, "parts");
  if (job.blocks == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const cudaStream_t stream = current_stream(out);
  const dim3 grid = grid_of(1, job.width);
  with_type(type_of(out), [&](auto type) {
    constexpr Type kType = decltype(type)::value;
    const bool aligned = is_aligned(job.out) && rows_aligned<kType>(job.parts, job.count, job.stride);
    sum_tile<kType><<<grid, kThreads, 0, stream>>>(job, aligned);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace loco

STABLE_TORCH_LIBRARY_IMPL(deepspeed_paro, CUDA, library) {
  library.impl("sum_parts", TORCH_BOX(&loco::sum_cuda));
}
