// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operators on CUDA. Memory is passed over once: what a thread needs of its 16 elements stays in its registers, and
// the threads of a block of numbers exchange no more than its largest magnitude.
//
// Sums and products are written out (sum, product), so that no compiler fuses what the reference rounds twice. Where a
// product is exact, fused or not is the same to the bit: an integer of at most 8 bits times a bfloat16 scale is, and
// there the fused operation saves one.

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>
#include <optional>
#include <type_traits>

#include "jobs.h"

#define LOCO_DEVICE __device__ __forceinline__

namespace loco {
namespace {

// A thread takes two runs of 8 elements of one chunk, 16 apart: these share bytes of a 4-bit payload, and 8 elements of
// 16 bits are what the widest access takes. Two threads take a chunk.
constexpr int kRun = 8;
constexpr int kRuns = 2;
constexpr int kUnit = kRun * kRuns;
constexpr int kWarp = 32;
constexpr int kThreads = kLargestBlock / kUnit;  // so that no block needs two thread blocks
constexpr int kWarps = kThreads / kWarp;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int64_t kMostRows = 65535;  // of a dimension of a grid

constexpr uint32_t kMagic = 0x4b000000u;  // as a float 2^23: an integer added to its bits is added to its value
constexpr float kMagicValue = 8388608.0f;

template <int kSize>
using Unsigned = std::conditional_t<kSize == 8, uint8_t, std::conditional_t<kSize == 16, uint16_t, uint32_t>>;

template <Type kType>
using Element = std::conditional_t<kType == Type::kFloat, uint32_t, uint16_t>;

// Elements that lie side by side. Aligned, so that copies use the widest accesses there are.
template <typename Stored>
struct alignas(sizeof(Stored) == 1 ? 8 : 16) Run {
  uint32_t words[kRun * sizeof(Stored) / 4];
};

// Which tensors have all their runs aligned.
struct Aligned {
  bool numbers, wire, error;
};

// What a thread works on.
struct Place {
  int64_t row, block, chunk;
  int half;     // of the chunk's runs, this thread's are the first ones in its halves, or the second ones
  bool inside;  // the row has this block
  bool first;   // of its block's threads

  LOCO_DEVICE int64_t element(int run) const { return chunk * kChunk + run * kHalfChunk + half * kRun; }
};

LOCO_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
LOCO_DEVICE float sum(float a, float b) { return __fadd_rn(a, b); }

LOCO_DEVICE Place find_place(int block_size, int64_t blocks) {
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Place at;
  at.row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  at.chunk = unit >> 1;
  at.half = threadIdx.x & 1;
  const int threads_of_block = block_size / kUnit;
  at.block = unit >> (__ffs(threads_of_block) - 1);
  at.first = (threadIdx.x & (threads_of_block - 1)) == 0;
  at.inside = at.block < blocks;
  return at;
}

// The first `count` elements of a run; zeros in the place of others.
template <typename Stored>
LOCO_DEVICE Run<Stored> load_run(const void* base, int64_t offset, int count, bool aligned) {
  const Stored* from = static_cast<const Stored*>(base) + offset;
  Run<Stored> run{};
  if (aligned && count == kRun) {
    run = *reinterpret_cast<const Run<Stored>*>(from);
    return run;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    constexpr int kBytes = sizeof(Stored);
    if (i < count) run.words[i * kBytes / 4] |= static_cast<uint32_t>(from[i]) << (i * kBytes % 4 * 8);
  }
  return run;
}

template <typename Stored>
LOCO_DEVICE void store_run(void* base, int64_t offset, const Run<Stored>& run, int count, bool aligned) {
  Stored* to = static_cast<Stored*>(base) + offset;
  if (aligned && count == kRun) {
    *reinterpret_cast<Run<Stored>*>(to) = run;
    return;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    constexpr int kBytes = sizeof(Stored);
    if (i < count) to[i] = static_cast<Stored>(run.words[i * kBytes / 4] >> (i * kBytes % 4 * 8));
  }
}

// How many elements of a run are before the end of a row.
LOCO_DEVICE int elements_before(int64_t end, int64_t begin) {
  const int64_t left = end - begin;
  return left >= kRun ? kRun : (left > 0 ? static_cast<int>(left) : 0);
}

LOCO_DEVICE uint16_t load_scale(const void* scales, int64_t block, bool aligned) {
  if (aligned) return static_cast<const uint16_t*>(scales)[block];
  const uint8_t* from = static_cast<const uint8_t*>(scales) + 2 * block;
  return static_cast<uint16_t>(from[0] | from[1] << 8);
}

LOCO_DEVICE void store_scale(void* scales, int64_t block, uint16_t scale, bool aligned) {
  if (aligned) {
    static_cast<uint16_t*>(scales)[block] = scale;
    return;
  }
  uint8_t* to = static_cast<uint8_t*>(scales) + 2 * block;
  to[0] = static_cast<uint8_t>(scale);
  to[1] = static_cast<uint8_t>(scale >> 8);
}

// The scale of a block, and after that of the last one zeros up to the end of the row.
LOCO_DEVICE void end_block(void* scales, const Place& at, int64_t blocks, uint16_t scale, bool aligned) {
  if (!at.inside || !at.first) return;
  store_scale(scales, at.block, scale, aligned);
  if (at.block != blocks - 1) return;
  for (int64_t i = blocks; i % (kAlignment / 2) != 0; ++i) store_scale(scales, i, 0, aligned);
}

template <Type kType>
LOCO_DEVICE float number(const Run<Element<kType>>& run, int i) {
  if constexpr (kType == Type::kFloat) {
    return as_float(run.words[i]);
  } else {
    const uint32_t word = run.words[i / 2];
    if constexpr (kType == Type::kBFloat16) return as_float(i % 2 ? word & 0xffff0000u : word << 16);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(i % 2 ? word >> 16 : word)));
  }
}

