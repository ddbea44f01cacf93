// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operators of gradients on CUDA. Memory is passed over once, as cuda_block.h says.

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>

#include "cuda_block.h"
#include "cuda_launch.h"
#include "jobs.h"

namespace loco {
namespace {

constexpr int kBatch = 4;  // pieces that are loaded at the same time

// The 32-point transform of the chunk that a thread shares with its neighbor.
LOCO_DEVICE void transform(float (&h)[kRuns][kRun]) {
#pragma unroll
  for (int stride = 1; stride < kRun; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i & stride) continue;
      float &low = h[i / kRun][i % kRun], &high = h[i / kRun][i % kRun + stride];
      const float difference = sum(low, -high);
      low = sum(low, high);
      high = difference;
    }
  }
  const uint32_t minus = threadIdx.x << 31;  // in the neighbor's upper half
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    float& own = h[i / kRun][i % kRun];
    own = sum(__shfl_xor_sync(kAllLanes, own, 1), as_float(as_bits(own) ^ minus));
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const float low = h[0][i], high = h[1][i];
    h[0][i] = product(sum(low, high), kNormalize);
    h[1][i] = product(sum(low, -high), kNormalize);
  }
}

// What a thread has of an error that is kept, as it is stored; its numbers are to be multiplied with the step.
template <int kErrorBits>
struct Kept {
  Run<Unsigned<kErrorBits>> runs[kRuns];
  uint16_t scale;

  LOCO_DEVICE float step() const { return kErrorBits == 8 ? step_of(scale) : 1.0f; }
  LOCO_DEVICE void numbers(int run, float* to) const {
    if constexpr (kErrorBits == 8) {
      spread_bytes(runs[run], to);
    } else {
#pragma unroll
      for (int i = 0; i < kRun; ++i) to[i] = number<kErrorBits == 16 ? Type::kBFloat16 : Type::kFloat>(runs[run], i);
    }
  }
};

// Where an error's numbers and scales of a tile are.
template <int kErrorBits>
struct ErrorTile {
  Unsigned<kErrorBits>* numbers;
  uint8_t* scales;

  LOCO_DEVICE ErrorTile(const ErrorRow& row, const Place& at)
      : numbers(reinterpret_cast<Unsigned<kErrorBits>*>(row.payload) + at.begin),
        scales(reinterpret_cast<uint8_t*>(row.scales) + 2 * at.first_block) {}
};

template <int kErrorBits>
LOCO_DEVICE Kept<kErrorBits> load_error(const Compress& job, const Place& at, bool aligned) {
  Kept<kErrorBits> old{};
  if (!job.has_error || !at.inside) return old;
  const ErrorTile<kErrorBits> tile(job.error(at.row), at);
  load_runs(tile.numbers + at.element, kTile, aligned, old.runs);
  if (kErrorBits == 8) old.scale = load_scale(tile.scales, at.block, aligned);
  return old;
}

// h = gradient + unit * error
template <Type kType, int kErrorBits>
LOCO_DEVICE void compensate(
    const Compress& job, const Run<Element<kType>> (&gradient)[kRuns], const Kept<kErrorBits>& old,
    float (&h)[kRuns][kRun]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) h[i / kRun][i % kRun] = number<kType>(gradient[i / kRun], i % kRun);
  if (job.hadamard) transform(h);
  const float factor = product(job.unit, old.step());
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    float e[kRun];
    old.numbers(r, e);
#pragma unroll
    for (int i = 0; i < kRun; ++i) h[r][i] = sum(h[r][i], product(factor, e[i]));
  }
}

// The wire's part of a block, and in the place of h what is to be kept.
template <int kBits, int kErrorBits>
LOCO_DEVICE void send(
    const Compress& job, const Place& at, const Layout& layout, const Scale& scale, const Kept<kErrorBits>& old,
    float (&h)[kRuns][kRun]) {
  const float weight = product(job.beta, old.step());
  Run<uint8_t> bytes[kRuns];
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    float grid[kRun], e[kRun];
    old.numbers(r, e);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      grid[i] = on_grid(h[r][i], scale.inverse);
      const float lost = __fmaf_rn(sum(kRounding, -grid[i]), scale.step, h[r][i]);
      h[r][i] = sum(product(weight, e[i]), product(job.fresh, lost));
    }
    bytes[r] = lowest_bytes(grid);
  }
  if (at.inside) store_packed<kBits>(job, at, layout, scale, bytes);
}

// `fresh` in the place of the old error, unless something in the block was not finite.
template <int kErrorBits>
LOCO_DEVICE void keep_error(
    const Compress& job, const Place& at, const Layout& layout, bool finite, const Scale& scale,
    const Kept<kErrorBits>& old, const float (&fresh)[kRuns][kRun]) {
  if (!at.inside) return;
  Run<Unsigned<kErrorBits>> runs[kRuns];
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    if constexpr (kErrorBits == 8) {
      float grid[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) grid[i] = on_grid(fresh[r][i], scale.inverse);
      runs[r] = lowest_bytes(grid);
      if (!scale.finite) runs[r] = {};
    } else {
      runs[r] = run_of<kErrorBits == 16 ? Type::kBFloat16 : Type::kFloat>(fresh[r]);
    }
#pragma unroll
    for (int i = 0; i < kRun * kErrorBits / 32; ++i) {
      if (!finite) runs[r].words[i] = old.runs[r].words[i];
    }
  }
  const ErrorTile<kErrorBits> tile(job.new_error(at.row), at);
  store_runs(tile.numbers + at.element, kTile, layout.packed, runs);
  if (kErrorBits == 8) end_block(tile.scales, at, layout, job.blocks, finite ? scale.stored : old.scale);
}

