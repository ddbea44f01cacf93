// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace device_on_host {
namespace {

constexpr int GARBAGE = 0xff;  // NaN in each dtype of floating point, -1 in each of integers
constexpr size_t FILLED = 1 << 20;  // bytes; by default DeepSpeed allocates buckets of gigabytes and touches little

// Of pinned memory, where it begins and how long it is.
std::mutex pinned_lock;
std::map<const char*, size_t>& pinned() {
    static auto* known = new std::map<const char*, size_t>;  // outlives all tensors
    return *known;
}

void free_pinned(void* pointer) {
    {
        std::lock_guard<std::mutex> guard(pinned_lock);
        pinned().erase(static_cast<const char*>(pointer));
    }
    c10::free_cpu(pointer);
}

void* garbage(size_t bytes) {
    void* pointer = c10::alloc_cpu(bytes);
    if (pointer != nullptr) std::memset(pointer, GARBAGE, std::min(bytes, FILLED));
    return pointer;
}

// Gives memory that holds garbage, as that of a device does.
struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* pointer = garbage(bytes);
        const auto index = c10::impl::VirtualGuardImpl(DEVICE).getDevice().index();
        return {pointer, pointer, &c10::free_cpu, c10::Device(DEVICE, index)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* pointer = garbage(bytes);
        if (pointer != nullptr) {
            std::lock_guard<std::mutex> guard(pinned_lock);
            pinned()[static_cast<const char*>(pointer)] = bytes;
        }
        return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

DeviceAllocator of_device;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &of_device)

// A storage at the same memory, which it keeps alive.
c10::Storage alias(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
    auto* kept = new c10::Storage(storage);
    c10::DataPtr data(
        storage.mutable_data(), kept, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, device);
    return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
}

}  // namespace

bool is_pinned(const void* pointer) {
    std::lock_guard<std::mutex> guard(pinned_lock);
    const char* at = static_cast<const char*>(pointer);
    auto after = pinned().upper_bound(at);
    if (after == pinned().begin()) return false;
    const auto& [begin, bytes] = *std::prev(after);
    return at < begin + bytes;
}

c10::Allocator* pinned_allocator() {
    static PinnedAllocator allocator;
    return &allocator;
}

c10::Allocator* device_allocator() { return &of_device; }

void resize(const c10::Storage& storage, size_t bytes) {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = of_device.allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes())) std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
}

c10::Storage borrowed(const c10::Storage& storage) {
    c10::DataPtr data(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
    return c10::Storage(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), false);
}

c10::Storage Aliases::on_host(const c10::Storage& storage) {
    auto [found, is_new] = hosts_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) {
        found->second = alias(storage, c10::Device(c10::DeviceType::CPU), c10::GetCPUAllocator());
        devices_.emplace(found->second.unsafeGetStorageImpl(), storage);
    }
    return found->second;
}

c10::Storage Aliases::on_device(const c10::Storage& host, c10::Device device) {
    auto [found, is_new] = devices_.try_emplace(host.unsafeGetStorageImpl());
    if (is_new) {
        found->second = alias(host, device, device_allocator());
        hosts_.emplace(found->second.unsafeGetStorageImpl(), host);
    }
    return found->second;
}

void Aliases::take_over() {
    for (auto& [of_host, storage] : devices_) {
        const c10::Storage& host = hosts_.at(storage.unsafeGetStorageImpl());
        if (host.data() == storage.data() && host.nbytes() == storage.nbytes()) continue;
        c10::Storage larger = alias(host, storage.device(), device_allocator());
        storage.set_data_ptr_noswap(std::move(larger.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
        storage.set_nbytes(host.nbytes());
    }
}

}  // namespace device_on_host
