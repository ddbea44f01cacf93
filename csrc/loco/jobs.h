// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operators' arguments, checked, as pointers and sizes that kernels take. Row sizes are those of
// deepspeed_ext/loco/reference.py.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <type_traits>

#include "block.h"

namespace loco {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A row of a kept error; it has scales with 8 bits only.
struct ErrorRow {
  uint8_t* payload;
  uint16_t* scales;
};

struct Compress {
  const void* gradient;     // or updated parameters
  int64_t gradient_stride;  // elements
  const void* held;         // what the receivers hold of the updated parameters
  int64_t held_stride;      // elements
  int64_t rows, width, blocks;
  uint8_t* wire;
  int64_t wire_stride;  // bytes
  uint8_t* read_error;
  uint8_t* write_error;
  int64_t error_stride;  // bytes
  int64_t error_scales;  // offset in a row, bytes
  bool has_error, has_new_error, hadamard;
  int block_size;
  float beta, unit;
  float fresh;  // (1 - beta) / unit
  const uint8_t* zeros;  // as large as the error of a block, on the CPU

  LOCO_INLINE ErrorRow error(int64_t row) const { return row_of(read_error, row); }
  LOCO_INLINE ErrorRow new_error(int64_t row) const { return row_of(write_error, row); }
  LOCO_INLINE ErrorRow row_of(uint8_t* base, int64_t row) const {
    uint8_t* start = base + row * error_stride;
    return {start, reinterpret_cast<uint16_t*>(start + error_scales)};
  }
};

struct Decompress {
  const uint8_t* wire;
  int64_t wire_stride;  // bytes
  int64_t pieces, width, blocks;
  void* out;
  int block_size;
  bool hadamard;
  float factor;
};

struct Apply {
  const uint8_t* wire;
  int64_t wire_stride;  // bytes
  int64_t rows, width, blocks;
  void* held;
  int64_t held_stride;  // elements
  int block_size;
};

struct Sum {
  const void* parts;
  int64_t stride;  // elements from part to part
  int64_t count, width, blocks;
  void* out;
  int block_size;  // elements that a task sums
};

inline Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Type::kFloat;
    case ScalarType::BFloat16:
      return Type::kBFloat16;
    case ScalarType::Half:
      return Type::kHalf;
    default:
      STD_TORCH_CHECK(false, "expected float32, bfloat16 or float16, got another dtype");
  }
  return Type::kFloat;
}

inline int64_t row_bytes(int64_t blocks, int64_t block_size, int64_t bits) {
  const int64_t used = blocks * block_size * bits / 8 + 2 * blocks;
  return (used + kAlignment - 1) / kAlignment * kAlignment;
}

inline void check_format(int64_t bits, int64_t block_size) {
  STD_TORCH_CHECK(bits == 4 || bits == 8, "bits must be 4 or 8, got ", bits);
  STD_TORCH_CHECK(
      block_size >= kSmallestBlock && block_size <= kLargestBlock && (block_size & (block_size - 1)) == 0,
      "block_size must be a power of two from ", kSmallestBlock, " to ", kLargestBlock, ", got ", block_size);
}

inline void check_packed(const Tensor& packed, int64_t rows, int64_t bytes, const char* name) {
  STD_TORCH_CHECK(
      packed.scalar_type() == ScalarType::Byte && packed.dim() == 2 && packed.size(0) == rows &&
          packed.size(1) == bytes && packed.is_contiguous(),
      name, " must be contiguous uint8 of (", rows, ", ", bytes, ")");
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % alignof(uint16_t) == 0, name,
      " must start at an even address");
}

inline void check_rows(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(
      tensor.dim() == 2 && (tensor.size(1) <= 1 || tensor.stride(1) == 1), name,
      " must have two dimensions, and rows without gaps");
}

// Bits of the numbers that are kept: 8 (packed), 16 or 32.
inline int error_bits(const Tensor& error, int64_t rows, int64_t padded, int64_t packed_bytes) {
  const ScalarType type = error.scalar_type();
  if (type == ScalarType::Byte) {
    check_packed(error, rows, packed_bytes, "an error in 8 bits");
    return 8;
  }
  STD_TORCH_CHECK(
      (type == ScalarType::BFloat16 || type == ScalarType::Float) && error.dim() == 2 && error.size(0) == rows &&
          error.size(1) == padded && error.is_contiguous(),
      "an error must be contiguous uint8, bfloat16 or float32; of the latter (", rows, ", ", padded, ")");
  return type == ScalarType::Float ? 32 : 16;
}

