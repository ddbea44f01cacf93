# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Counts the steps of an engine, records the requested steps, and triggers the report.

Note [Recorded steps]
    After a warm-up, some steps are only timed, the next are recorded, and then as many again are only timed: the
    difference is the overhead of recording. Then all ranks make the report together, at the end of a step, which all
    of them reach. Afterwards the engine is restored. If other code has since wrapped our methods, they remain, and
    only call the engine's methods.

While steps are recorded, methods and hooks of the engine's objects are wrapped, and so are the operations of
DeepSpeed's backend. Our own communications report to ``comm/observers.py``.
"""

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.utils import log_dist, logger
from torch.distributed import ProcessGroup, get_process_group_ranks

from deepspeed_ext.comm import observers
from deepspeed_ext.comm.process_groups import Topology, ranks_per_node
from deepspeed_ext.config.settings import UNRECORDED_STEPS, ReportSettings
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.model_bytes import measure_state_bytes
from deepspeed_ext.strategy import StateBytes
from deepspeed_ext.tools.clocks import Clock, make_clock
from deepspeed_ext.tools.report.contents import build_report, write_report
from deepspeed_ext.tools.report.measures import BACKWARD, FORWARD, UPDATE, hop_of
from deepspeed_ext.tools.report.recorder import OPERATIONS, Recorder, record_operation

_reporter: "_Reporter | None" = None  # reporter of this process, for one engine at a time


def report_on(engine: Engine, settings: ReportSettings) -> None:
    """Record steps of an engine, and report on them. Of several engines at a time, only the first is recorded.

    Args:
        engine: engine whose steps are counted from now on.
        settings: settings of the report.
    """
    global _reporter
    if _reporter is not None:
        log_dist("deepspeed_ext: only the first engine of this process is recorded", ranks=[0])
        return
    _reporter = _Reporter(engine, settings)


class _Reporter:
    """Counts the steps of one engine; see Note [Recorded steps]."""

    def __init__(self, engine: Engine, settings: ReportSettings) -> None:
        # Weak: ``_reporter`` and atexit refer to this object, and must not keep the engine alive.
        self._engine, self._settings = weakref.proxy(engine), settings
        self._step_count, self._last_global_step = 0, engine.global_steps
        self._clock: Clock | None = None
        self._ends: list[Any] = []  # ends of the timed and recorded steps
        self._recorder: Recorder | None = None
        self._memory_hooks, self._recording_hooks = ExitStack(), ExitStack()
        self._state_bytes = StateBytes(0, 0, 0)
        self._ended = False
        # By the method's name: a weak reference to our wrapper, which refers to the engine; and whether it replaces an
        # attribute of the engine rather than its class's method.
        self._wrappers: dict[str, tuple[weakref.ref[Any], bool]] = {}
        self._wrap(engine, "train_batch" if engine.pipeline_parallelism else "step", after=self._on_step)
        self._wrap(engine, "destroy", before=self._stop)
        atexit.register(self._warn_without_report)

    def _wrap(
        self,
        engine: Engine,
        name: str,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Call functions around a method of the engine until the report has been made."""
        method = getattr(engine, name)

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # Checked at each call, because other code may keep this wrapper after the report.
            if not self._ended:
                before()
            result = method(*args, **kwargs)
            if not self._ended:
                after()
            return result

        self._wrappers[name] = weakref.ref(wrapper), name in vars(engine)
        setattr(engine, name, wrapper)

    def _restore_engine(self) -> None:
        """Restore the engine, except for methods that other code has wrapped since."""
        global _reporter
        _reporter, self._ended = None, True
        self._memory_hooks.close()
        self._recording_hooks.close()
        for name, (wrapper, replaced) in self._wrappers.items():
            our_wrapper = wrapper()
            if our_wrapper is None or vars(self._engine).get(name) is not our_wrapper:
                continue
            if replaced:
                setattr(self._engine, name, our_wrapper.__wrapped__)
            else:
                delattr(self._engine, name)
        atexit.unregister(self._warn_without_report)

    def _stop(self) -> None:
        """Stop recording an engine that is destroyed."""
        self._restore_engine()
        self._warn_without_report()

    def _on_step(self) -> None:
        """Count an optimizer step; ignore micro-steps."""
        settings = self._settings
        if self._engine.global_steps == self._last_global_step:
            return
        self._last_global_step, self._step_count = self._engine.global_steps, self._step_count + 1
        if self._step_count == settings.after - 1:  # only during the next step, the last of the warm-up
            self._memory_hooks.enter_context(call_before_phases(self._engine, self._record_state_bytes))
        if self._step_count < settings.after:
            return
        # Reading memory takes time, so it ends before the first timed step.
        self._memory_hooks.close()
        if self._clock is None:
            self._clock = make_clock()
        self._ends.append(self._clock.mark())
        if self._step_count == settings.first:
            self._recorder = Recorder(self._clock, functools.cache(self._hop_of))
            self._recording_hooks.enter_context(attach(self._recorder, self._engine))
        if self._recorder is not None and self._step_count <= settings.first + settings.steps:
            self._recorder.end_step(self._last_global_step)
            if self._step_count == settings.first + settings.steps:
                self._recording_hooks.close()
        if self._step_count > settings.last:
            self._report(self._clock, self._recorder)

    def _record_state_bytes(self) -> None:
        """Record the peak of the bytes of model states."""
        self._state_bytes = max(self._state_bytes, measure_state_bytes(self._engine), key=lambda states: states.total)

    def _hop_of(self, group: ProcessGroup | None) -> str:
        ranks = get_process_group_ranks(dist.get_world_group() if group is None else group)
        topology: Topology | None = getattr(self._engine.optimizer, "topology", None)
        size = ranks_per_node() or dist.get_world_size()
        if topology is not None and topology.all_groups.sizes.ranks == dist.get_world_size():
            size = topology.all_groups.sizes.group_size
        return hop_of(ranks, size)

    def _report(self, clock: Clock, recorder: Recorder | None) -> None:
        assert recorder is not None
        # Restored first: the report's own collectives must not be recorded.
        self._restore_engine()
        steps = recorder.steps()
        seconds = [end - begin for begin, end in itertools.pairwise(map(clock.seconds, self._ends))]
        undisturbed = seconds[:UNRECORDED_STEPS] + seconds[UNRECORDED_STEPS + self._settings.steps :]
        report = build_report(self._engine, steps, undisturbed, self._state_bytes, self._settings.probe)
        if report is not None:
            write_report(report, Path(self._settings.folder))

    def _warn_without_report(self) -> None:
        """Log at the end of an engine or of a process that no report was made."""
        if dist.is_initialized() and dist.get_rank() == 0:
            logger.warning(
                f"deepspeed_ext: no report was written: the training ended after {self._step_count} optimizer steps, "
                f"and a report needs {self._settings.last + 1}: {ReportSettings.key}.after {self._settings.after}, "
                f"then {2 * UNRECORDED_STEPS + self._settings.steps} that are timed or recorded."
            )


