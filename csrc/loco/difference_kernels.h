// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU kernels of differences between updated parameters and what is held of them. The last part of cpu_kernels.h,
// included by it alone, once for each instruction set: vectors, places of blocks and their way to the wire are there.

// h = updated - held; returns the largest magnitudes.
template <Type kType>
LOCO_LOCAL Integers subtract(const Compress& job, const Place& at, Floats* h) {
  Element<kType> filled[2][kLargestBlock];
  const Element<kType>* updated = elements_of<kType>(job.gradient, job.gradient_stride, job, at, filled[0]);
  const Element<kType>* held = elements_of<kType>(job.held, job.held_stride, job, at, filled[1]);
  Integers most{};
  for (int i = 0; i < job.block_size / kLanes; ++i) {
    h[i] = load_floats<kType>(updated + i * kLanes) - load_floats<kType>(held + i * kLanes);
    most = larger(most, h[i]);
  }
  return most;
}

// As compress_blocks, of differences: nothing is kept of them.
template <Type kType, int kBits>
LOCO_TARGET void difference_blocks(const Compress& shared, int64_t begin, int64_t end) {
  const Compress job = shared;
  Floats h[kLargestBlock / kLanes];
  Place at[kBatchBlocks];
  const int vectors = job.block_size / kLanes;
  const int batch = job.block_size < kBatch ? kBatch / job.block_size : 1;
  for (int64_t done = begin; done < end; done += batch) {
    const int count = end - done < batch ? static_cast<int>(end - done) : batch;
    for (int b = 0; b < count; ++b) {
      at[b].row = (done + b) / job.blocks;
      at[b].block = (done + b) % job.blocks;
      at[b].most = largest_of(subtract<kType>(job, at[b], h + b * vectors));
    }
    for (int b = 0; b < count; ++b) {
      at[b].scale = scale_of<kBits>(at[b].most);
      at[b].finite = at[b].scale.finite;
    }
    for (int b = 0; b < count; ++b) send<kBits, false>(job, at[b], h + b * vectors, nullptr);
  }
}

// held += what a row brings, in a block
template <Type kType, int kBits>
LOCO_LOCAL void apply_block(const Apply& job, int64_t row, int64_t block) {
  const int size = job.block_size;
  const uint8_t* wire = job.wire + row * job.wire_stride;
  const uint8_t* payload = wire + block * size * kBits / 8;
  const float step = step_of(reinterpret_cast<const uint16_t*>(wire + job.blocks * size * kBits / 8)[block]);
  Element<kType>* held = static_cast<Element<kType>*>(job.held) + row * job.held_stride + block * size;
  Element<kType> filled[kLargestBlock];
  const bool whole = (block + 1) * size <= job.width;
  const int64_t bytes = (job.width - block * size) * sizeof(filled[0]);  // of a last block
  if (!whole) {
    std::memset(filled, 0, size * sizeof(filled[0]));
    std::memcpy(filled, held, bytes);
  }
  Element<kType>* to = whole ? held : filled;
  for (int i = 0; i < size / kLanes; i += 2, payload += kChunk * kBits / 8, to += kChunk) {
    Floats first, second;
    unpack<kBits>(payload, &first, &second);
    store_floats<kType>(to, load_floats<kType>(to) + first * step);
    store_floats<kType>(to + kLanes, load_floats<kType>(to + kLanes) + second * step);
  }
  if (!whole) std::memcpy(held, filled, bytes);
}

template <Type kType, int kBits>
LOCO_TARGET void apply_blocks(const Apply& shared, int64_t begin, int64_t end) {
  const Apply job = shared;
  for (int64_t i = begin; i < end; ++i) apply_block<kType, kBits>(job, i / job.blocks, i % job.blocks);
}
