// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the host's code of the kernels calls of the CUDA runtime and of torch's half for it: devices, streams, guards,
// launches. Tensors are on device 1 unless a test places them elsewhere, and 0 is the current one, so that a guard that
// is missing and a stream of another device fail as they do with two GPUs.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "running.h"

namespace cuda_on_cpu {

void run_grid(dim3 grid, dim3 block);  // blocks.cpp

namespace {

constexpr int kDevice = 1;
constexpr uintptr_t kFirstStream = 0x5000;
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
constexpr unsigned kMostBlocks = 0x7fffffffu, kMostBlocksAcross = 65535;
constexpr size_t kMostDynamic = 48 << 10;  // bytes of shared memory, without asking for more

std::map<const void*, int> placed;
int current_device = 0;
cudaError_t pending = cudaSuccess;

cudaStream_t stream_of(int device) { return reinterpret_cast<cudaStream_t>(kFirstStream + device); }

int device_of(AtenTensorHandle tensor) {
  void* data = nullptr;
  aoti_torch_get_data_ptr(tensor, &data);
  const auto found = placed.find(data);
  return found == placed.end() ? kDevice : found->second;
}

bool is_on_its_stream(const char* what, cudaStream_t stream) {
  if (stream == stream_of(current_device) && current_device == kDevice) return true;
  last_error = std::string(what) + " on device " + std::to_string(current_device) + " and stream " +
               std::to_string(reinterpret_cast<uintptr_t>(stream));
  pending = cudaErrorInvalidResourceHandle;
  return false;
}

bool is_possible(const char* kernel, dim3 grid, dim3 block, size_t dynamic) {
  const unsigned size = block.x * block.y * block.z;
  if (grid.x && grid.y && grid.z && grid.x <= kMostBlocks && grid.y <= kMostBlocksAcross &&
      grid.z <= kMostBlocksAcross && size && size <= kMostThreads && size % kWarp == 0 && dynamic <= kMostDynamic) {
    return true;
  }
  last_error = std::string(kernel) + ": a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
               std::to_string(grid.z) + " with " + std::to_string(size) + " threads";
  pending = cudaErrorInvalidConfiguration;
  return false;
}

}  // namespace

void launch(const char* kernel, dim3 grid, dim3 block, size_t dynamic, cudaStream_t stream, Run run, const void* of) {
  ++counts.launches;
  ++counts.unchecked_launches;
  if (!is_on_its_stream(kernel, stream) || !is_possible(kernel, grid, block, dynamic)) return;
  running.kernel = kernel;
  running.run = run;
  running.of = of;
  running.host_frame = static_cast<const char*>(__builtin_frame_address(0));
  run_grid(grid, block);
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

CALLED_BY_TESTS void cuda_on_cpu_place(const void* data, int device) { placed[data] = device; }  // below 0: the CPU

CALLED_BY_TESTS int cuda_on_cpu_current_device() { return current_device; }

extern "C" {

cudaError_t cudaGetLastError() {
  counts.unchecked_launches = 0;
  const cudaError_t found = pending;
  pending = cudaSuccess;
  return found;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  constexpr size_t kTooMuchToTouch = size_t{1} << 30;  // fresh memory of a test that runs only some blocks
  ++counts.memsets;
  if (!is_on_its_stream("cudaMemsetAsync", stream)) return pending;
  if (bytes < kTooMuchToTouch || value) std::memset(to, value, bytes);
  if (settings.count_traffic) {
    counts.written += static_cast<int64_t>(bytes);
    counts.written_sectors += static_cast<int64_t>((bytes + 31) / 32);
  }
  written_by_host(reinterpret_cast<uintptr_t>(to), bytes);
  return cudaSuccess;
}

AOTITorchError torch_c10_cuda_check_msg(int32_t found, const char*, const char*, uint32_t, bool, char** message) {
  *message = found ? strdup(("CUDA error " + std::to_string(found) + ": " + last_error).c_str()) : nullptr;
  return AOTI_TORCH_SUCCESS;
}

void torch_c10_cuda_free_error_msg(char* message) { free(message); }

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = stream_of(device);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type) {
  *type = device_of(tensor) < 0 ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index) {
  *index = device_of(tensor);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  *guard = reinterpret_cast<DeviceGuardHandle>(static_cast<uintptr_t>(current_device) + 1);
  current_device = device;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  current_device = static_cast<int>(reinterpret_cast<uintptr_t>(guard)) - 1;
  return AOTI_TORCH_SUCCESS;
}
}