# Attaching a recorder ############################################################################

# Methods of DeepSpeed's optimizers, and of ours, in which the training lane handles communication.
_HANDLING = (
    "reduce_ready_partitions_and_remove_grads",
    "overlapping_partition_gradients_reduce_epilogue",
    "reduce_gradients",
    "update_hook_state_and_maybe_run_epilogue",
    "reduce_leaf",  # this and the next one are ours
    "reduce_window",
)
Around = Callable[..., AbstractContextManager[None]]  # takes a method's arguments


@contextmanager
def call_before_phases(engine: Engine, function: Callable[[], None]) -> Iterator[None]:
    """Context in which a function is called before each forward and each update of an engine."""

    @contextmanager
    def call_function(*_: Any) -> Iterator[None]:
        function()
        yield

    with ExitStack() as installed:
        for name in ("_take_model_step", *(() if engine.pipeline_parallelism else ("forward",))):
            _wrap(installed, engine, name, call_function)
        yield


@contextmanager
def attach(recorder: Recorder, engine: Engine) -> Iterator[None]:
    """Context in which the steps of an engine are recorded.

    Args:
        recorder: the recorder to attach.
        engine: the engine that trains.

    Raises:
        RuntimeError: another engine is recorded.
    """
    with ExitStack() as installed:
        installed.enter_context(observers.observed_by(recorder))
        _wrap(installed, engine, "_take_model_step", lambda *_: recorder.phase(UPDATE))
        if engine.pipeline_parallelism:
            _replace(installed, engine, "_INSTRUCTION_MAP", _instructions(recorder, engine))
        else:
            _wrap(installed, engine, "forward", lambda *_: recorder.phase(FORWARD))
            _wrap(installed, engine, "backward", lambda *_: recorder.phase(BACKWARD))
            _attach_to_loss_backward(recorder, engine, installed)
        for name in _HANDLING:
            _wrap(installed, engine.optimizer, name, lambda *_: recorder.handling())
        _attach_to_module_hooks(recorder, engine, installed)
        for name, operation in OPERATIONS.items():
            run = getattr(deepspeed_comm.cdb, name, None)
            if run is not None:
                _replace(installed, deepspeed_comm.cdb, name, record_operation(recorder, name, operation, run))
        if not recorder.clock.on_host:
            _attach_to_streams(recorder, installed)
        yield


