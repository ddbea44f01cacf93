# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures synchronous and asynchronous saves: how long they stop training, and the duration of steps meanwhile.

Blocks sleep instead of computing, so that two cores do not determine the duration of a step. A turn of an asynchronous
save consists of undisturbed steps, the save, and steps until it is committed. It stops training for
``save_checkpoint`` on the last rank, and while later steps wait in ``AsyncSaves.before_step``. Each save is written to
the real disk, and to an emulated slow one, where a file takes the time of its bytes at a rate. DeepSpeed's saves
return while their bytes are in the page cache; ours have flushed them to the disk.
"""

import contextlib
import functools
import gc
import os
import random
import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from tqdm import tqdm

from deepspeed_ext.checkpoint import digests
from deepspeed_ext.checkpoint.asynchronous import AsyncSaves
from deepspeed_ext.strategy import STRATEGIES, Placement
from tests.harness.snapshots import on_first_rank, shared_folder
from tests.perf.lib import settings, tabulated
from tests.perf.lib.blocks import make_sleeping_blocks
from tests.perf.lib.measurements import BACKWARD, Measurement
from tests.perf.lib.peers import Batch, Engine, Ours, Workload
from tests.perf.lib.records import Row, Table, spread
from tests.perf.lib.settings import SAVE_SECTIONS, SIZES, Setting
from tests.perf.lib.turns import Turns, cpu_times, give_back_memory, over_ranks

REAL, SLOW = "real", "slow"  # disks
PAUSE = {"25M": (1.0, 10.0), "200M": (2.0, 40.0)}  # seconds of a step's emulated compute; MB/s of a rank's slow disk


class Disk:
    """The disk of this rank; ``megabytes`` are written per second, None: without a limit."""

    megabytes: float | None = None

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """Put the disk between this process and its files: all engines write by ``torch.save``."""
        with mock.patch.object(torch, "save", self._slow(torch.save)):
            yield

    def _slow(self, save: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(save)
        def slow(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            begin = time.perf_counter()
            save(obj, f, *args, **kwargs)
            if self.megabytes is not None:
                time.sleep(max(0.0, os.path.getsize(f) / (self.megabytes * 1e6) - (time.perf_counter() - begin)))

        return slow


class SavesMeasurement(Measurement):
    """Saves of strategies and of DeepSpeed's stages."""

    file = "saves.csv"
    settings = settings.SAVES
    sections: ClassVar = SAVE_SECTIONS
    methods = tuple(sections)
    rounds, steps = 2, 3
    saves = 2  # of each engine, method and disk, after the first one
    critical, beside = 0.10, 1.05  # of a synchronous save; of an undisturbed step: at most
    buffers_bound = 0.01  # of the formula, beside a few scalars

    def measure(self) -> list[Row]:
        self.turns, self._disk, self._tag = Turns(self.setting.ranks_per_node, self.batches), Disk(), 0
        self._rows: dict[tuple[str, str], Row] = {}
        self._lists: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        bases = list(dict.fromkeys(base_of(name) for name in self.names))
        bar = tqdm(total=self.args.rounds * len(bases), desc=self.setting.name, disable=dist.get_rank() != 0)
        with shared_folder() as self._folder, self._disk.between():
            for number in range(self.args.rounds):
                for base in random.Random(number).sample(bases, len(bases)):
                    self._measure(number, base)
                    bar.update()
        for row in self._rows.values():
            lists = self._lists[id(row)]
            for name in ("wait_seconds", "until_committed_seconds", "step_seconds", "beside"):
                row.more |= spread(name, lists[name])
            stops = [save + wait for save, wait in zip(row.steps, lists["wait_seconds"], strict=True)]
            row.more |= {"critical_seconds": statistics.median(stops), "steps_beside": len(lists["beside"])}
            row.more["buffer_formula_bytes"] = round(self.buffers(self.setting, row.method))
        return list(self._rows.values())

    def _measure(self, number: int, base: str) -> None:
        self.turns.limit(None)
        self.pauses.forward = self.pauses.backward = 0.0
        trained = self._make(base)
        self.turns.warm_up(trained, watch=False)
        pause, megabytes = PAUSE[self.setting.size]
        self.pauses.forward = pause / self.setting.accumulation / SIZES[self.setting.size][0] / (1 + BACKWARD)
        self.pauses.backward = BACKWARD * self.pauses.forward
        self.turns.limit(self.setting.mbit[0])
        names = [name for name in self.names if base_of(name) == base]
        for name in random.Random(number).sample(names, len(names)):
            with _without_digests() if "without" in name else contextlib.nullcontext():
                self._measure_saves(trained, name, megabytes)
        trained.close()
        del trained
        gc.collect()
        give_back_memory()

    def _measure_saves(self, trained: Engine, name: str, megabytes: float) -> None:
        saver = _Saver(self, trained, self.sections[name])
        self._disk.megabytes = None
        saver.first()
        for disk in (REAL, SLOW):
            setup = f"{trained.setup}; checkpoint {self.sections[name]}"
            columns = {"disk": disk, "buffer_bytes": 0}
            new_row = Row(self.setting.name, self.setting.mbit[0], name, setup, more=columns)
            row = self._rows.setdefault((name, disk), new_row)
            self._disk.megabytes = megabytes if disk == SLOW else None
            row.more["slow_megabytes"] = self._disk.megabytes
            for _ in range(self.saves):
                saver.take(row)
        saver.end()

    def _make(self, base: str) -> Engine:
        blocks, width, hidden = SIZES[self.setting.size]
        model = functools.partial(make_sleeping_blocks, blocks, width, hidden, self.pauses, torch.bfloat16)
        config = {"bf16": {"enabled": True}, "communication_data_type": "bf16"}
        workload = Workload(self.setting.accumulation, self.setting.ranks_per_node, model, config=config)
        if base in STRATEGIES:
            return Ours(workload, {"paro_strategy": base, "paro_group_size": self.setting.ranks_per_node})
        return Engine(workload, base, {"stage": int(base[-1])}, lean=base == "ZeRO-3")

    def list_of(self, row: Row, name: str) -> list[float]:
        return self._lists[id(row)][name]

    def batches(self, step: int) -> list[Batch]:
        rows = torch.randn(self.setting.accumulation, 2, 1, self.width, dtype=torch.bfloat16)
        return [(inputs, targets) for inputs, targets in rows]

    def step(self, trained: Engine) -> float:
        """Take a step with what it leaves under way; return its seconds on the rank that is last."""
        batches = self.batches(0)
        dist.barrier()
        begin = time.perf_counter()
        trained.step(batches)
        trained.finish()
        return over_ranks([time.perf_counter() - begin], dist.ReduceOp.MAX)[0]

    def save(self, trained: Engine) -> tuple[float, float, float]:
        """Save under a new tag; return seconds on the last rank, bytes that a node sent, and when this rank began."""
        if dist.get_rank() == 0:
            os.sync()  # what earlier saves have left in the page cache
        self._tag += 1

        def save() -> tuple[float, float]:
            begin = time.perf_counter()
            trained.engine.save_checkpoint(self._folder, tag=f"save{self._tag}")
            return over_ranks([time.perf_counter() - begin], dist.ReduceOp.MAX)[0], begin

        (seconds, begin), sent = self.turns.counted(save)
        return seconds, sent / self.setting.nodes, begin

    def remove(self) -> None:
        on_first_rank(shutil.rmtree, f"{self._folder}/save{self._tag}")

    @classmethod
    def buffers(cls, setting: Setting, method: str) -> float:
        """Return the bytes of host buffers of the rank that has most: its shard of states; with p = N also weights."""
        if not cls.sections[method].get("async_save"):
            return 0.0
        strategy = STRATEGIES[base_of(method)]
        parameters = setting.states.parameters / 4
        shards = {Placement.N: 1, Placement.I: setting.ranks_per_node, Placement.G: setting.sizes.ranks}[strategy.os]
        return parameters * (12 / shards + (2 if strategy.p == Placement.N else 0))

    @classmethod
    def problems(cls, rows: Sequence[Row]) -> list[str]:
        due = {row.method: cls.buffers(cls.settings[row.setting], row.method) for row in rows}
        return [
            f"{row.method} has {row.more['buffer_bytes']:,.0f} bytes of host buffers, not {due[row.method]:,.0f}"
            for row in rows
            if abs(row.more["buffer_bytes"] - due[row.method]) > cls.buffers_bound * due[row.method] + 1
        ]

    @classmethod
    def table(cls, rows: Sequence[Row]) -> Table:
        return tabulated.saves(rows)

    @classmethod
    def missed(cls, rows: Sequence[Row]) -> list[str]:
        """Return the asynchronous saves, in the order of ranks, that stop or slow down training too much."""
        messages = []
        for row in (row for row in rows if "asynchronous" in row.method):
            where, share = f"{row.setting}, {row.more['disk']} disk: {row.method}", tabulated.stopped_share(row, rows)
            if (share or 0.0) > cls.critical:
                messages.append(f"{where} stops for {share:.1%} of a synchronous save, not {cls.critical:.0%}")
            if (row.more.get("beside_median") or 0.0) > cls.beside:
                messages.append(f"{where}: steps beside it take {row.more['beside_median']:.3f}, not {cls.beside}")
        return messages


