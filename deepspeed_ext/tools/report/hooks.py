# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where a recorder hears of an engine's steps: methods of its objects are wrapped while it records, and no class."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm as deepspeed_comm

from deepspeed_ext.comm import watching
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.tools.report.operations import OPERATIONS, Operation
from deepspeed_ext.tools.report.recorder import Recorder
from deepspeed_ext.tools.report.recording import BACKWARD, FORWARD, UPDATE

# Methods of DeepSpeed's optimizers in which the training lane does what communication asks for. Ours have them, too.
_HANDLING = (
    "reduce_ready_partitions_and_remove_grads",
    "overlapping_partition_gradients_reduce_epilogue",
    "reduce_gradients",
    "reduce_leaf",  # ours, as the next one
    "reduce_window",
)


@contextmanager
def looked_at(engine: Engine, look: Callable[[], None]) -> Iterator[None]:
    """Look at an engine before each forward and each update, within this context."""

    @contextmanager
    def looking() -> Iterator[None]:
        look()
        yield

    with ExitStack() as installed:
        for name in ("_take_model_step", *(() if engine.pipeline_parallelism else ("forward",))):
            installed.enter_context(mock.patch.object(engine, name, _inside(getattr(engine, name), looking)))
        yield


@contextmanager
def recorded_by(recorder: Recorder, engine: Engine) -> Iterator[None]:
    """Tell a recorder of what an engine's steps do, within this context.

    Args:
        recorder: is told.
        engine: that trains.

    Raises:
        RuntimeError: another engine is recorded.
    """
    with ExitStack() as installed:
        installed.enter_context(watching.watched_by(recorder))
        for owner, name, around in _wraps(recorder, engine):
            method = getattr(owner, name, None)
            if method is not None:
                installed.enter_context(mock.patch.object(owner, name, _inside(method, around)))
        if engine.pipeline_parallelism:
            installed.enter_context(mock.patch.object(engine, "_INSTRUCTION_MAP", _instructions(recorder, engine)))
        else:
            _watch_backward(recorder, engine, installed)
        _watch_fetches(recorder, engine, installed)
        backend = deepspeed_comm.cdb
        for name, operation in OPERATIONS.items():
            if hasattr(backend, name):
                told = _told(recorder, name, operation, getattr(backend, name))
                installed.enter_context(mock.patch.object(backend, name, told))
        if not recorder.clock.on_host:
            _watch_streams(recorder, installed)
        yield


Around = Callable[..., AbstractContextManager[None]]


def _inside(method: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return method(*args, **kwargs)

    return wrapped


def _wraps(recorder: Recorder, engine: Engine) -> Iterator[tuple[Any, str, Around]]:
    """Yield objects, names of their methods, and the context in which each runs."""
    if not engine.pipeline_parallelism:
        yield engine, "forward", lambda: recorder.phase(FORWARD)
        yield engine, "backward", lambda: recorder.phase(BACKWARD)
    yield engine, "_take_model_step", lambda: recorder.phase(UPDATE)
    for name in _HANDLING:
        yield engine.optimizer, name, recorder.handling


def _instructions(recorder: Recorder, engine: Engine) -> Mapping[type, Callable[..., Any]]:
    """Return a pipeline's instructions, of which forward and backward are phases."""
    from deepspeed.runtime.pipe import schedule

    kinds = {schedule.ForwardPass: FORWARD, schedule.BackwardPass: BACKWARD}
    return {
        kind: _inside(run, functools.partial(recorder.phase, kinds[kind])) if kind in kinds else run
        for kind, run in engine._INSTRUCTION_MAP.items()
    }


def _watch_backward(recorder: Recorder, engine: Engine, installed: ExitStack) -> None:
    """Take ``loss.backward()`` for a phase, too: there DeepSpeed's hooks tell of its beginning and its end."""
    begin, end = engine._backward_prologue, engine._backward_epilogue
    opened = []

    def prologue() -> Any:
        if recorder.open(BACKWARD):
            opened.append(True)
        return begin()

    def epilogue() -> Any:
        result = end()
        if opened:
            opened.clear()
            recorder.close(BACKWARD)
        return result

    installed.enter_context(mock.patch.object(engine, "_backward_prologue", prologue))
    installed.enter_context(mock.patch.object(engine, "_backward_epilogue", epilogue))


def _watch_fetches(recorder: Recorder, engine: Engine, installed: ExitStack) -> None:
    """Take down for which module of a ZeRO-3 parameters are fetched."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:
        return
    coordinator = offload.get_param_coordinator()
    names = {id(module): name or "the model" for name, module in engine.module.named_modules()}
    fetch, release = coordinator.fetch_sub_module, coordinator.release_sub_module

    def fetch_sub_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.fetching(names.get(id(module), "")):
            return fetch(module, *args, **kwargs)

    installed.enter_context(mock.patch.object(coordinator, "fetch_sub_module", fetch_sub_module))
    installed.enter_context(mock.patch.object(coordinator, "release_sub_module", _inside(release, recorder.handling)))


def _watch_streams(recorder: Recorder, installed: ExitStack) -> None:
    """Take down when the stream that trains waits for another one: the only class that is changed is torch's own."""
    kind = type(get_accelerator().current_stream())
    wait = kind.wait_event

    def wait_event(self: Any, event: Any) -> Any:
        if not recorder.clock.trains() or self != get_accelerator().current_stream():
            return wait(self, event)
        begin = recorder.clock.mark()
        result = wait(self, event)
        recorder.waited(begin, None)
        return result

    installed.enter_context(mock.patch.object(kind, "wait_event", wait_event))


def _told(recorder: Recorder, name: str, operation: Operation, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation of DeepSpeed's backend that tells of itself, unless it is one of our communications."""

    @functools.wraps(run)
    def told(*args: Any, **kwargs: Any) -> Any:
        if watching.is_ours():
            return run(*args, **kwargs)
        given = operation.given(args, kwargs)
        group = _group_of(given)
        nbytes = operation.received(given, dist.get_world_size(group=group))
        begin = recorder.clock.mark()
        with watching.ours():  # what it calls in turn is told of already
            result = run(*args, **kwargs)
        if not (operation.asynchronous or given.get("async_op")):
            recorder.completed(name, group, nbytes, begin)
            return result
        if isinstance(result, list):  # a batch of messages, whose bytes are put down with the first one
            return [
                recorder.started(name, group, nbytes if not number else 0.0, one, begin)
                for number, one in enumerate(result)
            ]
        return result if result is None else recorder.started(name, group, nbytes, result, begin)

    return told


def _group_of(given: Mapping[str, Any]) -> Any:
    if "p2p_op_list" in given:
        return given["p2p_op_list"][0].group
    return given.get("group")
