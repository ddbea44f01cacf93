// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operators on CUDA. Memory is passed over once: what a thread needs of its 16 elements stays in its registers, and
// the threads of a block of numbers exchange no more than its largest magnitude.
//
// Sums and products are written out (sum, product), so that no compiler fuses what the reference rounds twice. Where a
// product is exact, fused or not is the same to the bit: an integer of at most 8 bits times a bfloat16 scale is, and
// there the fused operation saves one.

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <type_traits>

#include "cuda_launch.h"
#include "cuda_runs.h"
#include "jobs.h"

namespace loco {
namespace {

constexpr int kTile = kLargestBlock;  // elements of a thread block: no block of theirs needs two
constexpr int kThreads = kTile / kUnit;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kResident = 4;  // thread blocks of a multiprocessor, whose loads hide one another's arithmetic
constexpr int kBatch = 4;     // pieces whose loads are under way together
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int64_t kMostRows = 65535;  // of a dimension of a grid

struct Layout {
  int log_block;         // of the block size
  bool numbers, packed;  // whether all their runs are aligned: gradients or results, and wire and errors
};

// What a thread works on. What is of the tile is one for all threads, so that addresses are that and a small integer.
struct Place {
  int64_t row, begin, first_block;  // of the tile; its first element and block in the row
  int elements, padded;             // that the row has of the tile, without and with the zeros behind its end
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

// The scale of a block, by its first thread; after that of the row's last one zeros up to the end of the row.
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

// The bits of scale_of, without its branches and the slow paths of its divisions. The remainder corrects a quotient of
// these divisors to the rounded one: that was tried with every magnitude. So it does the reciprocal, which is never
// close to a tie, as the step has 8 significant bits only.
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

// The wire's part of a block: the lowest bytes of its numbers on the grid, in few bits, and their scale.
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
  if (at.row >= job.rows) return;  // so does the whole thread block
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
  if constexpr (kErrorBits == 8) fresh = quick_scale_of<8>(largest_of_block(h, layout.log_block, shared[1]));
  keep_error<kErrorBits>(job, at, layout, scale.finite, fresh, old, h);
}

// Of the difference between updated parameters and what is held; nothing is kept of it.
template <Type kType, int kBits>
__global__ void __launch_bounds__(kThreads, kResident) difference_tile(const Compress job, const Layout layout) {
  __shared__ uint32_t shared[kWarps];
  const Place at = find_place(job.width, job.blocks, layout.log_block);
  if (at.row >= job.rows) return;  // so does the whole thread block
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

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0; }

// Whether runs of all rows are aligned.
template <Type kType>
bool rows_aligned(const void* numbers, int64_t rows, int64_t stride) {
  return is_aligned(numbers) && (rows == 1 || stride * int{sizeof(Element<kType>)} % kAlignment == 0);
}

int log_of(int64_t block_size) {
  int log = 0;
  while (int64_t{1} << log < block_size) ++log;
  return log;
}

dim3 grid_of(int64_t rows, int64_t width) {
  const int64_t along = (width + kTile - 1) / kTile;
  const int64_t down = rows < kMostRows ? rows : kMostRows;
  return dim3(
      static_cast<unsigned>(along), static_cast<unsigned>(down), static_cast<unsigned>((rows + down - 1) / down));
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
  library.impl("loco_compress", TORCH_BOX(&loco::compress_cuda));
  library.impl("loco_decompress", TORCH_BOX(&loco::decompress_cuda));
  library.impl("loco_difference", TORCH_BOX(&loco::difference_cuda));
  library.impl("loco_apply", TORCH_BOX(&loco::apply_cuda));
}
