# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs inside a rank process: enters it, restores globals between cases, and answers cases. See ranks.py."""

import contextlib
import copy
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import pkgutil
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness import recorder

_WHOLE = 100  # number of cases after which a garbage collection visits everything
_GROUP_TIMEOUT = timedelta(seconds=240)  # a wrong collective on the world group ends by itself, with a traceback

# Globals of DeepSpeed 0.19 that one case would pass to the next: the object that has them, then their names.
# ``deepspeed.utils.groups`` is missing since ``destroy_process_group`` clears it.
_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"
_GLOBALS: dict[str, tuple[str, ...]] = {
    "deepspeed.runtime.torch_autocast": (
        "TORCH_AUTOCAST_INITIALIZED",
        "TORCH_AUTOCAST_DTYPE",
        "_WARNED_NESTED_AUTOCAST",
    ),
    # ZeRO-3 counts persistent elements over all engines of the process against one limit.
    "deepspeed.runtime.zero.partition_parameters:Init": (
        *("param_id", "param_persistence_threshold", "model_persistence_threshold", "num_persisted_parameters"),
        *("num_persisted_elements", "apply_param_persistence", "override_module_apply"),
    ),
    "deepspeed.runtime.zero.partition_parameters": ("zero_init_context", "top_level_context"),
    "deepspeed.runtime.zero.parameter_offload": ("FWD_MODULE_STACK",),
    "deepspeed.runtime.pipe.p2p": ("_groups", "_grid", "_async"),
    "deepspeed.runtime.tensor_parallel.init_utils": ("_TP_MODEL_INIT_ARGS",),
    _CHECKPOINTING: (
        *("deepspeed_checkpointing_enabled", "mpu", "num_layers", "PARTITION_ACTIVATIONS", "CPU_CHECKPOINT"),
        *("CONTIGUOUS_CHECKPOINTING", "SYNCHRONIZE", "PROFILE_TIME"),
    ),
    # zero.Init replaces it for good (mem_efficient_linear).
    "torch.nn.functional": ("linear",),
    # Muon's kernels are not compiled here.
    "torch._dynamo.config": ("disable",),
}
# The same, for objects with all of their attributes restored.
_OBJECTS = (
    "deepspeed.comm.comm:comms_logger",
    "deepspeed.comm.comm:timers",
    # Tests override what the device supports (fp16 on a CPU) by assigning to it.
    "deepspeed.accelerator.real_accelerator:ds_accelerator",
)

_caches_of_imports: list[Any] = []  # see ``_function_caches``


def prepare() -> None:
    """Collect garbage, record caches, and freeze imported objects, in the server that ranks are forked from. A
    collection visits all of it, and a rank would copy the pages that it shares: half a second for each new one."""
    gc.collect()
    _caches_of_imports[:] = _function_caches()
    gc.freeze()


class Raised(NamedTuple):
    """An exception that a rank raised; the object itself may not survive pickling."""

    type: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"raised {self.type}: {self.message}"


class Finished(NamedTuple):
    value: Any

    def __str__(self) -> str:
        return "finished"


class RankSlot(NamedTuple):
    """A rank's number, and the address at which it meets the other ranks."""

    rank: int
    port: int
    workdir: Path


class _ProcessState:
    """The state of a process that a case may change, as it was before the first case."""

    def __init__(self) -> None:
        self._cwd = os.getcwd()
        self._environ = dict(os.environ)
        self._globals = [(pkgutil.resolve_name(path), name) for path, names in _GLOBALS.items() for name in names]
        self._values = [_copied(getattr(owner, name)) for owner, name in self._globals]
        self._objects = [vars(pkgutil.resolve_name(path)) for path in _OBJECTS]
        self._attributes = [{name: _copied(value) for name, value in entry.items()} for entry in self._objects]
        self._caches: list[Any] = [*_caches_of_imports]
        self._cases = 0

    def restore(self) -> None:
        """Restore all of it, and free the garbage of the last case."""
        import torch

        _destroy_groups()
        os.chdir(self._cwd)
        os.environ.clear()
        os.environ.update(self._environ)
        for (owner, name), value in zip(self._globals, self._values, strict=True):
            setattr(owner, name, _copied(value))
        for live, saved in zip(self._objects, self._attributes, strict=True):
            live.clear()
            live.update({name: _copied(value) for name, value in saved.items()})
        # ZeRO-3 numbers modules over all engines of the process, and compares the numbers: stages have different ones.
        numbering = pkgutil.resolve_name("deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload")
        numbering._register_deepspeed_module.__defaults__[0][0] = 0
        for cache in self._caches + _function_caches():
            cache.cache_clear()
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        self._collect()

    def _collect(self) -> None:
        """Collect garbage, and freeze the remaining objects, so that later collections skip it. These are imported
        modules, a hundred times as many objects as a case leaves. Some may have become garbage since, so they are
        visited now and then."""
        self._cases += 1
        if self._cases % _WHOLE == 0:
            gc.unfreeze()
        gc.collect()
        self._caches = _function_caches() if self._cases % _WHOLE == 0 else self._caches + _function_caches()
        gc.freeze()


