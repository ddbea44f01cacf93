# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""End runs in every way, again and again, as well as runs of stock DeepSpeed, and count how their processes end.

Two ranks train a few steps, and end while updated parameters of the last step may be under way: one of the ranks
begins to apply it later than the other. A rank is a fork of a process that has imported torch and DeepSpeed, and ends
as a script does: by Python's own finalization. Stock runs in a second process, in which the package is off.

Exit status 0 if every process ended as that kind of end should, 1 if not. ``--load`` also runs busy loops.
"""

import argparse
import atexit
import collections
import contextlib
import gc
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.emulation.launching import environment, free_port
from tests.harness import calls

# Of ours the third has least to wait for itself, the last two everything that may be under way.
_LAYER = {"stage3_param_persistence_threshold": 0, "sub_group_size": 300}
_AHEAD = {"paro_strategy": "NIG", "paro_group_size": 1, "paro_overlap_updates": True, "allgather_bucket_size": 400}
OURS: dict[str, dict[str, Any]] = {
    "IIG": {"paro_strategy": "IIG", "paro_group_size": 1, "stage": 3, **_LAYER},
    "ING": {"paro_strategy": "ING", "paro_group_size": 1, "stage": 3, **_LAYER},
    "NIG": {"paro_strategy": "NIG", "paro_group_size": 1},
    "NIG, updates ahead": _AHEAD,
    "NIG, all": {**_AHEAD, "zeropp_loco_param": {"err_beta": 0.8}, "paro_quantized_updates": {"bits": 4}},
}
STOCK: dict[str, dict[str, Any]] = {"stage 2": {"stage": 2}, "stage 3": {"stage": 3, **_LAYER}}

# How the processes of two ranks may end: status of rank 0, of rank 1. A negative one is a signal.
_BOTH = (0, 0)
KINDS: dict[str, tuple[str, set[tuple[int, int]]]] = {
    "end": ("the script ends", {_BOTH}),
    "evaluated": ("the script ends right after an evaluation, or destroys the process groups first", {_BOTH}),
    "destroy": ("destroy_process_group(), and the script ends", {_BOTH}),
    "read": ("rank 0 reads the updated model, rank 1 calls destroy_process_group() and ends", {_BOTH}),
    "exit": ("sys.exit(3) on all ranks", {(3, 3)}),
    "error on all": ("an exception on all ranks", {(1, 1)}),
    "error on one": ("an exception on rank 1, while rank 0 goes on", {(1, 1)}),
    "interrupted": ("SIGINT to all ranks, at any time", {(-2, -2), (-2, 1), (1, -2)}),
    "killed late": ("SIGKILL to the rank that takes the last step later, when the other one has ended", {(1, -9)}),
    "killed late, destroyed": ("the same, and that one has called destroy_process_group()", {(1, -9)}),
    "killed": ("SIGKILL to rank 1, at any time", {(1, -9)}),
}
_WEIGHTS, _ALIVE = "weights read:", "alive at the end:"
_LIMIT = 60.0  # seconds that a run may take


@dataclass(frozen=True)
class Case:
    """A run."""

    kind: str
    strategy: str  # name of the section in ``OURS`` or ``STOCK``
    late: float = 0.0  # seconds that a rank begins to apply the last step later than the other
    late_rank: int = 0
    moment: float = 0.0  # seconds after the beginning of the last step, of a signal
    first: bool = False  # whether the error that ends a run is raised before its last step
    save: str = ""  # "well" or "fails": the script ends during an asynchronous save, which succeeds or fails on rank 1


@dataclass(frozen=True)
class Ended:
    """The end of a run."""

    statuses: tuple[int, int]  # statuses of the ranks' processes
    seconds: float  # from the end of the first process to that of the last one
    written: str  # output of the ranks
    saved: bool = False  # whether there is a checkpoint

    @property
    def weights(self) -> str | None:
        """A hash of what rank 0 has read, if it has."""
        match = re.search(rf"{_WEIGHTS} (\w+)", self.written)
        return match and match.group(1)

    @property
    def alive(self) -> list[str]:
        """Threads of ours that were alive when the interpreter was torn down."""
        return re.findall(rf"{_ALIVE} (.*)", self.written)


class _IsRank(BaseException):
    """Run as a rank: skip all further code of the process from which it was forked."""

    def __init__(self, case: Case, rank: int, saves: Path) -> None:
        self.case, self.rank, self.saves = case, rank, saves


def draw(kind: str, strategy: str, seed: object) -> Case:
    chance = random.Random(str(seed))
    late = chance.choice((0.0, 0.0, chance.uniform(0, 0.4)))
    if kind.startswith("killed late"):
        return Case(kind, strategy, 2.0, 1)
    return Case(kind, strategy, late, chance.randrange(2), chance.uniform(0, 0.3), chance.random() < 0.5)


def run(case: Case) -> Ended:
    """Run the ranks of a case, in processes that are forked from this one, and wait for them."""
    port, folder = free_port(), Path(tempfile.mkdtemp())  # not a context: ranks leave this function, too
    log = folder / "log"
    ranks = {_fork(case, rank, port, log): rank for rank in range(2)}
    statuses, ends, begin = [0, 0], [], time.monotonic()
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            ends.append(time.monotonic())
        elif time.monotonic() > begin + _LIMIT:
            for remaining in ranks:
                os.kill(remaining, signal.SIGKILL)
        else:
            time.sleep(0.002)
    written, saved = log.read_text(errors="replace"), (folder / "saves" / "latest").exists()
    shutil.rmtree(folder, ignore_errors=True)
    return Ended((statuses[0], statuses[1]), ends[-1] - ends[0], written, saved)


def _fork(case: Case, rank: int, port: int, log: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
    raise _IsRank(case, rank, log.with_name("saves"))


def train(case: Case, rank: int, saves: Path) -> None:
    """Be a script of a user's: train, and end as the case says."""
    import deepspeed
    import torch

    atexit.register(_say_what_is_alive)  # before the package's own, so it runs after that
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {**OURS, **STOCK}[case.strategy],
        "zero_allow_untested_optimizer": True,
        **({"checkpoint": {"async_save": True}} if case.save else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        if step == 2:
            if rank == case.late_rank:
                _delay(optimizer, case.late, case.kind.startswith("killed late"))
            _end_early(case, rank)
        engine.backward(engine(torch.randn(2, 16)).square().mean())
        engine.step()
    if case.save:
        _save(case, rank, engine, saves)
    _end(case, rank, engine)


def _save(case: Case, rank: int, engine: Any, folder: Path) -> None:
    from deepspeed_ext.checkpoint.snapshots import Snapshot

    def late(_: Snapshot) -> None:
        time.sleep(0.5)
        if case.save == "fails" and rank == 1:
            raise OSError(28, "No space left on device")

    calls.before(Snapshot, "complete_copies", late).start()
    engine.save_checkpoint(folder)


def _say_what_is_alive() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("deepspeed_ext"):
            print(_ALIVE, thread.name)


def _delay(optimizer: Any, seconds: float, killed: bool) -> None:
    """Let the optimizer step later, or be killed instead."""

    def late(*_: Any, **__: Any) -> None:
        time.sleep(seconds)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)

    calls.before(optimizer, "step", late).start()


