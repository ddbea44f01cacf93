// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU kernels, in vectors of 16 elements, which compilers split if registers are narrower. This file is included
// once for each instruction set, inside a namespace of its own. So it has no #pragma once, and includes no headers
// except its own two parts. LOCO_TARGET and LOCO_SET name the set: a pragma around the file would not apply where
// templates are instantiated.

#define LOCO_LOCAL inline __attribute__((always_inline)) LOCO_TARGET

#include "cpu_vectors.h"

// One step of the transform inside a vector: the sum and the difference of lanes that are `kStride` apart.
template <int kStride>
LOCO_LOCAL Floats butterfly(Floats values) {
  Integers low{}, high{};
  Words minus{};
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i & ~kStride;
    high[i] = i | kStride;
    minus[i] = (i & kStride) ? 0x80000000u : 0u;
  }
  const Words second = reinterpret_cast<Words>(__builtin_shuffle(values, high)) ^ minus;
  return __builtin_shuffle(values, low) + reinterpret_cast<Floats>(second);
}

// The 32-point transform of each chunk, in place.
LOCO_LOCAL void transform(Floats* block, int vectors) {
  for (int i = 0; i < vectors; i += 2) {
    Floats low = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(block[i]))));
    Floats high = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(block[i + 1]))));
    block[i] = (low + high) * kNormalize;
    block[i + 1] = (low - high) * kNormalize;
  }
}

// The larger magnitudes, as bits.
LOCO_LOCAL Integers larger(Integers most, Floats values) {
  const Integers magnitude = reinterpret_cast<Integers>(reinterpret_cast<Words>(values) & kMagnitude);
  return magnitude > most ? magnitude : most;
}

// Values on the grid of a scale, with the integers in their lowest bits; see kRounding.
LOCO_LOCAL Floats on_grid(Floats values, float inverse) { return values * inverse + kRounding; }

// Pack a chunk, two vectors on the grid.
template <int kBits>
LOCO_LOCAL void pack(Floats first, Floats second, uint8_t* payload) {
  const Words low = reinterpret_cast<Words>(first), high = reinterpret_cast<Words>(second);
  if constexpr (kBits == 8) {
    store(payload, lowest_bytes(low));
    store(payload + kLanes, lowest_bytes(high));
  } else {
    store(payload, lowest_bytes((low & 15u) | (high << 4)));
  }
}

// The integers of a packed chunk, as floats.
template <int kBits>
LOCO_LOCAL void unpack(const uint8_t* payload, Floats* first, Floats* second) {
  const Integers low = widened(load<SignedBytes>(payload));
  Integers high;
  if constexpr (kBits == 8) {
    *first = __builtin_convertvector(low, Floats);
    high = widened(load<SignedBytes>(payload + kLanes));
  } else {
    const Words up = reinterpret_cast<Words>(low) << 28;
    *first = __builtin_convertvector(reinterpret_cast<Integers>(up) >> 28, Floats);
    high = low >> 4;
  }
  *second = __builtin_convertvector(high, Floats);
}

// A chunk of a kept error: with 8 bits its integers, otherwise its numbers.
template <int kErrorBits>
LOCO_LOCAL void read_error(const uint8_t* from, Floats* first, Floats* second) {
  if constexpr (kErrorBits == 8) {
    unpack<8>(from, first, second);
  } else if constexpr (kErrorBits == 16) {
    *first = bfloat16s_to_floats(load<Halves>(from));
    *second = bfloat16s_to_floats(load<Halves>(from + sizeof(Halves)));
  } else {
    *first = load<Floats>(from);
    *second = load<Floats>(from + sizeof(Floats));
  }
}

// One block of a batch: its place, and what one pass hands to the next.
struct Place {
  int64_t row, block;
  const uint8_t* old_error;
  float old_step;  // of the old error
  uint16_t old_scale;
  bool finite;
  Scale scale;
  uint32_t most;
};

// Each pass runs over a batch of blocks. Within a block, the scale waits for the largest magnitude, and that for all
// elements; meanwhile, the pass works on the other blocks of the batch.
constexpr int kBatch = 2048;  // elements; or one block, if that is larger
constexpr int kBatchBlocks = kBatch / kSmallestBlock;

template <int kErrorBits>
LOCO_LOCAL void find_error(const Compress& job, Place& at) {
  at.old_error = job.zeros;
  at.old_step = kErrorBits == 8 ? 0.0f : 1.0f;
  at.old_scale = 0;
  if (job.has_error) {
    const ErrorRow row = job.error(at.row);
    at.old_error = row.payload + at.block * job.block_size * kErrorBits / 8;
    if constexpr (kErrorBits == 8) {
      at.old_scale = row.scales[at.block];
      at.old_step = step_of(at.old_scale);
    }
  }
}