// The bits of a number, rounded half to even. NaNs are those of torch on the CPU: the hardware has others.
template <Type kType>
LOCO_DEVICE uint32_t stored(float value) {
  const uint32_t bits = as_bits(value);
  const bool nan = (bits & kMagnitude) > kInfinity;
  if constexpr (kType == Type::kFloat) return bits;
  if constexpr (kType == Type::kBFloat16) {
    return nan ? kScaleOfNotFinite : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
  return nan ? ((bits >> 16) & 0x8000u) | 0x7e00u : __half_as_ushort(__float2half_rn(value));
}

template <Type kType>
LOCO_DEVICE Run<Element<kType>> run_of(const float* values) {
  Run<Element<kType>> run{};
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    constexpr int kPerWord = 4 / sizeof(Element<kType>);
    run.words[i / kPerWord] |= stored<kType>(values[i]) << (i % kPerWord * 16);
  }
  return run;
}

// Numbers whose bytes are too large by kOffset, which made them unsigned.
template <int kOffset>
LOCO_DEVICE void spread(uint32_t first, uint32_t second, float* numbers) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const uint32_t bits = __byte_perm(i < 4 ? first : second, kMagic, 0x7440 + i % 4);
    numbers[i] = sum(as_float(bits), -(kMagicValue + kOffset));
  }
}

LOCO_DEVICE void spread_bytes(const Run<uint8_t>& run, float* numbers) {
  spread<128>(run.words[0] ^ 0x80808080u, run.words[1] ^ 0x80808080u, numbers);
}

// The lowest bytes of a run's numbers on the grid of their scale; see kRounding.
LOCO_DEVICE Run<uint8_t> lowest_bytes(const float* grid) {
  Run<uint8_t> run;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* four = grid + 4 * i;
    const uint32_t low = __byte_perm(as_bits(four[0]), as_bits(four[1]), 0x0040);
    const uint32_t high = __byte_perm(as_bits(four[2]), as_bits(four[3]), 0x0040);
    run.words[i] = __byte_perm(low, high, 0x5410);
  }
  return run;
}

LOCO_DEVICE float on_grid(float value, float inverse) { return sum(product(value, inverse), kRounding); }

// The 32-point transform of the chunk that this thread shares with its neighbor.
LOCO_DEVICE void transform(float (&h)[kRuns][kRun], int half) {
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
  const uint32_t minus = static_cast<uint32_t>(half) << 31;
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

LOCO_DEVICE uint32_t larger(uint32_t most, float value) {
  const uint32_t magnitude = as_bits(value) & kMagnitude;
  return magnitude > most ? magnitude : most;
}

// The largest that the threads of a block have. `shared` may be used once: a second use would need another barrier.
LOCO_DEVICE uint32_t largest_of(uint32_t most, int block_size, uint32_t* shared) {
  const int threads = block_size / kUnit;
  const int lanes = threads < kWarp ? threads : kWarp;
  for (int apart = 1; apart < lanes; apart *= 2) {
    most = max(most, __shfl_xor_sync(kAllLanes, most, apart));
  }
  if (threads <= kWarp) return most;
  const int warp = threadIdx.x / kWarp, warps = threads / kWarp;
  if (threadIdx.x % kWarp == 0) shared[warp] = most;
  __syncthreads();
  for (int i = 0; i < warps; ++i) most = max(most, shared[warp / warps * warps + i]);
  return most;
}

// What this thread has of an error that is kept, as it is stored, and what its numbers are multiplied with.
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

template <int kErrorBits>
LOCO_DEVICE Kept<kErrorBits> load_error(const Compress& job, const Place& at, bool aligned) {
  Kept<kErrorBits> old{};
  if (!job.has_error || !at.inside) return old;
  const ErrorRow row = job.error(at.row);
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    old.runs[r] = load_run<Unsigned<kErrorBits>>(row.payload, at.element(r), kRun, aligned);
  }
  if (kErrorBits == 8) old.scale = load_scale(row.scales, at.block, aligned);
  return old;
}

