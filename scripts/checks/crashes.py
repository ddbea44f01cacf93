# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Kill a rank while it saves, again and again: the run must always go on, to the bit.

A reference run of each strategy trains without interruption. Then launches of the same training, one after another:
each loads the checkpoint that ``latest`` names, goes on, and saves; in that save one rank, any, is killed by SIGKILL
at a moment between the begin of the save and a little after its end. What is loaded and each step from there on are
compared with the reference by hashes of all weights and moments. Every second kill strikes a save under the tag
"last", over the checkpoint that ``latest`` names.

Exit status 0 if all was equal, 1 if something was not, 2 if a run failed otherwise than by the kill.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.strategy import STRATEGIES
from scripts.checks.steps import average
from scripts.checks.training import Training
from scripts.emulation.launching import RunFailed, add_options, exit_on_signals, launch, parse, start_rank

MODEL = {"dim": 384, "layers": 4, "heads": 4, "sequence_length": 32}
BUCKETS = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000, "sub_group_size": 300_000}
STEPS = 2  # of a launch
SAME_TAG = "last"
LATEST_MOMENT = 1.1  # of a kill, in durations of a save


@dataclass
class CrashPlan:
    """What one launch does.

    Attributes:
        folder: of the checkpoints of all strategies, and of what the ranks report.
        strategies: whose runs go on, or are the references.
        group_size: ranks in a group.
        steps: of the references; 0 to go on.
        tag: of the save that is killed; None for a new one.
        victim: the rank that is killed; None for none.
        delay: seconds from the begin of the save to the kill.
    """

    folder: str
    strategies: Sequence[str]
    group_size: int
    steps: int = 0
    tag: str | None = None
    victim: int | None = None
    delay: float = 0.0


@dataclass
class Kill:
    """A save in which a rank was killed, and how the next launch went on."""

    number: int
    strategy: str
    tag: str
    rank: int
    moment: float  # in durations of a save
    before: int  # step of the checkpoint that ``latest`` named when the save began
    saved: int  # step of the save
    published: bool
    resumed: int = -1
    equal: bool = False

    @property
    def passed(self) -> bool:
        """Whether the run went on from where it had to, and as the reference did."""
        return self.equal and self.resumed == (self.saved if self.published else self.before)

    def __str__(self) -> str:
        return (
            f"{self.number:>4}  {self.strategy:<8}  {self.tag:<4}  {self.rank:>4}  {self.moment:>6.2f}  "
            f"{self.before:>13}  {self.saved:>10}  {'yes' if self.published else 'no':>9}  {self.resumed:>12}  "
            f"{'yes' if self.passed else 'NO':>5}"
        )


# What runs in the ranks ###########################################################################


class Worker:
    """What a rank does of a plan. Its reports are lines of JSON, written as they come: a kill ends the launch."""

    def __init__(self, plan: CrashPlan) -> None:
        self._plan = plan
        self._folder = Path(plan.folder)

    def record(self, name: str) -> None:
        """Train the reference; save under a new tag, then twice over it."""
        training = self._start(name)
        steps = [self._step(training, number) for number in range(self._plan.steps)]
        seconds = []
        for _ in range(3):
            dist.barrier()
            begin = time.perf_counter()
            training.engine.save_checkpoint(self._folder / "reference" / name, SAME_TAG)
            seconds.append(time.perf_counter() - begin)
        training.engine.destroy()
        self._report("references", strategy=name, steps=steps, seconds=statistics.median(seconds))

    def go_on(self, name: str) -> None:
        """Load what there is, and compare; then train and compare, and be killed in a save, if that is the plan."""
        expected = next(r["steps"] for r in read_reports(self._folder / "references") if r["strategy"] == name)
        training = self._start(name)
        training.engine.load_checkpoint(self._folder / name)
        begin = training.engine.global_steps
        equal = begin == 0 or _hash(training) == expected[begin - 1]["states"]
        self._report("verdicts", strategy=name, step=begin, equal=equal)
        for number in range(begin, begin + STEPS):
            if self._plan.tag == SAME_TAG and number == begin + STEPS - 1:
                training.engine.save_checkpoint(self._folder / name, SAME_TAG)  # what the kill must leave
            equal = self._step(training, number) == expected[number]
            self._report("verdicts", strategy=name, step=number + 1, equal=equal)
        if self._plan.victim is not None:
            self._save_and_die(training, self._folder / name)
        training.engine.destroy()

    def _save_and_die(self, training: Training, folder: Path) -> None:
        """Save; meanwhile one rank is killed: by another process, since a thread may wait for a native call."""
        killer = None
        dist.barrier()
        if dist.get_rank() == self._plan.victim:
            kill = f"sleep {self._plan.delay:.4f}; date +%s.%N > {self._folder / 'killed'}; kill -9 {os.getpid()}"
            killer = subprocess.Popen(["sh", "-c", kill], start_new_session=True)
        try:
            training.engine.save_checkpoint(folder, self._plan.tag)
        except Exception as error:  # of the kill if it comes after it
            with (self._folder / "errors").open("a") as file:
                file.write(json.dumps({"time": time.time(), "error": repr(error)}) + "\n")
            raise
        if killer is not None:
            killer.wait()

    def _start(self, name: str) -> Training:
        return Training(MODEL, {**BUCKETS, "paro_strategy": name, "paro_group_size": self._plan.group_size})

    def _step(self, training: Training, number: int) -> dict[str, Any]:
        """Train a step: what it leaves. On the first rank; the others have no hash."""
        (loss,) = training.run([number])
        return {"loss": average(torch.tensor(loss)), "states": _hash(training)}

    def _report(self, name: str, **fields: Any) -> None:
        if dist.get_rank() == 0:
            with (self._folder / name).open("a") as file:
                file.write(json.dumps(fields) + "\n")


