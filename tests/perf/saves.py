# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves: for how long they stop the training, at once and beside it, and what steps take meanwhile.

    python -m tests.perf.saves --csv tests/perf/results/saves.csv

Two emulated nodes of two ranks (``scripts/emulation``) train a model in bf16 with fp32 states of Adam. Its blocks
sleep in the place of their compute, so that two cores do not decide how long a step is. For each strategy an engine
is made, saves with each section ``checkpoint`` in turn, and is closed. DeepSpeed's stages 2 and 3 save by its own
engines: torch's, and stage 3 by those of its writers that run on a CPU, too. Rounds alternate their order.

A turn of an asynchronous save is: undisturbed steps; the save; steps until it is committed. The seconds of a save are
those of ``save_checkpoint`` on the rank that is last. It stops the training for these, and for as long as the steps
after it wait for its copies, as timed inside ``AsyncSaves.at_step``. A step beside the writer is one in which it was
at work on some rank; it is compared with the undisturbed steps of its turn. The first save of an engine, which makes
the host buffers, counts by itself.

Each save goes to the real disk, and to a slow one (``lib/disk.py``). DeepSpeed's saves return while their bytes are in
the page cache; ours, synchronous or not, have flushed them to the disk when they say that they are done.

Needs root, and ``ip`` and ``tc`` of iproute2. One launch for each setting, of some ten minutes on two cores.

Exit status 0 if a save in the order of ranks stops the training for at most a tenth of a synchronous one, steps beside
it take at most 1.05 of undisturbed ones, and host buffers are those of the formula; 1 if not; 2 if it could not run.
"""

import argparse
import contextlib
import functools
import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from torch import Tensor
from tqdm import tqdm

from deepspeed_ext.checkpoint import asynchronous
from deepspeed_ext.checkpoint.asynchronous import AsyncSaves
from scripts.emulation.network import Link
from tests.perf.lib import verdict
from tests.perf.lib.blocks import Pauses
from tests.perf.lib.disk import Disk
from tests.perf.lib.peers import Batch, Engine, Ours, Workload
from tests.perf.lib.save_rows import (
    METHODS,
    REAL,
    SETTINGS,
    SIZES,
    SLOW,
    STAGES,
    SaveRow,
    SaveSetting,
    missed,
    problems,
    table,
)
from tests.perf.lib.settings import add_arguments, require_positive, run_what_is_promised
from tests.perf.lib.side_by_side import WARM_UP_STEPS
from tests.perf.lib.turns import cpu_times, give_back_memory, over_ranks

ROWS = 1  # of a micro-batch
BACKWARD = 2.0  # seconds of backward for each of forward


# What runs in the ranks ###########################################################################


class Worker:
    """What a rank needs to measure one setting."""

    def __init__(self, setting: SaveSetting, args: argparse.Namespace) -> None:
        self._setting, self._args = setting, args
        self._pauses, self._disk, self._link = Pauses(), Disk(), Link()
        self._folder, self._tag = _shared_folder(args.folder), 0
        self._rows: dict[tuple[str, str], SaveRow] = {}

    def rows(self) -> list[SaveRow]:
        """Measure."""
        bases = list(dict.fromkeys(METHODS[name].base for name in self._args.methods))
        bar = tqdm(total=self._args.rounds * len(bases), desc=self._setting.name, disable=dist.get_rank() != 0)
        try:
            with self._disk.between():
                for number in range(self._args.rounds):
                    for base in random.Random(number).sample(bases, len(bases)):
                        self._measure(number, base)
                        bar.update()
        finally:
            if dist.get_rank() == 0:
                shutil.rmtree(self._folder, ignore_errors=True)
        return list(self._rows.values())

    def _measure(self, number: int, base: str) -> None:
        """Make an engine, and give each way to save its turns."""
        self._link.limit(None)
        self._pauses.forward = self._pauses.backward = 0.0
        dist.barrier()
        os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}  # DeepSpeed's writers want what its launcher sets
        trained = self._make(base)
        for _ in range(WARM_UP_STEPS):
            trained.step(self._batches())
            trained.finish()
        self._pauses.forward = self._setting.pause / self._setting.accumulation / SIZES[self._setting.size][0] / 3
        self._pauses.backward = BACKWARD * self._pauses.forward
        self._link.limit(self._setting.mbit)
        names = [name for name in self._args.methods if METHODS[name].base == base]
        for name in random.Random(number).sample(names, len(names)):
            turn = Turns(self, trained, name)
            for disk in [disk for disk in self._args.disks if disk == REAL or not METHODS[name].decoupled]:
                row = self._row(name, disk, trained.setup)
                self._disk.megabytes = self._setting.slow if disk == SLOW else None
                if disk == self._args.disks[0]:
                    row.first.append(turn.first())
                for _ in range(self._args.saves):
                    turn.take(row)
            turn.end()
        trained.close()
        del trained, turn
        gc.collect()
        give_back_memory()

    def _make(self, base: str) -> Engine:
        make_model = functools.partial(self._setting.make_model, self._pauses)
        workload = Workload(
            self._setting.accumulation,
            self._setting.ranks_per_node,
            make_model,
            config={"bf16": {"enabled": True}, "communication_data_type": "bf16"},
        )
        if base in STAGES:
            return Engine(workload, base, STAGES[base], lean=STAGES[base]["stage"] == 3)
        return Ours(workload, {"paro_strategy": base, "paro_group_size": self._setting.ranks_per_node})

    def _row(self, name: str, disk: str, setup: str) -> SaveRow:
        megabytes = self._setting.slow if disk == SLOW else None
        more = f"; checkpoint {dict(METHODS[name].checkpoint)}"
        fresh = SaveRow(self._setting.name, self._setting.mbit, name, setup + more, disk=disk, megabytes=megabytes)
        return self._rows.setdefault((name, disk), fresh)

    def _batches(self) -> list[Batch]:
        width = SIZES[self._setting.size][1]
        rows: Tensor = torch.randn(self._setting.accumulation, 2, ROWS, width, dtype=torch.bfloat16)
        return [(inputs, targets) for inputs, targets in rows]

    def step(self, trained: Engine) -> float:
        """Take a step with what it leaves under way; return its seconds on the rank that is last."""
        batches = self._batches()
        dist.barrier()
        begin = time.perf_counter()
        trained.step(batches)
        trained.finish()
        return over_ranks([time.perf_counter() - begin], dist.ReduceOp.MAX)[0]

    def save(self, trained: Engine) -> tuple[float, float, float]:
        """Save under a new tag.

        Returns:
            Seconds on the rank that is last, bytes that a node sent meanwhile, and when this rank began.
        """
        if dist.get_rank() == 0:
            os.sync()  # what earlier saves have left in the page cache
        self._tag += 1
        dist.barrier()
        before = self._link.sent()
        dist.barrier()
        begin = time.perf_counter()
        trained.engine.save_checkpoint(str(self._folder), tag=f"save{self._tag}")
        (seconds,) = over_ranks([time.perf_counter() - begin], dist.ReduceOp.MAX)
        (sent,) = over_ranks([self._link.sent() - before], dist.ReduceOp.SUM)
        return seconds, sent / self._setting.nodes, begin

    def remove(self) -> None:
        """Remove the last save."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder / f"save{self._tag}")

    @property
    def steps(self) -> int:
        """Undisturbed ones before a save."""
        return int(self._args.steps)