def _end_early(case: Case, rank: int) -> None:
    if case.kind == "interrupted":
        _signal_later(signal.SIGINT, case.moment)
    elif case.kind == "killed" and rank == 1:
        _signal_later(signal.SIGKILL, case.moment)
    if case.first:
        _end_with_an_error(case, rank)


def _signal_later(number: int, seconds: float) -> None:
    """Make another process send the signal, because a thread of this one could keep it from ending."""
    target = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
        os._exit(0)


def _end_with_an_error(case: Case, rank: int) -> None:
    if case.kind == "error on all" or (case.kind == "error on one" and rank == 1):
        raise ValueError("the script's own")
    if case.kind == "exit":
        sys.exit(3)


def _end(case: Case, rank: int, engine: Any) -> None:
    """End the script after its last step."""
    import torch

    _end_with_an_error(case, rank)
    if case.kind == "evaluated":
        with torch.inference_mode(case.moment > 0.15), torch.no_grad():
            for _ in range(4):
                engine(torch.randn(2, 16))
    if case.kind == "read" and rank == 0:
        print(_WEIGHTS, _digest(engine.module))
    destroys = case.kind in ("destroy", "killed late, destroyed") or (case.kind == "evaluated" and case.first)
    if destroys or (case.kind == "read" and rank == 1):
        torch.distributed.destroy_process_group()
    if case.kind in ("error on one", "interrupted", "killed"):
        for _ in range(200):  # until that comes, or what it leads to
            torch.distributed.barrier()
            time.sleep(0.1)


