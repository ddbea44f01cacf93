// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// What operators need to start CUDA kernels.

#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include "jobs.h"

namespace loco {

inline void check_device(const Tensor& tensor, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), name,
      " must be on the device of the other arguments");
}

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace loco
