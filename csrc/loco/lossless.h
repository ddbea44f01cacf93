// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// Lossless updates: the format, shared by the CPU and the CUDA kernels, and the checked arguments of the operators. See
// Note [Lossless updates] in deepspeed_ext/loco/lossless.py.

#pragma once

#include "jobs.h"

namespace loco {
namespace lossless {

constexpr int kTile = 1024;  // elements
constexpr int64_t kMostElements = int64_t{1} << 30;  // of a row
constexpr uint32_t kOffset = (1u << 30) - 1;  // the bits of a size or an offset

enum Mode : uint32_t { kSame, kBitmap, kPairs, kPlain };

// Sizes of sections, in units of 2 bytes.
constexpr int kPlainUnits = kTile;
template <bool kInPairs>
constexpr int kBaseUnits = kInPairs ? kTile / 8 : kTile / 16;
constexpr int kMostUnits = kTile / 8 + kTile / 4 + kTile;  // of the section that a wrong header could ask for

constexpr int kEscape = 15;
constexpr int kLowest = -8;  // difference that a nibble can hold
template <bool kInPairs>
constexpr int kHighest = kInPairs ? 9 : 7;

// The integer that bits become, or the bits of such an integer.
LOCO_INLINE uint16_t ordinal(uint16_t bits) {
  return static_cast<uint16_t>(bits ^ ((static_cast<int16_t>(bits) >> 15) & 0x7fff));
}

LOCO_INLINE int16_t difference_of(uint16_t updated, uint16_t held) {
  return static_cast<int16_t>(static_cast<uint16_t>(ordinal(updated) - ordinal(held)));
}

LOCO_INLINE bool is_outside(int16_t d, int low, int high) {
  return static_cast<uint16_t>(d - low) > static_cast<uint16_t>(high - low);
}

// Whether an element has a nibble.
template <bool kInPairs>
LOCO_INLINE bool is_picked(int16_t d) {
  return kInPairs ? is_outside(d, -1, 1) : d != 0;
}

template <bool kInPairs>
LOCO_INLINE int nibble_of(int16_t d) {
  if (is_outside(d, kLowest, kHighest<kInPairs>)) return kEscape;
  if (kInPairs) return d >= 8 ? d - 8 : d & 15;
  return d == -1 ? 0 : d & 15;
}

template <bool kInPairs>
LOCO_INLINE int16_t of_nibble(int nibble) {
  if (kInPairs && nibble < 2) return static_cast<int16_t>(nibble + 8);
  if (nibble == 0) return -1;
  return static_cast<int16_t>(nibble >= 8 ? nibble - 16 : nibble);
}

LOCO_INLINE int nibble_units(int nibbles) { return (nibbles + 3) / 4; }

// Counts of a tile.
struct Counts {
  int changed, large;  // d != 0, and what a nibble of a bitmap cannot hold
  int far, larger;     // not in -1, 0, 1, and what a nibble of pairs cannot hold
};

LOCO_INLINE uint32_t best_of(const Counts& counts) {
  if (counts.changed == 0) return 0;
  const uint32_t bitmap = kBaseUnits<false> + nibble_units(counts.changed) + counts.large;
  const uint32_t pairs = kBaseUnits<true> + nibble_units(counts.far) + counts.larger;
  uint32_t mode = kBitmap, size = bitmap;
  if (pairs < size) {
    mode = kPairs;
    size = pairs;
  }
  if (kPlainUnits < size) {
    mode = kPlain;
    size = kPlainUnits;
  }
  return mode << 30 | size;
}

struct Pack {
  const uint16_t* updated;
  const uint16_t* held;
  int64_t width, tiles;
  uint32_t* measured;      // what is measured
  const uint32_t* header;  // or packed:
  uint16_t* wire;
  int64_t units;  // of the wire
};

struct Apply {
  const uint16_t* wire;
  int64_t units;  // of a row of the wire
  int64_t rows, width, tiles;
  uint16_t* held;
  int64_t held_stride;
};

inline void check_numbers(const Tensor& numbers, const char* name) {
  STD_TORCH_CHECK(
      numbers.scalar_type() == ScalarType::BFloat16 || numbers.scalar_type() == ScalarType::Half, name,
      " must be bfloat16 or float16");
  check_rows(numbers, name);
  STD_TORCH_CHECK(
      numbers.size(1) <= kMostElements, name, " must have at most 2^30 elements in a row, got ", numbers.size(1));
}

inline void check_tiles(const Tensor& words, int64_t tiles, const char* name) {
  STD_TORCH_CHECK(
      words.scalar_type() == ScalarType::Int && words.dim() == 1 && words.size(0) == tiles && words.is_contiguous(),
      name, " must be contiguous int32 of (", tiles, ",)");
}

inline void check_wire(const Tensor& wire, int64_t rows, int64_t tiles) {
  const int64_t header = tiles * static_cast<int64_t>(sizeof(uint32_t));
  STD_TORCH_CHECK(
      wire.scalar_type() == ScalarType::Byte && wire.dim() == 2 && wire.size(0) == rows && wire.is_contiguous() &&
          wire.size(1) >= header && wire.size(1) % 2 == 0 &&
          reinterpret_cast<uintptr_t>(wire.const_data_ptr()) % 2 == 0,
      "wire must be contiguous uint8 of (", rows, ", an even number from ", header, " on), at an even address");
}

inline Pack make_numbers(const Tensor& updated, const Tensor& held) {
  check_numbers(updated, "updated parameters");
  check_rows(held, "what is held");
  STD_TORCH_CHECK(updated.size(0) == 1, "updated parameters must be one row, got ", updated.size(0));
  STD_TORCH_CHECK(
      held.size(0) == 1 && held.size(1) == updated.size(1) && held.scalar_type() == updated.scalar_type(),
      "what is held must have the shape and the dtype of the updated parameters");
  Pack job{};
  job.updated = static_cast<const uint16_t*>(updated.const_data_ptr());
  job.held = static_cast<const uint16_t*>(held.const_data_ptr());
  job.width = updated.size(1);
  job.tiles = (job.width + kTile - 1) / kTile;
  return job;
}

inline Pack make_measure(const Tensor& updated, const Tensor& held, Tensor& tiles) {
  Pack job = make_numbers(updated, held);
  check_tiles(tiles, job.tiles, "tiles");
  job.measured = static_cast<uint32_t*>(tiles.mutable_data_ptr());
  return job;
}

inline Pack make_pack(const Tensor& updated, const Tensor& held, const Tensor& header, Tensor& wire) {
  Pack job = make_numbers(updated, held);
  check_tiles(header, job.tiles, "header");
  check_wire(wire, 1, job.tiles);
  job.header = static_cast<const uint32_t*>(header.const_data_ptr());
  job.wire = static_cast<uint16_t*>(wire.mutable_data_ptr());
  job.units = wire.size(1) / 2;
  return job;
}

inline Apply make_apply(const Tensor& wire, Tensor& held) {
  check_numbers(held, "what is held");
  Apply job{};
  job.rows = held.size(0);
  job.width = held.size(1);
  job.tiles = (job.width + kTile - 1) / kTile;
  check_wire(wire, job.rows, job.tiles);
  job.wire = static_cast<const uint16_t*>(wire.const_data_ptr());
  job.units = wire.size(1) / 2;
  job.held = static_cast<uint16_t*>(held.mutable_data_ptr());
  job.held_stride = held.stride(0);
  return job;
}

}  // namespace lossless
}  // namespace loco