template <Type kType, int kBits, int kErrorBits>
__global__ void __launch_bounds__(kThreads, kResident) compress_tile(const Compress job, const Layout layout) {
  __shared__ uint32_t shared[2][kWarps];
  const Place at = find_place(job.width, job.blocks, layout.log_block);
  if (at.row >= job.rows) return;  // the same for the whole thread block
  Run<Element<kType>> gradient[kRuns];
  const Element<kType>* from =
      static_cast<const Element<kType>*>(job.gradient) + (at.row * job.gradient_stride + at.begin);
  load_runs(from + at.element, at.elements - at.element, layout.numbers, gradient);
  const Kept<kErrorBits> old = load_error<kErrorBits>(job, at, layout.packed);
  float h[kRuns][kRun];
  compensate<kType, kErrorBits>(job, gradient, old, h);
  const Scale scale = quick_scale_of<kBits>(largest_of_block(h, layout.log_block, shared[0]));
  send<kBits, kErrorBits>(job, at, layout, scale, old, h);
  if (!job.has_new_error) return;
  Scale fresh{};
  if constexpr (kErrorBits == 8) {
    fresh = quick_scale_of<8>(largest_of_block(h, layout.log_block, shared[1]));
    // In place, a lane stores the scale that others have loaded; shuffles order no memory. A block of numbers that is
    // larger than a warp's has passed a barrier.
    __syncwarp();
  }
  keep_error<kErrorBits>(job, at, layout, scale.finite, fresh, old, h);
}

template <Type kType, int kBits>
__global__ void __launch_bounds__(kThreads, kResident) decompress_tile(const Decompress job, const Layout layout) {
  const Place at = find_place(job.width, job.blocks, layout.log_block);
  float total[kRuns][kRun];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) total[i / kRun][i % kRun] = -0.0f;  // what is added to it stays what it is
  const int pieces = at.inside ? static_cast<int>(job.pieces) : 0;
  const uint8_t* wire = job.wire + at.begin * kBits / 8;
  const uint8_t* scales = job.wire + (job.blocks << layout.log_block) * kBits / 8 + 2 * at.first_block;
  for (int first = 0; first < pieces; first += kBatch) {  // in the order of ranks
    Piece<kBits> batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= pieces) break;
      const int64_t row = (first + i) * job.wire_stride;
      load_runs(wire + row + (kBits == 8 ? at.element : threadIdx.x * kRun), kTile, layout.packed, batch[i].runs);
      batch[i].scale = load_scale(scales + row, at.block, layout.packed);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < pieces) batch[i].add_to(total);
    }
  }
  if (job.hadamard) transform(total);
  Run<Element<kType>> runs[kRuns];
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) total[r][i] = product(total[r][i], job.factor);
    runs[r] = run_of<kType>(total[r]);
  }
  Element<kType>* out = static_cast<Element<kType>*>(job.out) + at.begin;
  store_runs(out + at.element, at.elements - at.element, layout.numbers, runs);
}

void compress_cuda(
    Tensor gradient, Tensor wire, std::optional<Tensor> error, std::optional<Tensor> new_error, int64_t bits,
    int64_t block_size, double beta, double unit, bool hadamard) {
  int kept = 8;
  const Compress job = make_compress(gradient, wire, error, new_error, bits, block_size, beta, unit, hadamard, &kept);
  check_device(wire, gradient, "wire");
  if (job.has_error) check_device(*error, gradient, "error");
  if (job.has_new_error) check_device(*new_error, gradient, "new_error");
  if (job.rows * job.blocks == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(gradient.get_device_index());
  const cudaStream_t stream = current_stream(gradient);
  const dim3 grid = grid_of(job.rows, job.width);
  with_type(type_of(gradient), [&](auto type) {
    constexpr Type kType = decltype(type)::value;
    const Layout layout{
        log_of(block_size), rows_aligned<kType>(job.gradient, job.rows, job.gradient_stride),
        is_aligned(job.wire) && is_aligned(job.read_error) && is_aligned(job.write_error)};
    with_bits(bits, [&](auto wire_bits) {
      with_error_bits(kept, [&](auto error_bits) {
        constexpr int kBits = decltype(wire_bits)::value, kErrorBits = decltype(error_bits)::value;
        compress_tile<kType, kBits, kErrorBits><<<grid, kThreads, 0, stream>>>(job, layout);
      });
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void decompress_cuda(Tensor wire, Tensor out, int64_t bits, int64_t block_size, double factor, bool hadamard) {
  const Decompress job = make_decompress(wire, out, bits, block_size, factor, hadamard);
  check_device(wire, out, "wire");
  if (job.blocks == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const cudaStream_t stream = current_stream(out);
  const dim3 grid = grid_of(1, job.width);
  const Layout layout{log_of(block_size), is_aligned(job.out), is_aligned(job.wire)};
  with_type(type_of(out), [&](auto type) {
    with_bits(bits, [&](auto wire_bits) {
      decompress_tile<decltype(type)::value, decltype(wire_bits)::value><<<grid, kThreads, 0, stream>>>(job, layout);
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace loco

STABLE_TORCH_LIBRARY_IMPL(deepspeed_paro, CUDA, library) {
  library.impl("loco_compress", TORCH_BOX(&loco::compress_cuda));
  library.impl("loco_decompress", TORCH_BOX(&loco::decompress_cuda));
}
