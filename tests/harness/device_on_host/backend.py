# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Makes the simulated device one of torch's, in a process that has no other; and its process groups, which are gloo's.
This runs inside rank processes."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils import _pytree as pytree

NAME = "sim"
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "_allgather_base", "gather", "scatter"),
    *("allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "alltoall", "alltoall_base"),
    *("send", "recv", "recv_anysource"),
)


@functools.cache
def register(library: str) -> None:
    """Make the device known to torch, for as long as the process lives: torch knows one of this kind."""
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator
    vars(module).update(
        is_available=lambda: True,
        device_count=lambda: 16,
        current_device=accelerator.current_device_index,
        set_device=accelerator.set_device_index,
        device=lambda device: accelerator.device_index(device if isinstance(device, int) else device.index or 0),
        synchronize=lambda device=None: None,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,  # numbers are the host's
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    torch._register_device_module(NAME, module)
    torch.ops.load_library(library)
    torch.utils.generate_methods_for_privateuse1_backend()


@contextlib.contextmanager
def groups_of_device() -> Iterator[None]:
    """In this context process groups take tensors of the device: gloo is given the same memory as the host's."""

    def given_hosts(method: Callable[..., Any]) -> Callable[..., Any]:
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = method(group, *pytree.tree_map_only(Tensor, _shared, args), **kwargs)
            return None if work is None else _Work(work, args)

        return collective

    def backend_of_host(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda group, device, *args: method(group, torch.device("cpu"), *args)

    wait_for_all = ProcessGroup.barrier

    def barrier(group: Any, opts: Any) -> Any:
        opts.device = torch.device("cpu")
        return wait_for_all(group, opts=opts)

    with contextlib.ExitStack() as patches:
        for name in _COLLECTIVES:
            if hasattr(ProcessGroup, name):
                method = given_hosts(getattr(ProcessGroup, name))
                patches.enter_context(mock.patch.object(ProcessGroup, name, method))
        patches.enter_context(mock.patch.object(distributed_c10d, "_get_object_coll_device", lambda group=None: NAME))
        patches.enter_context(mock.patch.object(ProcessGroup, "barrier", barrier))
        for name in ("_get_backend", "_start_coalescing", "_end_coalescing"):
            method = backend_of_host(getattr(ProcessGroup, name))
            patches.enter_context(mock.patch.object(ProcessGroup, name, method))
        yield


class _Work:
    """A collective of gloo's in flight, whose tensors are alive until code has waited for it. Gloo's threads release
    their tensors some time after ``wait``. So they receive tensors that keep no memory alive, and the memory of the
    device does not depend on the speed of these threads."""

    _under_way: ClassVar[set["_Work"]] = set()

    def __init__(self, work: Any, args: Any) -> None:
        self._work, self._args = work, args
        # Those that nobody waits for.
        self._under_way.difference_update([item for item in list(self._under_way) if item.is_completed()])
        self._under_way.add(self)

    def wait(self, *args: Any) -> Any:
        done = self._work.wait(*args)
        self._under_way.discard(self)
        self._args = ()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _shared(tensor: Tensor) -> Tensor:
    if tensor.device.type != NAME:
        raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")  # as without gloo
    host: Tensor = torch.ops.device_on_host.on_host(tensor.detach())
    return host
