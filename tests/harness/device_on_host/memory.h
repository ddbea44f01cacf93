// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Memory of the simulated device: that of the host, which the host's operators see through aliases.
#pragma once

#include <c10/core/Storage.h>

#include <unordered_map>
#include <vector>

namespace device_on_host {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;

// Whether a pointer is in memory that was pinned.
bool is_pinned(const void* pointer);

// Allocates pinned memory of the host.
c10::Allocator* pinned_allocator();

// Allocates memory of the device.
c10::Allocator* device_allocator();

// Gives a storage of the device so many bytes; what it holds, as far as it fits, is kept.
void resize(const c10::Storage& storage, size_t bytes);

// A storage of the host at the memory of another one, which it does not keep alive.
c10::Storage borrowed(const c10::Storage& storage);

// The storages of one call: each of the device has one alias on the host, as long as the call lasts.
class Aliases {
   public:
    // The alias of a storage of the device.
    c10::Storage on_host(const c10::Storage& storage);

    // The storage of the device that an alias stands for; one that is made for a storage that was none.
    c10::Storage on_device(const c10::Storage& host, c10::Device device);

    // What operators have made larger takes its new memory.
    void take_over();

   private:
    std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_;  // by the one of the device
    std::unordered_map<c10::StorageImpl*, c10::Storage> devices_;  // by the alias
};

}  // namespace device_on_host
