// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// What torch asks of a device: which is the current one, its streams and events, who pins memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace device_on_host {
namespace {

constexpr c10::DeviceIndex DEVICES = 16;
thread_local c10::DeviceIndex current = 0;

// All operations are over when they return, so streams of torch's own have nothing to do. Those of DeepSpeed are the
// accelerator's, in Python.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return DEVICE; }
    c10::Device getDevice() const override { return {DEVICE, current}; }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.type() == DEVICE && device.index() >= 0 && device.index() < DEVICES, "no device ", device);
        current = device.index();
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

    c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
    c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
    void synchronizeDevice(const c10::DeviceIndex) const override {}
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void synchronizeEvent(void*) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    c10::DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({DEVICE, index}); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        return Guard().exchangeDevice({DEVICE, index}).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
    bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize(storage, bytes); }
    // Numbers are drawn as on the host: runs on both can be compared.
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

const bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

}  // namespace
}  // namespace device_on_host