class Turns:
    """Saves of one engine in one way.

    Args:
        worker: of this rank.
        trained: the engine.
        name: of the method, a key of ``METHODS``.
    """

    def __init__(self, worker: Worker, trained: Engine, name: str) -> None:
        self._worker, self._trained, self._method = worker, trained, METHODS[name]
        configure(trained.engine, dict(self._method.checkpoint))
        self._waited = self._cpu = 0.0
        self._aside: AsyncSaves | None = getattr(trained.engine.checkpoint_engine, "aside", None)
        waits = (self._aside, "at_step") if self._aside else (trained.engine, "_commit_decoupled_checkpoint")
        setattr(*waits, self._timed(getattr(*waits)))
        self._waits = waits
        self._counting = mock.patch.object(asynchronous, "_written", self._counted(asynchronous._written))
        self._counting.start()

    def _timed(self, wait: Any) -> Any:
        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> None:
            begin = time.perf_counter()
            wait(*args, **kwargs)
            self._waited += time.perf_counter() - begin

        return timed

    def _counted(self, written: Any) -> Any:
        """Return what a writer does, such that its thread's seconds of a core are counted."""

        @functools.wraps(written)
        def counted(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return written(*args)
            finally:
                self._cpu += time.thread_time() - begin

        return counted

    def first(self) -> float:
        """Take the first save; return its seconds."""
        seconds, *_ = self._worker.save(self._trained)
        self._finish()
        return seconds

    def take(self, row: SaveRow) -> None:
        """Take a turn, and put it down."""
        stolen, total = cpu_times()
        self._cpu = 0.0
        undisturbed = [self._worker.step(self._trained) for _ in range(self._worker.steps)] if self._aside else []
        seconds, sent, begin = self._worker.save(self._trained)
        row.seconds.append(seconds)
        row.link_bytes += (sent - row.link_bytes) / len(row.seconds)
        row.waits.append(0.0)
        if self._aside is not None:
            self._beside(row, undisturbed, begin)
        elif self._method.decoupled:
            self._step(row)
        self._finish()
        later, total_later = cpu_times()
        row.stolen.append((later - stolen) / max(1, total_later - total))
        row.load.append(os.getloadavg()[0])

    def _step(self, row: SaveRow) -> float:
        """Take a step after a save, and put down how long it has waited; return its seconds."""
        self._waited = 0.0
        seconds = self._worker.step(self._trained)
        row.waits[-1] += over_ranks([self._waited], dist.ReduceOp.MAX)[0]
        return seconds

    def _beside(self, row: SaveRow, undisturbed: list[float], begin: float) -> None:
        """Take steps until the save is committed."""
        aside = self._aside
        assert aside is not None
        ended: list[float] = []
        watcher = threading.Thread(target=_watch, args=(aside._job, ended), daemon=True)
        watcher.start()
        beside: list[float] = []
        while not beside or _somewhere_at_work(aside):
            beside.append(self._step(row))
        watcher.join()
        row.cpu += over_ranks([self._cpu], dist.ReduceOp.SUM)
        usual = statistics.median(undisturbed)
        row.steps += undisturbed
        row.beside += [step / usual for step in beside]
        row.lost.append(sum(beside) - len(beside) * usual)
        (behind,) = over_ranks([ended[0] - begin], dist.ReduceOp.MAX)
        row.behind.append(behind)
        (row.buffers,) = over_ranks([float(aside.buffers.nbytes)], dist.ReduceOp.MAX)

    def _finish(self) -> None:
        if self._aside is not None:
            self._aside.finish()
        elif self._method.decoupled:
            self._trained.engine._commit_decoupled_checkpoint()
        self._worker.remove()
        give_back_memory()

    def end(self) -> None:
        """Give the host buffers back, and end the process or the process groups of whatever writes."""
        engine, (owner, name) = self._trained.engine, self._waits
        vars(owner).pop(name)
        self._counting.stop()
        if engine.checkpoint_engine.is_decoupled():
            engine.checkpoint_engine.cleanup()
        if self._aside is not None:
            for held in ("before_step", "before_change"):
                vars(engine.optimizer).pop(held, None)
            vars(engine.optimizer.resync).pop("before_asking", None)
        configure(engine, {})
        give_back_memory()


def configure(engine: Any, section: dict[str, Any]) -> None:
    """Make an engine save as with another section ``checkpoint``. Collective."""
    config = engine._config
    config._param_dict["checkpoint"] = section
    config.checkpoint_config = get_checkpoint_config(config._param_dict)
    engine._configure_checkpointing()


def _somewhere_at_work(aside: AsyncSaves) -> bool:
    """Return whether some rank's writer is at work. Collective."""
    job = aside._job
    return over_ranks([float(job is not None and not job.over)], dist.ReduceOp.MAX)[0] > 0


def _watch(job: Any, ended: list[float]) -> None:
    """Put down when a job has ended; who waits for it is told why it failed."""
    with contextlib.suppress(Exception):
        job.wait()
    ended.append(time.perf_counter())


def _shared_folder(below: Path | None) -> Path:
    """Return a new folder that all ranks know. Collective."""
    made = [tempfile.mkdtemp(prefix="saves", dir=below) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, 0)
    return Path(made[0])


# What starts them #################################################################################


def print_rows(rows: Sequence[SaveRow]) -> None:
    """Print a table of a disk, as the page has it."""
    header, lines = table(rows)
    load = statistics.median(one for row in rows for one in row.load)
    print(f"\n{rows[0].setting}, {rows[0].disk} disk; load {load:.1f}")
    for _, name, *cells in [header, *lines]:
        print(f"{name:<30}" + "".join(f"{cell:>18}" for cell in cells))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time saves at once and beside the training.")
    add_arguments(parser, "saves", SETTINGS, list(METHODS))
    parser.add_argument("--disks", nargs="+", choices=(REAL, SLOW), default=[REAL, SLOW], metavar="NAME")
    parser.add_argument("--folder", type=Path, help="where to save, by default as temporary files")
    parser.add_argument("--rounds", type=int, default=2, help="engines of each kind")
    parser.add_argument("--saves", type=int, default=2, help="of each engine, method and disk, after the first one")
    parser.add_argument("--steps", type=int, default=3, help="undisturbed ones before a save")
    args = parser.parse_args()
    require_positive(parser, args, "rounds", "saves", "steps")
    return args


def main() -> int:
    args = parse_arguments()
    return run_what_is_promised(
        args,
        __spec__.name,
        SETTINGS,
        SaveRow,
        lambda: Worker(SETTINGS[args.setting], args).rows(),
        lambda rows: verdict.print_each(rows, lambda row: row.disk, print_rows, problems),
        missed,
    )


if __name__ == "__main__":
    sys.exit(main())
