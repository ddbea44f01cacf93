// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operators on the CPU, and the module that Python imports to have them registered.

#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <type_traits>

#include "instruction_set.h"
#include "jobs.h"

// The kernels once for each instruction set.
namespace loco {
namespace portable {
#define LOCO_SET 0
#define LOCO_TARGET
#include "cpu_kernels.h"
}  // namespace portable

#if defined(LOCO_X86)
namespace avx2 {
#define LOCO_SET 256
#define LOCO_TARGET __attribute__((target("avx2")))
#include "cpu_kernels.h"
}  // namespace avx2
namespace avx512 {
#define LOCO_SET 512
#define LOCO_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "cpu_kernels.h"
}  // namespace avx512
#endif

namespace {

constexpr int64_t kElementsPerTask = 16384;
constexpr int kSummedBlock = 1024;  // its sums stay in the L1 cache

template <typename Job>
using Kernel = void (*)(const Job&, int64_t, int64_t);

template <Type kType, int kBits, int kErrorBits>
Kernel<Compress> compress_kernel() {
#if defined(LOCO_X86)
  switch (instruction_set()) {
    case Set::kAvx512:
      return avx512::compress_blocks<kType, kBits, kErrorBits>;
    case Set::kAvx2:
      return avx2::compress_blocks<kType, kBits, kErrorBits>;
    default:
      break;
  }
#endif
  return portable::compress_blocks<kType, kBits, kErrorBits>;
}

template <Type kType, int kBits>
Kernel<Decompress> decompress_kernel() {
#if defined(LOCO_X86)
  switch (instruction_set()) {
    case Set::kAvx512:
      return avx512::decompress_blocks<kType, kBits>;
    case Set::kAvx2:
      return avx2::decompress_blocks<kType, kBits>;
    default:
      break;
  }
#endif
  return portable::decompress_blocks<kType, kBits>;
}

template <Type kType, int kBits>
Kernel<Compress> difference_kernel() {
#if defined(LOCO_X86)
  switch (instruction_set()) {
    case Set::kAvx512:
      return avx512::difference_blocks<kType, kBits>;
    case Set::kAvx2:
      return avx2::difference_blocks<kType, kBits>;
    default:
      break;
  }
#endif
  return portable::difference_blocks<kType, kBits>;
}

template <Type kType, int kBits>
Kernel<Apply> apply_kernel() {
#if defined(LOCO_X86)
  switch (instruction_set()) {
    case Set::kAvx512:
      return avx512::apply_blocks<kType, kBits>;
    case Set::kAvx2:
      return avx2::apply_blocks<kType, kBits>;
    default:
      break;
  }
#endif
  return portable::apply_blocks<kType, kBits>;
}

template <Type kType>
Kernel<Sum> sum_kernel() {
#if defined(LOCO_X86)
  switch (instruction_set()) {
    case Set::kAvx512:
      return avx512::sum_blocks<kType>;
    case Set::kAvx2:
      return avx2::sum_blocks<kType>;
    default:
      break;
  }
#endif
  return portable::sum_blocks<kType>;
}

template <typename Job>
void run(Kernel<Job> kernel, const Job& job, int64_t blocks) {
  const int64_t grain = kElementsPerTask / job.block_size + 1;
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
}

void clear_padding(uint8_t* rows, int64_t count, int64_t used, int64_t stride) {
  for (int64_t row = 0; row < count; ++row) {
    std::memset(rows + row * stride + used, 0, stride - used);
  }
}

void compress_cpu(
    Tensor gradient, Tensor wire, std::optional<Tensor> error, std::optional<Tensor> new_error, int64_t bits,
    int64_t block_size, double beta, double unit, bool hadamard) {
  int kept = 8;
  static const uint8_t zeros[kLargestBlock * sizeof(float)] = {};
  Compress job =
      make_compress(gradient, wire, error, new_error, bits, block_size, beta, unit, hadamard, &kept);
  job.zeros = zeros;
  with_type(type_of(gradient), [&](auto type) {
    with_bits(bits, [&](auto wire_bits) {
      with_error_bits(kept, [&](auto error_bits) {
        constexpr Type kType = decltype(type)::value;
        run(compress_kernel<kType, decltype(wire_bits)::value, decltype(error_bits)::value>(), job,
            job.rows * job.blocks);
      });
    });
  });
  clear_padding(job.wire, job.rows, job.blocks * block_size * bits / 8 + 2 * job.blocks, job.wire_stride);
  if (job.has_new_error && kept == 8) {
    clear_padding(job.write_error, job.rows, job.error_scales + 2 * job.blocks, job.error_stride);
  }
}

void decompress_cpu(Tensor wire, Tensor out, int64_t bits, int64_t block_size, double factor, bool hadamard) {
  const Decompress job = make_decompress(wire, out, bits, block_size, factor, hadamard);
  with_type(type_of(out), [&](auto type) {
    with_bits(bits, [&](auto wire_bits) {
      run(decompress_kernel<decltype(type)::value, decltype(wire_bits)::value>(), job, job.blocks);
    });
  });
}

void difference_cpu(Tensor updated, Tensor held, Tensor wire, int64_t bits, int64_t block_size) {
  const Compress job = make_difference(updated, held, wire, bits, block_size);
  with_type(type_of(updated), [&](auto type) {
    with_bits(bits, [&](auto wire_bits) {
      run(difference_kernel<decltype(type)::value, decltype(wire_bits)::value>(), job, job.rows * job.blocks);
    });
  });
  clear_padding(job.wire, job.rows, job.blocks * block_size * bits / 8 + 2 * job.blocks, job.wire_stride);
}

void apply_cpu(Tensor wire, Tensor held, int64_t bits, int64_t block_size) {
  const Apply job = make_apply(wire, held, bits, block_size);
  with_type(type_of(held), [&](auto type) {
    with_bits(bits, [&](auto wire_bits) {
      run(apply_kernel<decltype(type)::value, decltype(wire_bits)::value>(), job, job.rows * job.blocks);
    });
  });
}

void sum_cpu(Tensor parts, Tensor out) {
  const Sum job = make_sum(parts, out, kSummedBlock);
  with_type(type_of(out), [&](auto type) { run(sum_kernel<decltype(type)::value>(), job, job.blocks); });
}

}  // namespace
}  // namespace loco

STABLE_TORCH_LIBRARY_IMPL(deepspeed_paro, CPU, library) {
  library.impl("loco_compress", TORCH_BOX(&loco::compress_cpu));
  library.impl("loco_decompress", TORCH_BOX(&loco::decompress_cpu));
  library.impl("loco_difference", TORCH_BOX(&loco::difference_cpu));
  library.impl("loco_apply", TORCH_BOX(&loco::apply_cpu));
  library.impl("sum_parts", TORCH_BOX(&loco::sum_cpu));
}

// An empty module: importing it loads the library, which registers the operators.
#define LOCO_INIT_OF(name) PyInit_##name
#define LOCO_INIT(name) LOCO_INIT_OF(name)

PyMODINIT_FUNC LOCO_INIT(TORCH_EXTENSION_NAME)(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "loco", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