// The elements of a block, padded with zeros after the end of its row; `filled` has room for them.
template <Type kType>
LOCO_LOCAL const Element<kType>* elements_of(
    const void* all, int64_t stride, const Compress& job, const Place& at, Element<kType>* filled) {
  const int64_t first = at.block * job.block_size;
  const Element<kType>* elements = static_cast<const Element<kType>*>(all) + at.row * stride + first;
  if (first + job.block_size <= job.width) return elements;
  std::memset(filled, 0, job.block_size * sizeof(filled[0]));
  std::memcpy(filled, elements, (job.width - first) * sizeof(filled[0]));
  return filled;
}

// h = gradient + unit * error; returns the largest magnitudes.
template <Type kType, int kErrorBits, bool kHadamard>
LOCO_LOCAL Integers compensate(const Compress& job, const Place& at, Floats* h, Floats* e) {
  const int vectors = job.block_size / kLanes;
  Element<kType> filled[kLargestBlock];
  const Element<kType>* gradient = elements_of<kType>(job.gradient, job.gradient_stride, job, at, filled);
  if constexpr (kHadamard) {
    for (int i = 0; i < vectors; ++i) h[i] = load_floats<kType>(gradient + i * kLanes);
    transform(h, vectors);
  }
  Integers most{};
  const float factor = job.unit * at.old_step;
  const uint8_t* from = at.old_error;
  for (int i = 0; i < vectors; i += 2, from += kChunk * kErrorBits / 8) {
    Floats old[2];
    read_error<kErrorBits>(from, &old[0], &old[1]);
    for (int j = 0; j < 2; ++j) {
      const Floats g = kHadamard ? h[i + j] : load_floats<kType>(gradient + (i + j) * kLanes);
      const Floats sum = g + factor * old[j];
      h[i + j] = sum;
      e[i + j] = old[j];
      most = larger(most, sum);
    }
  }
  return most;
}

// Write a block to the wire, and its new error over the old one; returns the largest magnitudes of the error.
template <int kBits, bool kKeeps>
LOCO_LOCAL Integers send(const Compress& job, const Place& at, const Floats* h, Floats* e) {
  const int size = job.block_size;
  uint8_t* wire = job.wire + at.row * job.wire_stride;
  uint8_t* payload = wire + at.block * size * kBits / 8;
  reinterpret_cast<uint16_t*>(wire + job.blocks * size * kBits / 8)[at.block] = at.scale.stored;
  Integers most{};
  if (!at.finite) {
    std::memset(payload, 0, size * kBits / 8);
    return most;
  }
  const float step = at.scale.step, to_grid = at.scale.inverse;
  const float old = job.beta * at.old_step, fresh = job.fresh;
  for (int i = 0; i < size / kLanes; i += 2, payload += kChunk * kBits / 8) {
    const Floats grid[2] = {on_grid(h[i], to_grid), on_grid(h[i + 1], to_grid)};
    pack<kBits>(grid[0], grid[1], payload);
    for (int j = 0; kKeeps && j < 2; ++j) {
      const Floats lost = h[i + j] + (kRounding - grid[j]) * step;  // -0 - 0 would be -0
      const Floats kept = old * e[i + j] + fresh * lost;
      e[i + j] = kept;
      most = larger(most, kept);
    }
  }
  return most;
}

template <int kErrorBits>
LOCO_LOCAL void keep_error(const Compress& job, const Place& at, const Floats* e) {
  const ErrorRow row = job.new_error(at.row);
  const int size = job.block_size;
  uint8_t* to = row.payload + at.block * size * kErrorBits / 8;
  if (kErrorBits == 8) row.scales[at.block] = at.finite ? at.scale.stored : at.old_scale;
  if (!at.finite) {  // it stays what it was
    std::memmove(to, at.old_error, size * kErrorBits / 8);
    return;
  }
  for (int i = 0; i < size / kLanes; i += 2, to += kChunk * kErrorBits / 8) {
    if constexpr (kErrorBits == 8) {
      pack<8>(on_grid(e[i], at.scale.inverse), on_grid(e[i + 1], at.scale.inverse), to);
    } else if constexpr (kErrorBits == 16) {
      store(to, floats_to_bfloat16s(e[i]));
      store(to + sizeof(Halves), floats_to_bfloat16s(e[i + 1]));
    } else {
      store(to, e[i]);
      store(to + sizeof(Floats), e[i + 1]);
    }
  }
}