def _hash(training: Training) -> str:
    """Hash all weights and moments, on the first rank. Collective."""
    states, digest = training.states(), hashlib.sha256()
    for name in sorted(states) if dist.get_rank() == 0 else ():
        digest.update(states[name].numpy())
    return digest.hexdigest()


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Return what ranks have reported in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def work(path: Path) -> None:
    """Live as a rank: do what the plan says."""
    start_rank()
    plan = CrashPlan(**json.loads(path.read_text()))
    worker = Worker(plan)
    for name in plan.strategies:
        (worker.record if plan.steps else worker.go_on)(name)
    dist.destroy_process_group()


# What starts them #################################################################################


class Killing:
    """Launches of the runs of all strategies, in turn."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._random = random.Random(args.seed)
        self._pending: dict[str, Kill] = {}  # strategy: the kill that its next launch goes on from

    def kills(self) -> Iterator[Kill]:
        """Kill; each is yielded when the run has gone on."""
        args, strategies = self._args, self._args.strategies
        steps = STEPS * (2 + args.kills // len(strategies))
        self._launch(CrashPlan(str(self._folder), strategies, args.group_size, steps=steps))
        self.seconds = {r["strategy"]: r["seconds"] for r in read_reports(self._folder / "references")}
        for number in range(args.kills):
            name = strategies[number % len(strategies)]
            tag = SAME_TAG if number // len(strategies) % 2 else None
            victim, moment = self._random.randrange(args.ranks), self._random.uniform(0, LATEST_MOMENT)
            self._launch(
                CrashPlan(str(self._folder), [name], args.group_size, 0, tag, victim, moment * self.seconds[name])
            )
            yield from self._resumed(name)
            begin, *_, (end, _) = self._verdicts(name)
            before = end - 1 if tag == SAME_TAG else begin[0]
            published = _published_step(self._folder / name) == end
            self._pending[name] = Kill(number + 1, name, tag or "new", victim, moment, before, end, published)
        self._launch(CrashPlan(str(self._folder), list(self._pending), args.group_size))
        for name in list(self._pending):
            yield from self._resumed(name)

    def _resumed(self, name: str) -> Iterator[Kill]:
        """Complete and yield the kill before this launch."""
        kill = self._pending.pop(name, None)
        if kill is not None:
            (kill.resumed, _), *_ = verdicts = self._verdicts(name)
            kill.equal = all(equal for _, equal in verdicts)
            yield kill

    def _verdicts(self, name: str) -> list[tuple[int, bool]]:
        """Step and whether it is equal, of the last launch: what was loaded, then what was trained."""
        verdicts = read_reports(self._folder / "verdicts")
        return [(v["step"], v["equal"]) for v in verdicts if v["strategy"] == name][-1 - STEPS :]

    def _launch(self, plan: CrashPlan) -> None:
        """Run the plan; exits with status 2 if that fails otherwise than by the kill."""
        killed, errors, path = (self._folder / name for name in ("killed", "errors", "plan.json"))
        for left in (killed, errors):
            left.unlink(missing_ok=True)
        path.write_text(json.dumps(asdict(plan)))
        begin = time.monotonic()
        try:
            launch(__spec__.name, ["--worker", str(path)], self._args.ranks, self._args.log, self._args.timeout)
        except RunFailed as failure:
            late = time.monotonic() - begin >= self._args.timeout
            moment = float(killed.read_text()) if killed.exists() else 0.0
            # Errors that come after the kill come of it.
            if late or not moment or any(error["time"] < moment for error in read_reports(errors)):
                print(failure, file=sys.stderr)
                sys.exit(2)


def _published_step(folder: Path) -> int | None:
    """Return the steps of the checkpoint that ``latest`` names; None if there is none."""
    latest = folder / "latest"
    files = sorted((folder / latest.read_text()).glob("*_model_states.pt")) if latest.exists() else []
    return torch.load(files[0], mmap=True, weights_only=False)["global_steps"] if files else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill training runs while they save.")
    parser.add_argument("--kills", type=int, default=20, help="of all strategies together")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["NIG", "IIG", "III"], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0, help="decides which ranks are killed, and when")
    add_options(parser, "crashes.log", 300)
    args = parse(parser)
    if args.worker is not None:
        work(args.worker)
        return 0
    exit_on_signals()
    print(f"{args.ranks} ranks in groups of {args.group_size}; the moment of a kill in durations of a save")
    print("kill  strategy  tag   rank  moment  latest before  step saved  published  resumed from  equal", flush=True)
    kills = []
    with tempfile.TemporaryDirectory() as folder:
        killing = Killing(args, Path(folder))
        for kill in killing.kills():
            kills.append(kill)
            print(kill, flush=True)
    wrong = sum(not kill.passed for kill in kills)
    seconds = ", ".join(f"{name} {duration:.2f} s" for name, duration in killing.seconds.items())
    print(
        f"a save takes {seconds}. Of {len(kills)} saves whose rank was killed {sum(k.published for k in kills)} had "
        f"been published; {f'{wrong} runs FAILED to go on' if wrong else 'all runs went on, bitwise as the reference'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
