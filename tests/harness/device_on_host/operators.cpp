// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Operators of the simulated device: those of the host, on aliases of the same memory, once it is clear that
// all tensors are on one device.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <unordered_map>

#include "memory.h"

namespace device_on_host {
namespace {

using at::Tensor;
using c10::Device;
using c10::IValue;

// What a tensor looks like at another storage.
Tensor at_storage(const Tensor& like, c10::Storage storage, c10::DispatchKey key) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return made;
}

// A tensor of the device as one of the host.
Tensor alias_of(const Tensor& tensor, Aliases& aliases) {
    if (tensor.device().type() != DEVICE) return tensor;
    Tensor host = at_storage(tensor, aliases.on_host(tensor.storage()), c10::DispatchKey::CPU);
    if (tensor.is_conj()) host._set_conj(true);
    if (tensor.is_neg()) host._set_neg(true);
    return host;
}

// One call of an operator.
class Call {
   public:
    explicit Call(const c10::OperatorHandle& op) : op_(op), name_(op.schema().name()) {}

    void run(torch::jit::Stack* stack) {
        const size_t count = op_.schema().arguments().size();
        auto arguments = torch::jit::last(stack, count);
        for (size_t i = 0; i < count; i++) find(arguments[i], op_.schema().arguments()[i]);
        if (!device_) device_ = c10::impl::VirtualGuardImpl(DEVICE).getDevice();
        c10::DeviceGuard guard(*device_);
        for (size_t i = 0; i < count; i++) stack->at(stack->size() - count + i) = on_host(arguments[i]);
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
        take_over();
        const size_t results = op_.schema().returns().size();
        for (size_t i = stack->size() - results; i < stack->size(); i++) (*stack)[i] = on_device((*stack)[i]);
    }

   private:
    // Which device the operator runs on; all tensors must be there, but for numbers of the host that are only read.
    void find(const IValue& value, const c10::Argument& argument) {
        const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
        each_tensor(value, [&](const Tensor& tensor) { check(tensor, written); });
        if (value.isDevice() && value.toDevice().type() == DEVICE && value.toDevice().has_index()) {
            device_ = value.toDevice();
        }
    }

    void check(const Tensor& tensor, bool written) {
        if (tensor.device().type() == c10::DeviceType::CPU && tensor.dim() == 0 && !written) return;
        if (found_) {
            TORCH_CHECK(
                *found_ == tensor.device(), "Expected all tensors to be on the same device, but found at least two "
                "devices, ", *found_, " and ", tensor.device(), ", in ", name_);
        }
        found_ = tensor.device();
        if (tensor.device().type() == DEVICE) device_ = tensor.device();
    }

    template <class Function>
    static void each_tensor(const IValue& value, const Function& function) {
        if (value.isTensor() && value.toTensor().defined()) function(value.toTensor());
        if (!value.isList()) return;
        for (const IValue& entry : value.toListRef()) each_tensor(entry, function);
    }

    IValue on_host(const IValue& value) {
        if (value.isTensor()) return on_host(value.toTensor());
        if (value.isTensorList()) {
            c10::List<Tensor> hosts;
            for (const Tensor& tensor : value.toTensorVector()) hosts.push_back(on_host(tensor));
            return hosts;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> hosts;
            for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
                hosts.push_back(tensor ? std::optional<Tensor>(on_host(*tensor)) : std::nullopt);
            }
            return hosts;
        }
        if (value.isStorage() && value.toStorage().device_type() == DEVICE) return aliases_.on_host(value.toStorage());
        if (value.isDevice() && value.toDevice().type() == DEVICE) return Device(c10::DeviceType::CPU);
        return value;
    }

    Tensor on_host(const Tensor& tensor) {
        if (!tensor.defined() || tensor.device().type() != DEVICE) return tensor;
        Tensor host = alias_of(tensor, aliases_);
        originals_.emplace(host.unsafeGetTensorImpl(), std::pair(host, tensor));
        return host;
    }

    // Arguments that were resized, or set to other storages.
    void take_over() {
        aliases_.take_over();
        for (auto& [impl, pair] : originals_) {
            auto& [host, tensor] = pair;
            c10::TensorImpl* target = tensor.unsafeGetTensorImpl();
            c10::Storage storage = aliases_.on_device(host.storage(), *device_);
            if (storage.unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl()) {
                target->set_storage_keep_dtype(std::move(storage));
            }
            if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides() ||
                host.storage_offset() != tensor.storage_offset()) {
                target->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
            }
        }
    }

    IValue on_device(const IValue& value) {
        if (value.isTensor()) return on_device(value.toTensor());
        if (value.isTensorList()) {
            c10::List<Tensor> devices;
            for (const Tensor& tensor : value.toTensorVector()) devices.push_back(on_device(tensor));
            return devices;
        }
        return value;
    }

    Tensor on_device(const Tensor& host) {
        if (!host.defined() || host.device().type() == DEVICE) return host;
        auto found = originals_.find(host.unsafeGetTensorImpl());
        if (found != originals_.end()) return found->second.second;
        return at_storage(host, aliases_.on_device(host.storage(), *device_), c10::DispatchKey::PrivateUse1);
    }

    const c10::OperatorHandle& op_;
    const std::string& name_;
    Aliases aliases_;
    std::unordered_map<c10::TensorImpl*, std::pair<Tensor, Tensor>> originals_;  // by the alias: it, and what it is of
    std::optional<Device> found_, device_;
};

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op).run(stack); }

// Copies go between devices. In a call of its own each tensor is alone, so none is refused.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
    Aliases aliases;
    alias_of(self, aliases).copy_(alias_of(source, aliases), non_blocking);
    return self;
}

Tensor copy_from(const Tensor& source, const Tensor& self, bool non_blocking) {
    Tensor to = self;
    return copy_(to, source, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& self) {
    self.resize_(source.sizes());
    return copy_from(source, self, false);
}

// ``param.data = other`` may move a parameter between host and device, as with CUDA.
bool compatible(const Tensor& self, const Tensor& from) {
    return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

c10::DeviceGuard on(std::optional<Device> device) {
    const c10::impl::VirtualGuardImpl guard(DEVICE);
    return c10::DeviceGuard(device && device->has_index() ? *device : guard.getDevice());
}

Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(!pinned.value_or(false), "Only memory of the host can be pinned");
    const auto guard = on(device);
    const auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
    return at::detail::empty_generic_symint(sizes, device_allocator(), KEYS, type, format);
}

Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pinned) {
    TORCH_CHECK(!pinned.value_or(false), "Only memory of the host can be pinned");
    const auto guard = on(device);
    const auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
    return at::detail::empty_strided_symint_generic(sizes, strides, device_allocator(), KEYS, type);
}

void record_stream(Tensor&, at::Stream) {}

// A tensor of the host at the same memory, which it does not keep alive.
Tensor on_host(const Tensor& tensor) {
    return at_storage(tensor, borrowed(tensor.storage()), c10::DispatchKey::CPU);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("copy_", copy_);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_has_compatible_shallow_copy_type", compatible);
    library.impl("record_stream", record_stream);
}

TORCH_LIBRARY(device_on_host, library) { library.def("on_host(Tensor tensor) -> Tensor", on_host); }

}  // namespace device_on_host