def _digest(model: Any) -> str:
    """Return a hash of a model's parameters, read without the other rank."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


@contextlib.contextmanager
def load(loops: int) -> Iterator[None]:
    """Keep the machine busy, at most until this process ends."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(loops)]
    try:
        yield
    finally:
        for item in busy:
            item.kill()


def served(cases: Sequence[Case], stock: bool = False) -> list[Ended]:
    """Run cases in a process that ranks are forked from; ``stock`` is whether the package is off there."""
    off = {"DEEPSPEED_EXT_DISABLE": "1"} if stock else {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.campaigns.endings", "--serve"],
        env={**environment(), **off},
        input="\n".join(json.dumps(asdict(case)) for case in cases),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [Ended(tuple(row["statuses"]), row["seconds"], row["written"], row["saved"]) for row in rows]


def _serve() -> None:
    import deepspeed
    import deepspeed.ops.op_builder.all_ops  # as ranks of tests: what each rank would import for itself
    import deepspeed.runtime.zero.muon.muon_optimizer  # imports the compiler, which takes long
    import torch

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a compiled all-reduce, which is not tested here
    if "DEEPSPEED_EXT_DISABLE" not in os.environ:
        from deepspeed_ext.loco.ops import load_kernels

        load_kernels()  # or the first rank would build them
    gc.freeze()  # or the end of each rank would visit all that is imported here
    for line in sys.stdin.read().splitlines():
        print(json.dumps(asdict(run(Case(**json.loads(line))))), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100, help="runs of each kind")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--load", type=int, default=0, help="busy loops beside")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # be what ranks are forked from
    return parser.parse_args()


def _collect(args: argparse.Namespace) -> int:
    """Print a row for each kind of end; return how many runs of ours did not end as they should."""
    wrong, first = [], dict[str, str | None]()
    print(f"{'kind':22} {'of':6} {'runs':>5} {'seconds between ends: median, most':>36}  statuses")
    for kind, stock in itertools.product(args.kinds, (False, True)):
        names = [name for name in (STOCK if stock else OURS) if (kind, name) != ("read", "stage 3")]  # a gather
        drawn = [draw(kind, names[n % len(names)], (args.seed, kind, n)) for n in range(args.number)]
        runs = list(zip(drawn, served(drawn, stock), strict=True))
        counted = collections.Counter(ended.statuses for _, ended in runs)
        seconds = sorted(ended.seconds for _, ended in runs)
        answer = ", ".join(f"{statuses} x {count}" for statuses, count in counted.most_common())
        row = f"{kind:22} {'stock' if stock else 'ours':6} {len(runs):5}"
        print(f"{row} {seconds[len(runs) // 2]:27.2f} {seconds[-1]:8.2f}  {answer}", flush=True)
        for case, ended in () if stock else runs:
            other = kind == "read" and ended.weights != first.setdefault(case.strategy, ended.weights)
            if ended.statuses not in KINDS[kind][1] or ended.alive or other:
                wrong.append(case)
                print(case, ended.statuses, ended.seconds, ended.written[-2000:], sep="\n")
    return len(wrong)


def main() -> None:
    args = _arguments()
    if args.serve:
        _serve()
        return
    with load(args.load):
        wrong = _collect(args)
    print(f"{wrong} run(s) of ours did not end as they should")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    rank: _IsRank | None = None
    try:
        main()
    except _IsRank as forked:
        rank = forked
    if rank is not None:  # outside of the handler, so that nothing but the script's own exception is seen
        train(rank.case, rank.rank, rank.saves)