@contextlib.contextmanager
def _without_digests() -> Iterator[None]:
    @contextlib.contextmanager
    def recording(path: str, rank: int) -> Iterator[None]:
        yield
        digests.write_entry(path, digests.Entry(0, "", rank))

    with mock.patch.object(digests, "recording", recording):
        yield


def base_of(method: str) -> str:
    return method.partition(",")[0]


class _Saver:
    """Saves of one engine with one section ``checkpoint``."""

    def __init__(self, ranks: SavesMeasurement, trained: Engine, section: dict[str, Any]) -> None:
        self._ranks, self._trained, self._waited = ranks, trained, 0.0
        configure(trained.engine, dict(section))
        self._aside: AsyncSaves | None = getattr(trained.engine.checkpoint_engine, "async_saves", None)
        if self._aside is not None:
            vars(self._aside)["before_step"] = self._timed(self._aside.before_step)

    def _timed(self, wait: Any) -> Any:
        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> None:
            begin = time.perf_counter()
            wait(*args, **kwargs)
            self._waited += time.perf_counter() - begin

        return timed

    def first(self) -> None:
        self._ranks.save(self._trained)
        self._finish()

    def take(self, row: Row) -> None:
        stolen, total = cpu_times()
        count = self._ranks.args.steps if self._aside else 0
        undisturbed = [self._ranks.step(self._trained) for _ in range(count)]
        seconds, sent, begin = self._ranks.save(self._trained)
        waits = self._ranks.list_of(row, "wait_seconds")
        waits.append(0.0)
        if self._aside is not None:
            waits[-1] = self._beside(row, self._aside, undisturbed, begin)
        self._finish()
        later, total_later = cpu_times()
        row.add((later - stolen) / max(1, total_later - total), [seconds], sent)

    def _beside(self, row: Row, aside: AsyncSaves, undisturbed: list[float], begin: float) -> float:
        """Take steps until the save is committed; return how long they have waited for its copies."""
        values_of = functools.partial(self._ranks.list_of, row)
        ended: list[float] = []
        watcher = threading.Thread(target=_watch, args=(aside._job, ended), daemon=True)
        watcher.start()
        beside: list[float] = []
        waited = 0.0
        while not beside or _somewhere_at_work(aside):
            self._waited = 0.0
            beside.append(self._ranks.step(self._trained))
            waited += over_ranks([self._waited], dist.ReduceOp.MAX)[0]
        watcher.join()
        values_of("step_seconds").extend(undisturbed)
        values_of("beside").extend(step / statistics.median(undisturbed) for step in beside)
        values_of("until_committed_seconds").extend(over_ranks([ended[0] - begin], dist.ReduceOp.MAX))
        (row.more["buffer_bytes"],) = over_ranks([float(aside.buffers.nbytes)], dist.ReduceOp.MAX)
        return waited

    def _finish(self) -> None:
        if self._aside is not None:
            self._aside.finish()
        self._ranks.remove()
        give_back_memory()

    def end(self) -> None:
        engine = self._trained.engine
        if self._aside is not None:
            vars(self._aside).pop("before_step")
            engine.optimizer.context.readers.clear()
        configure(engine, {})
        give_back_memory()


def configure(engine: Any, section: dict[str, Any]) -> None:
    """Make an engine save as with another section ``checkpoint``. Collective."""
    config = engine._config
    config._param_dict["checkpoint"] = section
    config.checkpoint_config = get_checkpoint_config(config._param_dict)
    engine._configure_checkpointing()


def _somewhere_at_work(aside: AsyncSaves) -> bool:
    """Return whether any rank's writer is still running. Collective."""
    return over_ranks([float(aside._job is not None and not aside._job.is_done)], dist.ReduceOp.MAX)[0] > 0


def _watch(job: Any, ended: list[float]) -> None:
    """Record the time when a job has ended; the optimizer, which waits for it, raises its error."""
    with contextlib.suppress(Exception):
        job.wait()
    ended.append(time.perf_counter())