def _replace(installed: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute until the stack is closed."""
    attributes = vars(owner)
    installed.callback(setattr, owner, name, attributes[name]) if name in attributes else installed.callback(
        delattr, owner, name
    )
    setattr(owner, name, value)


def _run_inside(method: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around(*args):
            return method(*args, **kwargs)

    return wrapped


def _wrap(installed: ExitStack, owner: Any, name: str, around: Around) -> None:
    """Run a method of an object, if it exists, inside a context, until the stack is closed."""
    method = getattr(owner, name, None)
    if method is not None:
        _replace(installed, owner, name, _run_inside(method, around))


def _instructions(recorder: Recorder, engine: Engine) -> Mapping[type, Callable[..., Any]]:
    """Return a pipeline's instructions, with forward and backward recorded as phases."""
    from deepspeed.runtime.pipe import schedule

    kinds = {schedule.ForwardPass: FORWARD, schedule.BackwardPass: BACKWARD}
    return {
        kind: _run_inside(run, lambda *_, kind=kind: recorder.phase(kinds[kind])) if kind in kinds else run
        for kind, run in engine._INSTRUCTION_MAP.items()
    }


def _attach_to_loss_backward(recorder: Recorder, engine: Engine, installed: ExitStack) -> None:
    """Record ``loss.backward()`` as a phase, too: DeepSpeed's hooks run at its begin and its end."""
    begin, end = engine._backward_prologue, engine._backward_epilogue
    opened = []

    def prologue() -> Any:
        if recorder.open(BACKWARD):
            opened.append(True)
        return begin()

    def epilogue() -> Any:
        result = end()
        # ``engine.backward`` opens and closes the phase itself; only a phase that was opened here is closed here.
        if opened:
            opened.clear()
            recorder.close(BACKWARD)
        return result

    _replace(installed, engine, "_backward_prologue", prologue)
    _replace(installed, engine, "_backward_epilogue", epilogue)


def _attach_to_module_hooks(recorder: Recorder, engine: Engine, installed: ExitStack) -> None:
    """Record the handling in ZeRO's hooks of modules and parameters, and the module for which ZeRO-3 fetches.

    Entire forward hooks are wrapped: besides fetching and releasing, they follow the trace of modules and add nodes to
    the graph. In a backward, autograd runs these nodes, which call methods of ``parameter_offload``.
    """
    optimizer: Any = engine.optimizer
    offload = getattr(optimizer, "parameter_offload", None)
    handles = [*getattr(optimizer, "_grad_acc_hooks", ()), *getattr(optimizer, "_leaf_module_hooks", ())]
    names = {id(module): name or "the model" for name, module in engine.module.named_modules()}

    def handling(module: Any = None, *_: Any) -> AbstractContextManager[None]:
        return recorder.handling(names.get(id(module), ""))

    if offload is not None:
        handles += [*offload.forward_hooks, *offload.backward_hooks]
        for direction in ("forward", "backward"):
            _wrap(
                installed,
                offload,
                f"pre_sub_module_{direction}_function",
                lambda module, *_: recorder.fetching(names.get(id(module), "")),
            )
            _wrap(installed, offload, f"post_sub_module_{direction}_function", handling)
    if recorder.clock.on_host:
        _wrap_hooks(installed, handles, handling)


def _wrap_hooks(installed: ExitStack, handles: Iterable[Any], around: Around) -> None:
    """Run the hooks of these handles, of modules or tensors, inside a context until the stack is closed."""
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            installed.callback(_restore_hook, hooks, handle.id, hooks[handle.id])
            hooks[handle.id] = _run_inside(hooks[handle.id], around)


def _restore_hook(hooks: dict[int, Any], number: int, hook: Any) -> None:
    if number in hooks:  # unless the hook has been removed since
        hooks[number] = hook


def _attach_to_streams(recorder: Recorder, installed: ExitStack) -> None:
    """Record waits of the training stream for other streams. This changes torch's class, and no other class."""
    kind = type(get_accelerator().current_stream())
    wait = kind.wait_event

    def wait_event(self: Any, event: Any) -> Any:
        if not recorder.clock.on_training_lane() or self != get_accelerator().current_stream():
            return wait(self, event)
        begin = recorder.clock.mark()
        result = wait(self, event)
        recorder.waited(begin, None)
        return result

    _replace(installed, kind, "wait_event", wait_event)