template <Type kType, int kBits, int kErrorBits>
LOCO_TARGET void compress_blocks(const Compress& shared, int64_t begin, int64_t end) {
  const Compress job = shared;  // a copy that nothing can point to, and change
  Floats h[kLargestBlock / kLanes], e[kLargestBlock / kLanes];
  Place at[kBatchBlocks];
  const int vectors = job.block_size / kLanes;
  const int batch = job.block_size < kBatch ? kBatch / job.block_size : 1;
  int64_t row = begin / job.blocks, block = begin % job.blocks;
  for (int64_t done = begin; done < end; done += batch) {
    const int count = end - done < batch ? static_cast<int>(end - done) : batch;
    for (int b = 0; b < count; ++b) {
      at[b].row = row;
      at[b].block = block;
      if (++block == job.blocks) {
        block = 0;
        ++row;
      }
      find_error<kErrorBits>(job, at[b]);
      Floats *to = h + b * vectors, *old = e + b * vectors;
      at[b].most = largest_of(
          job.hadamard ? compensate<kType, kErrorBits, true>(job, at[b], to, old)
                       : compensate<kType, kErrorBits, false>(job, at[b], to, old));
    }
    for (int b = 0; b < count; ++b) {
      at[b].scale = scale_of<kBits>(at[b].most);
      at[b].finite = at[b].scale.finite;
    }
    for (int b = 0; b < count; ++b) {
      at[b].most = largest_of(send<kBits, true>(job, at[b], h + b * vectors, e + b * vectors));
    }
    if (!job.has_new_error) continue;
    for (int b = 0; kErrorBits == 8 && b < count; ++b) at[b].scale = scale_of<8>(at[b].most);
    for (int b = 0; b < count; ++b) keep_error<kErrorBits>(job, at[b], e + b * vectors);
  }
}

template <Type kType, int kBits>
LOCO_LOCAL void decompress_block(const Decompress& job, int64_t block, Floats* total) {
  const int size = job.block_size, vectors = size / kLanes;
  for (int64_t piece = 0; piece < job.pieces; ++piece) {  // in the order of ranks
    const uint8_t* wire = job.wire + piece * job.wire_stride;
    const uint8_t* payload = wire + block * size * kBits / 8;
    const float step = step_of(reinterpret_cast<const uint16_t*>(wire + job.blocks * size * kBits / 8)[block]);
    for (int i = 0; i < vectors; i += 2, payload += kChunk * kBits / 8) {
      Floats first, second;
      unpack<kBits>(payload, &first, &second);
      total[i] = piece ? total[i] + first * step : first * step;
      total[i + 1] = piece ? total[i + 1] + second * step : second * step;
    }
  }
  if (job.hadamard) transform(total, vectors);
  Element<kType> filled[kLargestBlock];
  Element<kType>* out = static_cast<Element<kType>*>(job.out) + block * size;
  const bool whole = (block + 1) * size <= job.width;
  Element<kType>* to = whole ? out : filled;
  for (int i = 0; i < vectors; ++i) store_floats<kType>(to + i * kLanes, total[i] * job.factor);
  if (!whole) std::memcpy(out, filled, (job.width - block * size) * sizeof(filled[0]));
}

template <Type kType, int kBits>
LOCO_TARGET void decompress_blocks(const Decompress& shared, int64_t begin, int64_t end) {
  const Decompress job = shared;
  Floats total[kLargestBlock / kLanes];
  for (int64_t i = begin; i < end; ++i) decompress_block<kType, kBits>(job, i, total);
}

// The sum of a block of all parts, in the order of ranks. Each part of a block is read in one piece.
template <Type kType>
LOCO_LOCAL void sum_block(const Sum& job, int64_t block, Floats* total) {
  const int64_t first = block * job.block_size, left = job.width - first;
  const int elements = left < job.block_size ? static_cast<int>(left) : job.block_size;
  const int vectors = elements / kLanes, rest = elements % kLanes;
  Element<kType> filled[kLanes] = {};
  for (int64_t part = 0; part < job.count; ++part) {
    const Element<kType>* from = static_cast<const Element<kType>*>(job.parts) + part * job.stride + first;
    for (int i = 0; i < vectors; ++i) {
      const Floats values = load_floats<kType>(from + i * kLanes);
      total[i] = part ? total[i] + values : values;
    }
    std::memcpy(filled, from + vectors * kLanes, rest * sizeof(filled[0]));
    const Floats values = load_floats<kType>(filled);
    total[vectors] = part ? total[vectors] + values : values;
  }
  Element<kType>* out = static_cast<Element<kType>*>(job.out) + first;
  for (int i = 0; i < vectors; ++i) store_floats<kType>(out + i * kLanes, total[i]);
  store_floats<kType>(filled, total[vectors]);
  std::memcpy(out + vectors * kLanes, filled, rest * sizeof(filled[0]));
}

template <Type kType>
LOCO_TARGET void sum_blocks(const Sum& shared, int64_t begin, int64_t end) {
  const Sum job = shared;
  Floats total[kLargestBlock / kLanes + 1];
  for (int64_t i = begin; i < end; ++i) sum_block<kType>(job, i, total);
}

#include "difference_kernels.h"

#undef LOCO_LOCAL
#undef LOCO_TARGET
#undef LOCO_SET
