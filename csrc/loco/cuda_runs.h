// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// Runs of elements, as the CUDA kernels move them between memory and registers, and as numbers.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block.h"

#define LOCO_DEVICE __device__ __forceinline__

namespace loco {

// A thread takes two runs of 8 elements of one chunk, 16 elements apart, since these share bytes of a 4-bit payload.
// 8 elements of 16 bits fill the widest access.
constexpr int kRun = 8;
constexpr int kRuns = 2;
constexpr int kUnit = kRun * kRuns;

// The bits of 2^23 as a float: adding an integer to the bits adds it to the value.
constexpr uint32_t kMagic = 0x4b000000u;
constexpr float kMagicValue = 8388608.0f;

template <int kSize>
using Unsigned = std::conditional_t<kSize == 8, uint8_t, std::conditional_t<kSize == 16, uint16_t, uint32_t>>;

template <Type kType>
using Element = Unsigned<kType == Type::kFloat ? 32 : 16>;

// Elements that lie side by side. Aligned, so that copies use the widest accesses there are.
template <typename Stored>
struct alignas(sizeof(Stored) == 1 ? 8 : 16) Run {
  uint32_t words[kRun * sizeof(Stored) / 4];
};

LOCO_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
LOCO_DEVICE float sum(float a, float b) { return __fadd_rn(a, b); }

// Runs that are 16 elements apart, up to the end of the row, which has `left` elements from the first on; then zeros.
template <typename Stored, int kCount>
LOCO_DEVICE void load_runs(const Stored* from, int left, bool aligned, Run<Stored> (&runs)[kCount]) {
  if (aligned && left >= (kCount - 1) * kHalfChunk + kRun) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) runs[r] = *reinterpret_cast<const Run<Stored>*>(from + r * kHalfChunk);
    return;
  }
  constexpr int kBytes = sizeof(Stored);
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    runs[r] = {};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int element = r * kHalfChunk + i;
      if (element < left) {
        runs[r].words[i * kBytes / 4] |= static_cast<uint32_t>(from[element]) << (i * kBytes % 4 * 8);
      }
    }
  }
}

template <typename Stored, int kCount>
LOCO_DEVICE void store_runs(Stored* to, int left, bool aligned, const Run<Stored> (&runs)[kCount]) {
  if (aligned && left >= (kCount - 1) * kHalfChunk + kRun) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) *reinterpret_cast<Run<Stored>*>(to + r * kHalfChunk) = runs[r];
    return;
  }
  constexpr int kBytes = sizeof(Stored);
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int element = r * kHalfChunk + i;
      if (element < left) {
        to[element] = static_cast<Stored>(runs[r].words[i * kBytes / 4] >> (i * kBytes % 4 * 8));
      }
    }
  }
}

// Rows of bytes may start anywhere; their scales then are bytes, too.
LOCO_DEVICE uint16_t load_scale(const uint8_t* scales, int block, bool aligned) {
  const uint8_t* from = scales + 2 * block;
  return aligned ? *reinterpret_cast<const uint16_t*>(from) : static_cast<uint16_t>(from[0] | from[1] << 8);
}

LOCO_DEVICE void store_scale(uint8_t* scales, int block, uint16_t scale, bool aligned) {
  uint8_t* to = scales + 2 * block;
  if (aligned) {
    *reinterpret_cast<uint16_t*>(to) = scale;
  } else {
    to[0] = static_cast<uint8_t>(scale);
    to[1] = static_cast<uint8_t>(scale >> 8);
  }
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

// Two numbers, rounded half to even.
template <Type kType>
LOCO_DEVICE uint32_t pair_of(float first, float second) {
  uint32_t word;
  if constexpr (kType == Type::kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

// The bits of a NaN, as in the CPU kernels; the hardware's differ.
template <Type kType>
LOCO_DEVICE uint32_t nan_of(float value) {
  return kType == Type::kBFloat16 ? kScaleOfNotFinite : ((as_bits(value) >> 16) & 0x8000u) | 0x7e00u;
}

// Numbers as they are stored. NaNs are rare, so they are searched for in pairs and corrected afterwards.
template <Type kType>
LOCO_DEVICE Run<Element<kType>> run_of(const float* values) {
  Run<Element<kType>> run;
  if constexpr (kType == Type::kFloat) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) run.words[i] = as_bits(values[i]);
  } else {
    bool ordered = true;
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) {
      const float first = values[2 * i], second = values[2 * i + 1];
      run.words[i] = pair_of<kType>(first, second);
      ordered = ordered && (first <= second || first > second);
    }
#pragma unroll
    for (int i = 0; i < kRun && !ordered; ++i) {
      if (values[i] == values[i]) continue;
      uint32_t& word = run.words[i / 2];
      const uint32_t nan = nan_of<kType>(values[i]);
      word = i % 2 ? (word & 0xffffu) | (nan << 16) : (word & 0xffff0000u) | nan;
    }
  }
  return run;
}

// Integers of bytes that are too large by kOffset, which made them unsigned.
template <int kOffset>
LOCO_DEVICE void spread(uint32_t first, uint32_t second, float* integers) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const uint32_t bits = __byte_perm(i < 4 ? first : second, kMagic, 0x7440 + i % 4);
    integers[i] = sum(as_float(bits), -(kMagicValue + kOffset));
  }
}

LOCO_DEVICE void spread_bytes(const Run<uint8_t>& run, float* integers) {
  spread<128>(run.words[0] ^ 0x80808080u, run.words[1] ^ 0x80808080u, integers);
}

LOCO_DEVICE float on_grid(float value, float inverse) { return sum(product(value, inverse), kRounding); }

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

}  // namespace loco