// h = gradient + unit * error
template <Type kType, int kErrorBits>
LOCO_DEVICE void compensate(
    const Compress& job, const Run<Element<kType>> (&gradient)[kRuns], const Kept<kErrorBits>& old, int half,
    float (&h)[kRuns][kRun]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) h[i / kRun][i % kRun] = number<kType>(gradient[i / kRun], i % kRun);
  if (job.hadamard) transform(h, half);
  const float factor = product(job.unit, old.step());
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    float e[kRun];
    old.numbers(r, e);
#pragma unroll
    for (int i = 0; i < kRun; ++i) h[r][i] = sum(h[r][i], product(factor, e[i]));
  }
}

// The wire's part of a block, and in the place of h what is to be kept of it.
template <int kBits, int kErrorBits>
LOCO_DEVICE void send(
    const Compress& job, const Place& at, const Scale& scale, const Kept<kErrorBits>& old, bool aligned,
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
  if (!at.inside) return;
  uint8_t* wire = job.wire + at.row * job.wire_stride;
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // words; what has no scale is zeros
    if (kBits == 4) bytes[0].words[i] = (bytes[0].words[i] & 0x0f0f0f0fu) | (bytes[1].words[i] << 4 & 0xf0f0f0f0u);
    for (int r = 0; r < kRuns && !scale.finite; ++r) bytes[r].words[i] = 0;
  }
#pragma unroll
  for (int r = 0; r < kBits / 4; ++r) {
    store_run(wire, at.chunk * (kChunk * kBits / 8) + r * kHalfChunk + at.half * kRun, bytes[r], kRun, aligned);
  }
  end_block(wire + job.blocks * job.block_size * kBits / 8, at, job.blocks, scale.stored, aligned);
}

// `fresh` in the place of the old error, unless something in the block was not finite.
template <int kErrorBits>
LOCO_DEVICE void keep_error(
    const Compress& job, const Place& at, bool finite, const Scale& scale, const Kept<kErrorBits>& old, bool aligned,
    const float (&fresh)[kRuns][kRun]) {
  if (!at.inside) return;
  const ErrorRow row = job.new_error(at.row);
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    Run<Unsigned<kErrorBits>> run;
    if constexpr (kErrorBits == 8) {
      float grid[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) grid[i] = on_grid(fresh[r][i], scale.inverse);
      run = lowest_bytes(grid);
      if (!scale.finite) run = {};
    } else {
      run = run_of<kErrorBits == 16 ? Type::kBFloat16 : Type::kFloat>(fresh[r]);
    }
#pragma unroll
    for (int i = 0; i < kRun * kErrorBits / 32; ++i) run.words[i] = finite ? run.words[i] : old.runs[r].words[i];
    store_run(row.payload, at.element(r), run, kRun, aligned);
  }
  if (kErrorBits == 8) end_block(row.scales, at, job.blocks, finite ? scale.stored : old.scale, aligned);
}

template <Type kType, int kBits, int kErrorBits>
__global__ void __launch_bounds__(kThreads) compress_blocks(const Compress job, const Aligned aligned) {
  __shared__ uint32_t shared[2][kWarps];
  const Place at = find_place(job.block_size, job.blocks);
  if (at.row >= job.rows) return;  // so does the whole thread block
  Run<Element<kType>> gradient[kRuns];
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const int64_t element = at.element(r);
    gradient[r] = load_run<Element<kType>>(
        job.gradient, at.row * job.gradient_stride + element, elements_before(job.width, element), aligned.numbers);
  }
  const Kept<kErrorBits> old = load_error<kErrorBits>(job, at, aligned.error);
  float h[kRuns][kRun];
  compensate<kType, kErrorBits>(job, gradient, old, at.half, h);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) most = larger(most, h[i / kRun][i % kRun]);
  const Scale scale = scale_of<kBits>(largest_of(most, job.block_size, shared[0]));
  send<kBits, kErrorBits>(job, at, scale, old, aligned.wire, h);
  if (!job.has_new_error) return;
  Scale fresh{};
  if constexpr (kErrorBits == 8) {
    most = 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) most = larger(most, h[i / kRun][i % kRun]);
    fresh = scale_of<8>(largest_of(most, job.block_size, shared[1]));
  }
  keep_error<kErrorBits>(job, at, scale.finite, fresh, old, aligned.error, h);
}

