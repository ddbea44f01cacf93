// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of csrc use of a CUDA device, as C++ for the CPU. It is included before each of their sources.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#define __launch_bounds__(...)  // rewriting.py compares them with the launches

using std::max;
using std::min;

namespace cuda_on_cpu {

// What threads meet at.
enum class Call : int { kShuffle, kShuffleUp, kShuffleXor, kBallot, kWarpBarrier, kBarrier };

// Of the thread that runs.
struct Indices {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern Indices indices;

// Wait until all lanes of the warp, or at a barrier all threads of the block, are at the same call for the same time.
uint32_t meet(Call call, uint32_t mask, uint32_t value, int argument, const char* file, int line);

// Fill an array of shared memory with garbage, where the first thread of a block comes by.
void use_shared(void* array, size_t bytes);

uint32_t atomic_or(uint32_t* address, uint32_t value);

// 1 / value, off by as many units in the last place as tests have set.
float rcp_approx_ftz(float value);

// What an operation gives on a device: NaN has one pattern there.
float result_of(float value);

using Run = void (*)(const void*);
void launch(const char* kernel, dim3 grid, dim3 block, size_t dynamic, cudaStream_t stream, Run run, const void* of);

template <typename Kernel>
void launch(const char* name, dim3 grid, dim3 block, size_t dynamic, cudaStream_t stream, const Kernel& kernel) {
  launch(name, grid, block, dynamic, stream, [](const void* of) { (*static_cast<const Kernel*>(of))(); }, &kernel);
}

template <typename T>
T exchange(Call call, uint32_t mask, T value, int argument, const char* file, int line) {
  static_assert(sizeof(T) == 4);
  return std::bit_cast<T>(meet(call, mask, std::bit_cast<uint32_t>(value), argument, file, line));
}

}  // namespace cuda_on_cpu

#define threadIdx (::cuda_on_cpu::indices.thread)
#define blockIdx (::cuda_on_cpu::indices.block)
#define blockDim (::cuda_on_cpu::indices.block_size)
#define gridDim (::cuda_on_cpu::indices.grid_size)

// Of the line that calls, which an error names.
#define CALLED_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CALLED_AT) { ::cuda_on_cpu::meet(::cuda_on_cpu::Call::kBarrier, 0, 0, 0, file, line); }

inline void __syncwarp(unsigned mask = 0xffffffffu, CALLED_AT) {
  ::cuda_on_cpu::meet(::cuda_on_cpu::Call::kWarpBarrier, mask, 0, 0, file, line);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int from, CALLED_AT) {
  return ::cuda_on_cpu::exchange(::cuda_on_cpu::Call::kShuffle, mask, value, from, file, line);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, CALLED_AT) {
  return ::cuda_on_cpu::exchange(::cuda_on_cpu::Call::kShuffleUp, mask, value, static_cast<int>(delta), file, line);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int apart, CALLED_AT) {
  return ::cuda_on_cpu::exchange(::cuda_on_cpu::Call::kShuffleXor, mask, value, apart, file, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CALLED_AT) {
  return ::cuda_on_cpu::meet(::cuda_on_cpu::Call::kBallot, mask, predicate != 0, 0, file, line);
}

inline uint32_t atomicOr(uint32_t* address, uint32_t value) { return ::cuda_on_cpu::atomic_or(address, value); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Bit 3 of a selector is not used by the programming guide, and repeats a sign in PTX: nobody may set it.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
  if (selectors & 0x8888u) __builtin_trap();
  const uint64_t both = x | static_cast<uint64_t>(y) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = static_cast<unsigned>(both >> (selectors >> (4 * i) & 7) * 8 & 0xff);
    result |= byte << (8 * i);
  }
  return result;
}

inline float __fmul_rn(float a, float b) { return ::cuda_on_cpu::result_of(a * b); }
inline float __fadd_rn(float a, float b) { return ::cuda_on_cpu::result_of(a + b); }
inline float __fmaf_rn(float a, float b, float c) { return ::cuda_on_cpu::result_of(__builtin_fmaf(a, b, c)); }
