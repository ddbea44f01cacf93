# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT of 10.9 million parameters for 3,000 steps, with ZeRO-2 and with strategies in few bits.

    torchrun --standalone --nproc-per-node 4 -m tests.perf.long_training

A byte-level GPT on the sources of DeepSpeed, in bf16, on 4 ranks in groups of 2. Each method begins from the same
weights and sees the same batches. A run leaves a file, ``results/long_training/METHOD-SEED.json``, with the loss of
every step and losses on held-out text.

Runs that have ended are not repeated. One that was interrupted continues from its last checkpoint, which is in
``--checkpoints``: so the program may be stopped and started again at any time. ``--minutes`` stops it after a
checkpoint; it then says what is left. Ranks may share one GPU.
"""

import argparse
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from scripts.emulation.launching import start_rank
from scripts.examples.gpt import Batches
from scripts.examples.steps import average, train_step
from tests.perf.lib.long_runs import KEPT, METHODS, RANKS, SEEDS, STEPS, LongRun, planned
from tests.perf.lib.long_task import HELD_OUT, MODEL, configuration, fingerprint, make_model, read_text
from tests.perf.lib.records import circumstances

CHUNK = 50  # steps whose losses are averaged over ranks at once
EVALUATE = 250  # steps from one look at held-out text to the next
HELD_OUT_BATCHES = 16  # of each rank


class Trainer:
    """A rank's part of one run.

    Args:
        run: as far as a file has it. It continues from a checkpoint, which may be older.
        text: all of it.
        checkpoints: a folder of this run's alone, or None: nothing is saved.
    """

    def __init__(self, run: LongRun, text: Tensor, checkpoints: Path | None = None) -> None:
        self.run, self._checkpoints, self._saved = run, checkpoints, 0
        model = make_model(run.seed, run.method)
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=configuration(run.method, run.steps)
        )
        cut = round(len(text) * (1 - HELD_OUT))
        length = MODEL["sequence_length"]
        self._batches = Batches(text[:cut], self.engine, length, run.seed)
        self._held_out = Batches(text[cut:], self.engine, length, seed=0)
        if checkpoints is not None:
            self._resume(checkpoints)

    def train(self, until: int) -> None:
        """Take steps until there are so many; at the end of it note losses."""
        begin, losses = time.monotonic(), list[Tensor]()
        for step in range(len(self.run.losses), until):
            losses.append(train_step(self.engine, [self._batches.draw(step)]))
        if losses:
            self.run.losses += self._means(torch.cat(losses))
        self.run.seconds += time.monotonic() - begin

    def evaluate(self) -> None:
        """Note the loss on held-out text."""
        self.engine.eval()
        with torch.no_grad():
            losses = [self.engine(*self._held_out.draw(number)) for number in range(HELD_OUT_BATCHES)]
        self.engine.train()
        self.run.held_out[str(len(self.run.losses))] = average(torch.stack(losses))

    def save(self) -> None:
        """Write a checkpoint, unless there is one of this step, and then remove the one before."""
        count = len(self.run.losses)
        if self._checkpoints is None or count == self._saved:
            return
        self._saved, tag = count, f"step{count}"
        self.engine.save_checkpoint(str(self._checkpoints), tag=tag, client_state={"run": vars(self.run)})
        if dist.get_rank() == 0:
            for folder in self._checkpoints.glob("step*"):
                if folder.name != tag:
                    shutil.rmtree(folder)
        dist.barrier()

    def _resume(self, folder: Path) -> None:
        if not (folder / "latest").exists():
            self.run = replace(self.run, losses=[], held_out={}, parts=[], seconds=0.0)
            return
        _, client = self.engine.load_checkpoint(str(folder))
        self.run.check_same(found := LongRun(**client["run"]), str(folder))
        self.run = found
        self._saved = len(found.losses)

    def _means(self, losses: Tensor) -> list[float]:
        """Return means over ranks."""
        totals = losses.double()
        dist.all_reduce(totals)
        means: list[float] = (totals / dist.get_world_size()).tolist()
        return means


def complete(run: LongRun, text: Tensor, args: argparse.Namespace, end: float) -> LongRun:
    """Train until a run has ended, or the time is over; return it."""
    checkpoints = args.checkpoints / run.name
    trainer = Trainer(run, text, checkpoints)
    trainer.run.parts.append({"from": len(trainer.run.losses), **circumstances(args.commit)})
    while not trainer.run.done and not _agreed(time.monotonic() > end):
        count = len(trainer.run.losses)
        trainer.train(min(run.steps, count + CHUNK))
        count = len(trainer.run.losses)
        if count % EVALUATE == 0 or trainer.run.done:
            trainer.evaluate()
        if dist.get_rank() == 0:
            trainer.run.write(args.folder)
            rate = trainer.run.seconds / count
            print(f"{run.name}: step {count}, loss {trainer.run.losses[-1]:.4f}, {rate:.3f} s a step", flush=True)
        if count % args.save_every == 0 and not trainer.run.done:
            trainer.save()
    if not trainer.run.done:
        trainer.save()
    trainer.engine.destroy()
    if trainer.run.done and dist.get_rank() == 0:
        shutil.rmtree(checkpoints, ignore_errors=True)
    return trainer.run


def _agreed(value: bool) -> bool:
    """Return the first rank's value."""
    found: list[Any] = [value]
    dist.broadcast_object_list(found, src=0)
    return bool(found[0])


