// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operators of lossless updates on the CPU.

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "instruction_set.h"
#include "lossless.h"

namespace loco {
namespace lossless {
namespace portable {
#define LOCO_TARGET
#include "lossless_kernels.h"
}  // namespace portable

#if defined(LOCO_X86)
namespace avx2 {
#define LOCO_TARGET __attribute__((target("avx2")))
#include "lossless_kernels.h"
}  // namespace avx2
namespace avx512 {
#define LOCO_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "lossless_kernels.h"
}  // namespace avx512
#endif

namespace {

constexpr int64_t kTilesPerTask = 16;

struct Kernels {
  void (*measure)(const Pack&, int64_t, int64_t);
  void (*pack)(const Pack&, int64_t, int64_t);
  void (*apply)(const Apply&, int64_t, int64_t);
};

Kernels kernels() {
#if defined(LOCO_X86)
  switch (instruction_set()) {
    case Set::kAvx512:
      return {avx512::measure_tiles, avx512::pack_tiles, avx512::apply_tiles};
    case Set::kAvx2:
      return {avx2::measure_tiles, avx2::pack_tiles, avx2::apply_tiles};
    default:
      break;
  }
#endif
  return {portable::measure_tiles, portable::pack_tiles, portable::apply_tiles};
}

template <typename Job>
void run(void (*kernel)(const Job&, int64_t, int64_t), const Job& job, int64_t tiles) {
  torch::stable::parallel_for(0, tiles, kTilesPerTask, [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
}

void measure_cpu(Tensor updated, Tensor held, Tensor tiles) {
  const Pack job = make_measure(updated, held, tiles);
  run(kernels().measure, job, job.tiles);
}

void pack_cpu(Tensor updated, Tensor held, Tensor header, Tensor wire) {
  const Pack job = make_pack(updated, held, header, wire);
  run(kernels().pack, job, job.tiles);
}

void apply_cpu(Tensor wire, Tensor held) {
  const Apply job = make_apply(wire, held);
  run(kernels().apply, job, job.rows * job.tiles);
}

}  // namespace
}  // namespace lossless
}  // namespace loco

STABLE_TORCH_LIBRARY_IMPL(deepspeed_paro, CPU, library) {
  library.impl("lossless_measure", TORCH_BOX(&loco::lossless::measure_cpu));
  library.impl("lossless_pack", TORCH_BOX(&loco::lossless::pack_cpu));
  library.impl("lossless_apply", TORCH_BOX(&loco::lossless::apply_cpu));
}