inline Compress make_compress(
    const Tensor& gradient, Tensor& wire, const std::optional<Tensor>& error, std::optional<Tensor>& new_error,
    int64_t bits, int64_t block_size, double beta, double unit, bool hadamard, int* kept) {
  check_format(bits, block_size);
  check_rows(gradient, "a gradient");
  Compress job{};
  job.rows = gradient.size(0);
  job.width = gradient.size(1);
  job.blocks = (job.width + block_size - 1) / block_size;
  job.gradient = gradient.const_data_ptr();
  job.gradient_stride = gradient.stride(0);
  job.wire_stride = row_bytes(job.blocks, block_size, bits);
  check_packed(wire, job.rows, job.wire_stride, "wire");
  job.wire = static_cast<uint8_t*>(wire.mutable_data_ptr());
  *kept = 8;
  const int64_t padded = job.blocks * block_size, packed = row_bytes(job.blocks, block_size, 8);
  if (error.has_value()) {
    *kept = error_bits(*error, job.rows, padded, packed);
    job.read_error = static_cast<uint8_t*>(const_cast<void*>(error->const_data_ptr()));
    job.has_error = true;
  }
  if (new_error.has_value()) {
    const int bits_kept = error_bits(*new_error, job.rows, padded, packed);
    STD_TORCH_CHECK(!job.has_error || bits_kept == *kept, "the old and the new error must have one dtype");
    *kept = bits_kept;
    job.write_error = static_cast<uint8_t*>(new_error->mutable_data_ptr());
    job.has_new_error = true;
  }
  job.error_stride = *kept == 8 ? packed : padded * *kept / 8;
  job.error_scales = padded;
  job.block_size = static_cast<int>(block_size);
  job.hadamard = hadamard;
  job.beta = static_cast<float>(beta);
  job.fresh = static_cast<float>((1.0 - beta) / unit);
  job.unit = static_cast<float>(unit);
  return job;
}

inline Decompress make_decompress(
    const Tensor& wire, Tensor& out, int64_t bits, int64_t block_size, double factor, bool hadamard) {
  check_format(bits, block_size);
  STD_TORCH_CHECK(out.dim() == 1 && out.is_contiguous(), "out must have one dimension, and be contiguous");
  STD_TORCH_CHECK(wire.dim() == 2 && wire.size(0) >= 1, "wire must have a row for each piece");
  Decompress job{};
  job.width = out.numel();
  job.blocks = (job.width + block_size - 1) / block_size;
  job.pieces = wire.size(0);
  job.wire_stride = row_bytes(job.blocks, block_size, bits);
  check_packed(wire, job.pieces, job.wire_stride, "wire");
  job.wire = static_cast<const uint8_t*>(wire.const_data_ptr());
  job.out = out.mutable_data_ptr();
  job.block_size = static_cast<int>(block_size);
  job.hadamard = hadamard;
  job.factor = static_cast<float>(factor);
  return job;
}

inline Compress make_difference(
    const Tensor& updated, const Tensor& held, Tensor& wire, int64_t bits, int64_t block_size) {
  std::optional<Tensor> none;
  int kept = 0;
  Compress job = make_compress(updated, wire, none, none, bits, block_size, 0.0, 1.0, false, &kept);
  check_rows(held, "what is held");
  STD_TORCH_CHECK(
      held.size(0) == job.rows && held.size(1) == job.width && held.scalar_type() == updated.scalar_type(),
      "what is held must have the shape and the dtype of the updated parameters");
  job.held = held.const_data_ptr();
  job.held_stride = held.stride(0);
  return job;
}

inline Apply make_apply(const Tensor& wire, Tensor& held, int64_t bits, int64_t block_size) {
  check_format(bits, block_size);
  check_rows(held, "what is held");
  Apply job{};
  job.rows = held.size(0);
  job.width = held.size(1);
  job.blocks = (job.width + block_size - 1) / block_size;
  job.wire_stride = row_bytes(job.blocks, block_size, bits);
  check_packed(wire, job.rows, job.wire_stride, "wire");
  job.wire = static_cast<const uint8_t*>(wire.const_data_ptr());
  job.held = held.mutable_data_ptr();
  job.held_stride = held.stride(0);
  job.block_size = static_cast<int>(block_size);
  return job;
}

inline Sum make_sum(const Tensor& parts, Tensor& out, int block_size) {
  check_rows(parts, "parts");
  STD_TORCH_CHECK(
      out.dim() == 1 && out.is_contiguous() && parts.size(0) >= 1 && parts.size(1) == out.numel() &&
          parts.scalar_type() == out.scalar_type(),
      "out must be contiguous, with the width and the dtype of at least one part");
  Sum job{};
  job.parts = parts.const_data_ptr();
  job.stride = parts.stride(0);
  job.count = parts.size(0);
  job.width = out.numel();
  job.blocks = (job.width + block_size - 1) / block_size;
  job.out = out.mutable_data_ptr();
  job.block_size = block_size;
  return job;
}

// Call `run` with the template arguments that these values stand for.
template <typename Run>
void with_type(Type type, const Run& run) {
  switch (type) {
    case Type::kFloat:
      return run(std::integral_constant<Type, Type::kFloat>());
    case Type::kBFloat16:
      return run(std::integral_constant<Type, Type::kBFloat16>());
    case Type::kHalf:
      return run(std::integral_constant<Type, Type::kHalf>());
  }
}

template <typename Run>
void with_bits(int64_t bits, const Run& run) {
  bits == 4 ? run(std::integral_constant<int, 4>()) : run(std::integral_constant<int, 8>());
}

template <typename Run>
void with_error_bits(int bits, const Run& run) {
  switch (bits) {
    case 8:
      return run(std::integral_constant<int, 8>());
    case 16:
      return run(std::integral_constant<int, 16>());
    default:
      return run(std::integral_constant<int, 32>());
  }
}

}  // namespace loco
