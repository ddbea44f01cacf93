// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which instruction set CPU kernels use: decided on the machine that runs them, since a build may be shared by several.

#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define LOCO_X86 1
#include <immintrin.h>
#endif

namespace loco {

enum class Set { kPortable, kAvx2, kAvx512 };

inline Set instruction_set() {
#if defined(LOCO_X86)
  static const Set found = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Set::kAvx512;
    }
    return __builtin_cpu_supports("avx2") ? Set::kAvx2 : Set::kPortable;
  }();
  return found;
#else
  return Set::kPortable;
#endif
}

}  // namespace loco
