# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which steps of an engine are recorded: it counts them, and does nothing else until their turn comes.

Note [Recorded steps]
    After a warm-up come steps that are only timed, then those that are recorded, then as many again that are only
    timed: the difference is what recording costs. Then all ranks make the report together, at the end of a step, where
    they all are. From then on the engine is as it was. Where somebody has wrapped our methods since, they stay, and do
    nothing but call the engine's.
"""

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.utils import log_dist, logger
from torch.distributed import ProcessGroup, get_process_group_ranks

from deepspeed_ext.clocks import Clock, make_clock
from deepspeed_ext.comm.process_groups import Topology, ranks_per_node
from deepspeed_ext.config.report import AROUND, KEY, ReportSettings
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.model_bytes import held
from deepspeed_ext.strategy import StateBytes
from deepspeed_ext.tools.report.hooks import looked_at, recorded_by
from deepspeed_ext.tools.report.made import make, write
from deepspeed_ext.tools.report.recorder import Recorder
from deepspeed_ext.tools.report.recording import hop_of

_reporter: "_Reporter | None" = None  # of the engine of this process that is reported on


def report_on(engine: Engine, settings: ReportSettings) -> None:
    """Record steps of an engine, and report on them. Of several engines at a time it is the first one.

    Args:
        engine: whose steps are counted from now on.
        settings: which are recorded.
    """
    global _reporter
    if _reporter is not None:
        log_dist("deepspeed_ext: only the first engine of this process is reported on", ranks=[0])
        return
    _reporter = _Reporter(engine, settings)


class _Reporter:
    """Counts the steps of one engine; see Note [Recorded steps]."""

    def __init__(self, engine: Engine, settings: ReportSettings) -> None:
        self._engine, self._settings = weakref.proxy(engine), settings
        self._counted = "train_batch" if engine.pipeline_parallelism else "step"
        self._taken, self._known = 0, engine.global_steps
        self._clock: Clock | None = None
        self._ends: list[Any] = []  # of the steps that are timed or recorded
        self._recorder: Recorder | None = None
        self._looking, self._recording = ExitStack(), ExitStack()
        self._held = StateBytes(0, 0, 0)
        self._ended = False
        # By the method's name: what is in its place, weakly, since that refers to the engine; and whether it replaces
        # one that was put on the engine, and not its class's.
        self._wrappers: dict[str, tuple[weakref.ref[Any], bool]] = {}
        self._wrap(engine, self._counted, self._counting(engine, getattr(engine, self._counted)))
        self._wrap(engine, "destroy", self._destroying(engine.destroy))
        atexit.register(self._tell)

    def _wrap(self, engine: Engine, name: str, ours: Callable[..., Any]) -> None:
        self._wrappers[name] = weakref.ref(ours), name in vars(engine)
        setattr(engine, name, ours)

    def _counting(self, engine: Engine, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes steps, such that they are counted."""

        @functools.wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if not self._ended and engine.global_steps != self._known:
                self._known = engine.global_steps
                self._after_step()
            return result

        return counted

    def _destroying(self, destroy: Callable[..., Any]) -> Callable[..., Any]:
        """Return what destroys the engine, such that nothing is recorded from then on."""

        @functools.wraps(destroy)
        def destroyed(*args: Any, **kwargs: Any) -> Any:
            if not self._ended:
                self._end()
                self._tell()
            return destroy(*args, **kwargs)

        return destroyed

    def _end(self) -> None:
        """Leave the engine as it was, but for what others have put on it since."""
        global _reporter
        _reporter, self._ended = None, True
        self._looking.close()
        self._recording.close()
        for name, (ours, replaced) in self._wrappers.items():
            found = vars(self._engine).get(name)
            if found is not ours() or found is None:
                continue
            if replaced:
                setattr(self._engine, name, found.__wrapped__)
            else:
                delattr(self._engine, name)
        atexit.unregister(self._tell)

    def _after_step(self) -> None:
        settings = self._settings
        self._taken += 1
        if self._taken == settings.after - 1:  # the last step that is not timed
            self._looking.enter_context(looked_at(self._engine, self._look))
        if self._taken < settings.after:
            return
        self._looking.close()
        if self._clock is None:
            self._clock = make_clock()
        self._ends.append(self._clock.mark())
        if self._taken == settings.first:
            self._begin(self._clock)
        elif self._recorder is not None and self._taken <= settings.first + settings.steps:
            self._recorder.step_ends(self._engine.global_steps)
            if self._taken == settings.first + settings.steps:
                self._recording.close()
        if self._taken > settings.last:
            self._report()

    def _begin(self, clock: Clock) -> None:
        self._recorder = Recorder(clock, functools.cache(self._hop_of))
        self._recording.enter_context(recorded_by(self._recorder, self._engine))
        self._recorder.step_ends(self._engine.global_steps)

    def _look(self) -> None:
        """Called before each forward and each update of a step; keeps the moment at which most is held."""
        self._held = max(self._held, held(self._engine), key=lambda states: states.total)

    def _hop_of(self, group: ProcessGroup | None) -> str:
        ranks = get_process_group_ranks(dist.get_world_group() if group is None else group)
        topology: Topology | None = getattr(self._engine.optimizer, "topology", None)
        size = ranks_per_node() or dist.get_world_size()
        if topology is not None and topology.whole.sizes.ranks == dist.get_world_size():
            size = topology.whole.sizes.group_size
        return hop_of(ranks, size)

    def _report(self) -> None:
        engine, recorder, clock = self._engine, self._recorder, self._clock
        assert recorder is not None and clock is not None
        self._end()
        steps = recorder.steps()
        lasted = [later - one for one, later in itertools.pairwise(clock.seconds(end) for end in self._ends)]
        undisturbed = lasted[:AROUND] + lasted[AROUND + self._settings.steps :]
        report = make(engine, steps, undisturbed, self._held, self._settings.probe)
        if report is not None:
            write(report, Path(self._settings.folder))

    def _tell(self) -> None:
        """Called at the end of an engine, or of a process, for which no report was made."""
        if dist.is_initialized() and dist.get_rank() == 0:
            logger.warning(
                f"deepspeed_ext: there is no report: the training ended after {self._taken} optimizer steps, and the "
                f"report needs {self._settings.last + 1} ({KEY}.after {self._settings.after}, and "
                f"{2 * AROUND + self._settings.steps} around and with those that are recorded)."
            )