def _destroy_groups() -> None:
    """Destroy engines that cases have left, and all process groups."""
    import deepspeed
    import torch

    _destroy_engines()
    if torch.distributed.is_initialized():
        deepspeed.comm.destroy_process_group()


def _destroy_engines() -> None:
    """Destroy engines that exist. Otherwise they live forever, with the threads and sockets of their groups: the hooks
    on gradient accumulators refer back to the engine from C++, where the garbage collector does not see them."""
    import deepspeed
    from deepspeed.runtime.pipe.engine import PipelineEngine

    for entry in gc.get_objects():
        if issubclass(type(entry), deepspeed.DeepSpeedEngine):
            entry.destroy()
            # Even after destroy, the last stage of a pipeline holds the graph of its losses, and with it these hooks.
            if issubclass(type(entry), PipelineEngine):
                vars(entry).clear()


def run_each(fn: Callable[..., Any], items: tuple[Any, ...], args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Return each item with what ``fn`` returns for it, which starts without engines."""
    rows = []
    for item in items:
        rows.append((item, fn(item, *args, **kwargs)))
        _destroy_engines()
    return rows


def _function_caches() -> list[Any]:
    """Return the ``functools`` caches of DeepSpeed and its add-ons, among objects that are not frozen. One of them, on
    a method of ZeRO-3, keeps every model alive that was ever trained, and with it the model's groups."""
    cache_type = type(functools.cache(_copied))
    entries = [entry for entry in gc.get_objects() if type(entry) is cache_type]
    # Cached signatures of DeepSpeed's functions are the same for every case.
    kept = "deepspeed_ext.integration.symbols"
    return [entry for entry in entries if str(entry.__module__).startswith("deepspeed") and entry.__module__ != kept]


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def serve(conn: connection.Connection, slot: RankSlot, log: Path, stacks: Path) -> None:
    """The life of a rank: answer one case after the other until the parent has ended."""
    _enter(slot, log, stacks)
    record = recorder.of_this_process()
    state = _ProcessState()
    while True:
        try:
            case, world_size, payload = pickle.loads(conn.recv_bytes())
        except EOFError:
            return
        sys.stdout.flush()
        os.ftruncate(sys.stdout.fileno(), 0)  # the log has one case only
        conn.send_bytes(_answer(payload, partial(_begin_case, slot, state, case, world_size), record))


def _enter(slot: RankSlot, log: Path, stacks: Path) -> None:
    """Make the forked process a rank: its output, its signals, its environment."""
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the parent decides
    threading.Thread(target=_die_with_parent, name="die_with_parent", daemon=True).start()
    warnings.simplefilter("ignore", FutureWarning)  # torch's deprecations of what DeepSpeed calls
    rank = str(slot.rank)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(slot.port))
    _configure_libraries()


def _configure_libraries() -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # DeepSpeed formats each parameter that it partitions, for messages that are not printed: a third of the time to
    # make an engine.
    torch.set_printoptions(threshold=0, edgeitems=1)
    # A shared-memory all-reduce for inference: minutes to compile on a busy machine, and every rank that loads it
    # leaves 66 MB in /dev/shm that nothing removes. Without it DeepSpeed uses gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _share_device_of_gloo()


def _share_device_of_gloo() -> None:
    """Create all groups of this process on one device of gloo. Each device has a thread that wakes up a hundred times
    per second. An engine has a dozen groups, and each its own device by default."""
    from torch.distributed import distributed_c10d

    gloo, devices = distributed_c10d.ProcessGroupGloo, []

    class OnOneDevice(type):  # no subclass of gloo's: torch returns groups from C++ as instances of that
        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            if not devices:
                devices.append(gloo.create_default_device())
            options = gloo._Options()
            options._devices, options._threads, options._timeout = devices, 2, timeout
            return gloo(store, rank, size, options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, gloo)

    distributed_c10d.ProcessGroupGloo = OnOneDevice("ProcessGroupGloo", (), {})  # type: ignore[misc]


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _begin_case(slot: RankSlot, state: _ProcessState, case: int, world_size: int) -> None:
    """Forget the last case, and meet the other ranks of this case in a new process group."""
    import deepspeed
    import torch

    state.restore()
    size = str(world_size)
    os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, LOCAL_SIZE=size)
    random.seed(0)
    torch.manual_seed(0)
    url = f"file://{slot.workdir}/case{case}"
    deepspeed.init_distributed("gloo", timeout=_GROUP_TIMEOUT, init_method=url, rank=slot.rank, world_size=world_size)


def _answer(payload: bytes, begin: Callable[[], None], record: recorder.Recorder | None) -> bytes:
    """Run one case. Nothing that it raises, ``SystemExit`` included, ends the rank."""
    try:
        begin()
        test, fn, args, kwargs = pickle.loads(payload)
        with record.context(test) if record else contextlib.nullcontext():
            value = fn(*args, **kwargs)
        return pickle.dumps(Finished(value))
    except BaseException as error:
        return pickle.dumps(Raised(type(error).__name__, str(error), "".join(traceback.format_exception(error))))
