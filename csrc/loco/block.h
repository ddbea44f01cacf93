// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic of a block, shared by the CPU and the CUDA kernels. The formulas, and the packed format, are in
// deepspeed_ext/loco/reference.py. Every implementation gives the bits of the reference, so each
// operation is rounded once (compile without fused multiply-add and without fast math).

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define LOCO_INLINE __host__ __device__ __forceinline__
#else
#define LOCO_INLINE inline __attribute__((always_inline))
#endif

namespace loco {

constexpr int kChunk = 32;  // elements that share bytes of a 4-bit payload, and one Hadamard transform
constexpr int kHalfChunk = kChunk / 2;
constexpr int kSmallestBlock = 32;
constexpr int kLargestBlock = 4096;
constexpr int kAlignment = 16;  // bytes, of packed rows

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kSmallestNormal = 0x00800000u;
constexpr uint16_t kScaleOfNotFinite = 0x7fc0u;  // a NaN in bfloat16
constexpr float kNormalize = 0.17677669529663687f;  // 1/sqrt(32)
constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: x + kRounding has the integer next to x in its
                                        // lowest bits, half to even

enum class Type : int { kFloat, kBFloat16, kHalf };

template <int kBits>
constexpr float kLargest = kBits == 4 ? 7.0f : 127.0f;

LOCO_INLINE float as_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

LOCO_INLINE uint32_t as_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

// The factors of all elements of a block.
struct Scale {
  uint16_t stored;  // bfloat16
  float step;
  float inverse;  // 0 where nothing can be sent
  bool finite;
};

// The scale for a block, from the bits of its largest magnitude. Compared as bits, NaN is larger than infinity.
template <int kBits>
LOCO_INLINE Scale scale_of(uint32_t most) {
  const float exact = as_float(most) / kLargest<kBits>;
  if (most < kInfinity && as_bits(exact) < kSmallestNormal) {
    return {0, 0.0f, 0.0f, true};
  }
  const uint32_t up = (as_bits(exact) + 0xffffu) & 0xffff0000u;
  const float step = as_float(up);
  if (most >= kInfinity || (as_bits(step * kLargest<kBits>) & kMagnitude) >= kInfinity) {
    return {kScaleOfNotFinite, as_float(static_cast<uint32_t>(kScaleOfNotFinite) << 16), 0.0f, false};
  }
  return {static_cast<uint16_t>(up >> 16), step, 1.0f / step, true};
}

LOCO_INLINE float step_of(uint16_t stored) { return as_float(static_cast<uint32_t>(stored) << 16); }

}  // namespace loco