def begin(method: str, seed: int, steps: int, text: Tensor, folder: Path) -> LongRun:
    """Return a run as its file has it, or a new one.

    Raises:
        ValueError: the file is of a run with another text, with other steps, or on another device.
    """
    kind = get_accelerator().device_name()
    device = torch.cuda.get_device_name() if kind == "cuda" else kind
    run = LongRun(method, seed, fingerprint(text), steps, device)
    path = folder / f"{run.name}.json"
    if not path.exists():
        return run
    run.check_same(found := LongRun.read(path), str(path))
    return found


def enter() -> None:
    """Join the other ranks, over gloo; all share the first GPU where there are more ranks than GPUs."""
    if get_accelerator().device_name() != "cpu" and get_accelerator().device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ["LOCAL_RANK"] = "0"
        get_accelerator().set_device(0)
        dist.init_process_group("cpu:gloo,cuda:gloo")
        deepspeed.init_distributed()
    else:
        start_rank()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then, after a checkpoint")
    parser.add_argument("--save-every", type=int, default=5 * CHUNK, help=f"steps; a multiple of {CHUNK}")
    parser.add_argument("--folder", type=Path, default=KEPT, help="where runs leave their files")
    parser.add_argument("--checkpoints", type=Path, default=Path("build", "long_training"))
    parser.add_argument("--commit", default="", metavar="REVISION", help="what this is a copy of")
    args = parser.parse_args()
    if args.save_every < 1 or args.save_every % CHUNK:
        parser.error(f"--save-every must be a positive multiple of {CHUNK}, got {args.save_every}")
    if int(os.environ.get("WORLD_SIZE", "0")) != RANKS:
        parser.error(f"expected {RANKS} ranks: torchrun --standalone --nproc-per-node {RANKS} -m {__spec__.name}")
    return args


def main() -> None:
    args = parse_arguments()
    end = time.monotonic() + 60 * args.minutes
    enter()
    text = read_text()
    runs = [begin(method, seed, args.steps, text, args.folder) for method, seed in planned(args.methods, args.seeds)]
    for run in runs:
        if run.done:
            shutil.rmtree(args.checkpoints / run.name, ignore_errors=True)  # it may have ended as it was stopped
    left = [run for run in runs if not run.done]
    while left and complete(left[0], text, args, end).done:
        del left[0]
    if dist.get_rank() == 0:
        print(f"left: {', '.join(run.name for run in left) or 'nothing'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