template <Type kType, int kBits>
__global__ void __launch_bounds__(kThreads) decompress_blocks(const Decompress job, const Aligned aligned) {
  const Place at = find_place(job.block_size, job.blocks);
  float total[kRuns][kRun];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) total[i / kRun][i % kRun] = -0.0f;  // to which any number is added unchanged
  const int64_t pieces = at.inside ? job.pieces : 0;
  const int64_t scales = job.blocks * job.block_size * kBits / 8;
  const uint8_t* piece = job.wire;
#pragma unroll 4
  for (int64_t i = 0; i < pieces; ++i, piece += job.wire_stride) {  // in the order of ranks
    const int64_t payload = at.chunk * (kChunk * kBits / 8) + at.half * kRun;
    const Run<uint8_t> run = load_run<uint8_t>(piece, payload, kRun, aligned.wire);
    float q[kRuns][kRun];
    if constexpr (kBits == 8) {
      spread_bytes(run, q[0]);
      spread_bytes(load_run<uint8_t>(piece, payload + kHalfChunk, kRun, aligned.wire), q[1]);
    } else {
      const uint32_t first = run.words[0] ^ 0x88888888u, second = run.words[1] ^ 0x88888888u;
      spread<8>(first & 0x0f0f0f0fu, second & 0x0f0f0f0fu, q[0]);
      spread<8>(first >> 4 & 0x0f0f0f0fu, second >> 4 & 0x0f0f0f0fu, q[1]);
    }
    const float step = step_of(load_scale(piece + scales, at.block, aligned.wire));
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      float& to = total[j / kRun][j % kRun];
      to = __fmaf_rn(q[j / kRun][j % kRun], step, to);
    }
  }
  if (job.hadamard) transform(total, at.half);
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const int64_t element = at.element(r);
#pragma unroll
    for (int i = 0; i < kRun; ++i) total[r][i] = product(total[r][i], job.factor);
    const int count = elements_before(job.width, element);
    store_run(job.out, element, run_of<kType>(total[r]), count, aligned.numbers);
  }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0; }

void check_device(const Tensor& tensor, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), name,
      " must be on the device of the other arguments");
}

dim3 grid_of(int64_t rows, int64_t blocks, int64_t block_size) {
  const int64_t along = (blocks * block_size + kLargestBlock - 1) / kLargestBlock;
  const int64_t down = rows < kMostRows ? rows : kMostRows;
  return dim3(
      static_cast<unsigned>(along), static_cast<unsigned>(down), static_cast<unsigned>((rows + down - 1) / down));
}

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
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
  const dim3 grid = grid_of(job.rows, job.blocks, block_size);
  with_type(type_of(gradient), [&](auto type) {
    constexpr Type kType = decltype(type)::value;
    const bool rows_aligned = job.rows == 1 || job.gradient_stride * sizeof(Element<kType>) % kAlignment == 0;
    const Aligned aligned{
        is_aligned(job.gradient) && rows_aligned, is_aligned(job.wire),
        is_aligned(job.read_error) && is_aligned(job.write_error)};
    with_bits(bits, [&](auto wire_bits) {
      with_error_bits(kept, [&](auto error_bits) {
        constexpr int kBits = decltype(wire_bits)::value, kErrorBits = decltype(error_bits)::value;
        compress_blocks<kType, kBits, kErrorBits><<<grid, kThreads, 0, stream>>>(job, aligned);
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
  const dim3 grid = grid_of(1, job.blocks, block_size);
  const Aligned aligned{is_aligned(job.out), is_aligned(job.wire), false};
  with_type(type_of(out), [&](auto type) {
    with_bits(bits, [&](auto wire_bits) {
      decompress_blocks<decltype(type)::value, decltype(wire_bits)::value>
          <<<grid, kThreads, 0, stream>>>(job, aligned);
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace loco

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("loco_compress", TORCH_BOX(&loco::compress_cuda));
  library.impl("loco_decompress", TORCH_BOX(&loco::decompress_cuda));
}
