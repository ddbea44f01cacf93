# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Save with every strategy, and hold what comes back against what was saved: to the bit.

First each strategy alone: a resumed run against the uninterrupted one, the weights that DeepSpeed's own tools make of
a checkpoint, how much a rank writes, and how much memory a save takes. Then universal checkpoints, converted by
DeepSpeed's own tool: from each strategy and stage to each other one, and to other numbers of ranks.

Exit status 0 if all is exact and within bounds, 1 if something is not, 2 if a run failed.
"""

import argparse
import contextlib
import ctypes
import io
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tqdm import tqdm

from deepspeed_ext.strategy import STRATEGIES, GroupSizes
from scripts.checks.training import Snapshot, Training
from scripts.emulation.launching import add_options, exit_on_signals, launch_workers, parse, start_rank

STOCK = ("1", "2", "3")
ALL = (*STRATEGIES, *STOCK)
SHARD_BOUND = 0.05
PICKLE_BYTES = 50_000  # names, shapes and hyperparameters
PEAK_BOUND = 0.5  # of the states of the whole optimizer: nobody may gather them
SMALL = {"dim": 128, "layers": 1, "heads": 4, "sequence_length": 32}
LARGE = {"dim": 512, "layers": 3, "heads": 4, "sequence_length": 32}
# Several buckets and sub-groups of each parameter group.
SMALL_ZERO = {"reduce_bucket_size": 60_000, "allgather_bucket_size": 60_000, "sub_group_size": 20_000}
LARGE_ZERO = {"reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000, "sub_group_size": 2_000_000}
CONVERTER = {"num_extract_workers": 1, "num_merge_workers": 1, "strict": True, "inject_missing_state": True}
# Saved by, loaded by: with another number of ranks.
PAIRS = [("NIG", "IIG"), ("IIG", "GGG"), ("GGG", "NNG"), ("III", "ING"), ("2", "NIG"), ("NIG", "3")]


@dataclass
class CheckpointRow:
    """A strategy's checkpoints at one number of ranks: differences, files, and MB."""

    strategy: str
    resumed: float
    zero_to_fp32: float
    save_16bit: float
    files: int  # of optimizer states
    shards: int  # number of different pieces of the optimizer's states
    written: float  # the largest of the files
    peak: float | None  # what a save adds to the resident memory of a rank; None where the kernel does not tell
    states: float  # of the whole optimizer

    @property
    def out_of_bounds(self) -> list[str]:
        """Return what is out of bounds."""
        wrong = [name for name in ("resumed", "zero_to_fp32", "save_16bit") if getattr(self, name) != 0]
        due = self.states / self.shards
        if self.files != self.shards:
            wrong.append("files")
        if not due <= self.written <= (1 + SHARD_BOUND) * due + PICKLE_BYTES / 1e6:
            wrong.append("written")
        if self.peak is not None and self.peak > PEAK_BOUND * self.states:
            wrong.append("peak")
        return wrong


@dataclass
class UniversalLoad:
    """A universal checkpoint that another strategy or stage loads, and what differs then."""

    saved: str
    loaded: str
    before: tuple[int, int]  # ranks and ranks of a group
    after: tuple[int, int]
    different: dict[str, float] = field(default_factory=dict)


@dataclass
class SavingPlan:
    """What one launch does."""

    folder: str
    dtype: str
    sizes: tuple[int, int]  # ranks and ranks of a group, for what is saved
    rows: Sequence[str] = ()
    sources: Sequence[str] = ()
    loads: Sequence[UniversalLoad] = ()


# What runs in the ranks ###########################################################################


def placed(name: str, group_size: int) -> dict[str, Any]:
    """Return the keys of a strategy, or of a stage of DeepSpeed's own."""
    return {"stage": int(name)} if name in STOCK else {"paro_strategy": name, "paro_group_size": group_size}


def mark(training: Training, index: int) -> None:
    """Change what training leaves as the seed and the configuration set it: a load that forgets it will show."""
    with deepspeed.zero.GatheredParameters(list(training.model.position_embedding.parameters()), modifier_rank=0):
        training.model.position_embedding.weight.data.mul_(1.5 + index / 16)
    for group in training.engine.optimizer.param_groups:
        group["weight_decay"] += 0.01 * (1 + index)


def snapshot(training: Training, client_state: dict[str, int]) -> Snapshot:
    """Return all that is saved, by name; numbers as tensors. Collective."""
    seen = training.states()
    parameters = dict(training.model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        seen.update({f"{name} model": parameter.detach().clone() for name, parameter in parameters.items()})
    seen.update({f"{name} buffer": buffer.clone() for name, buffer in training.model.named_buffers()})
    optimizer = training.engine.optimizer
    for number, group in enumerate(optimizer.param_groups):
        numbers = [group["lr"], group["weight_decay"], group["eps"], *group["betas"]]
        seen[f"hyperparameters {number}"] = torch.tensor(numbers, dtype=torch.float64)
    steps = [torch.as_tensor(state["step"]).float() for state in optimizer.optimizer.state.values()]
    seen["step counts"] = torch.stack(steps).unique()
    seen["scheduler"] = torch.tensor(training.engine.lr_scheduler.last_batch_iteration)
    seen["counters"] = torch.tensor([training.engine.global_steps, training.engine.global_samples])
    seen["client state"] = torch.tensor(client_state["index"])
    return seen


def differences(one: Snapshot, two: Snapshot) -> dict[str, float]:
    """Return the largest difference over all ranks of what differs; infinite where it is missing. Collective."""
    found = {}
    for name in one.keys() | two.keys():
        if name not in one or name not in two or one[name].shape != two[name].shape:
            found[name] = torch.inf
        elif not torch.equal(a := one[name].double(), b := two[name].double()):
            found[name] = (a - b).abs().nan_to_num(torch.inf, torch.inf).max().item()
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    return {name: max(other.get(name, 0.0) for other in everybody) for other in everybody for name in other}


def largest_of(found: dict[str, float]) -> float:
    return max(found.values(), default=0.0)


def convert(folder: Path) -> None:
    """Run DeepSpeed's converter on the first rank. Collective."""
    if dist.get_rank() == 0:
        source = folder / (folder / "latest").read_text()
        arguments = argparse.Namespace(input_folder=str(source), output_folder=f"{source}_universal", **CONVERTER)
        arguments.keep_temp_folder = False
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ds_to_universal.main(arguments)
    dist.barrier()


def rise_of_memory(act: Callable[[], Any]) -> float | None:
    """Return the MB that the act adds to this process's memory, at most; None where the kernel does not tell."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back would serve the act unseen
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        act()
        return None
    before = _memory("VmRSS")
    act()
    return _memory("VmHWM") - before


def _memory(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024 / 1e6


class Worker:
    """What a rank does of a plan."""

    def __init__(self, plan: SavingPlan) -> None:
        self._plan = plan

    def rows(self) -> Iterator[CheckpointRow]:
        """Save with each strategy; converted and kept for loads."""
        for name in self._plan.rows:
            training, saved = self.save(name)
            folder = self._folder(name, self._plan.sizes)
            exported, halved = self._exported(training, folder, saved)
            losses = training.run(range(3, 5))
            whole = {**snapshot(training, {"index": ALL.index(name)}), "losses": torch.tensor(losses)}
            training.engine.destroy()
            training = self._start(name, self._plan.sizes[1])
            _, client_state = training.engine.load_checkpoint(folder)
            losses = training.run(range(3, 5))
            again = {**snapshot(training, client_state), "losses": torch.tensor(losses)}
            resumed = largest_of(differences(whole, again))
            training.engine.destroy()
            yield CheckpointRow(name, resumed, exported, halved, **self._cost(name))

    def save(self, name: str) -> tuple[Training, Snapshot]:
        """Train, save, convert, and keep what was saved beside it."""
        training = self._start(name, self._plan.sizes[1])
        mark(training, ALL.index(name))
        training.run(range(3))
        client_state, folder = {"index": ALL.index(name)}, self._folder(name, self._plan.sizes)
        training.engine.save_checkpoint(folder, client_state=client_state)
        saved = snapshot(training, client_state)
        if dist.get_rank() == 0:
            torch.save(saved, folder / "snapshot.pt")
        convert(folder)
        return training, saved

    def load(self) -> Iterator[UniversalLoad]:
        """Load what others have saved; an engine for each that loads, which trains a step in between."""
        for (name, size), loads in itertools.groupby(self._plan.loads, lambda load: (load.loaded, load.after[1])):
            training = self._start(name, size, universal=True)
            for load in loads:
                folder = self._folder(load.saved, load.before)
                _, client_state = training.engine.load_checkpoint(folder)
                saved = torch.load(folder / "snapshot.pt", mmap=True)
                load.different = differences(saved, snapshot(training, client_state))
                if load.before[0] != load.after[0]:
                    load.different.pop("counters", None)  # samples of a step go by the number of ranks
                training.run([7])
                yield load
            training.engine.destroy()

    def _start(self, name: str, group_size: int, universal: bool = False) -> Training:
        zero = {**SMALL_ZERO, **placed(name, group_size)}
        return Training(SMALL, zero, self._plan.dtype, universal, ALL.index(name))

    def _folder(self, name: str, sizes: Sequence[int]) -> Path:
        return Path(self._plan.folder, f"{sizes[0]}", name)

    def _exported(self, training: Training, folder: Path, saved: Snapshot) -> tuple[float, float]:
        """Return how far the weights that zero_to_fp32 and save_16bit_model write are from what was saved."""
        training.engine.save_16bit_model(folder, "weights.bin")
        dist.barrier()
        model, buffers, fp32 = (
            {key.split(" ")[0]: value for key, value in saved.items() if key.endswith(kind)}
            for kind in (" model", " buffer", " fp32")
        )
        found = differences({**model, **buffers, **fp32}, get_fp32_state_dict_from_zero_checkpoint(str(folder)))
        return largest_of(found), largest_of(differences({**model, **buffers}, torch.load(folder / "weights.bin")))

    def _cost(self, name: str) -> dict[str, Any]:
        """Measure what a save of a larger model writes, and takes of memory."""
        training = Training(LARGE, {**LARGE_ZERO, **placed(name, self._plan.sizes[1])}, self._plan.dtype)
        training.run([0])
        folder = Path(self._plan.folder, "large")
        peak = rise_of_memory(lambda: training.engine.save_checkpoint(folder))
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        written = [path.stat().st_size / 1e6 for path in folder.glob("*/*_optim_states.pt")]
        training.engine.destroy()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return {
            "files": len(written),
            "shards": GroupSizes(*self._plan.sizes).shards(STRATEGIES[name].os),
            "written": max(written),
            "peak": None if None in peaks else max(peaks),
            "states": 12 * training.trained / 1e6,
        }


def work(path: Path) -> None:
    """Live as a rank: do what the plan says, and report."""
    first = start_rank()
    plan = SavingPlan(**json.loads(path.read_text()))
    plan.loads = [UniversalLoad(**load) for load in plan.loads]
    worker = Worker(plan)
    rows = list(tqdm(worker.rows(), "strategies", len(plan.rows), disable=not first))
    for name in tqdm(plan.sources, "sources", disable=not first):
        worker.save(name)[0].engine.destroy()
    loads = list(tqdm(worker.load(), "loads", len(plan.loads), disable=not first))
    if first:
        path.write_text(json.dumps({"rows": [asdict(row) for row in rows], "loads": [asdict(load) for load in loads]}))
    dist.destroy_process_group()


# What starts them #################################################################################


def matrix(sizes: tuple[int, int]) -> list[UniversalLoad]:
    """Return all pairs but those that DeepSpeed loads alone: into a plain stage, parameters sharded as before."""
    sharded = {"3", *(name for name in STRATEGIES if name[0] != "N")}
    own = [(a, b) for a, b in itertools.product(ALL, STOCK) if (a in sharded) == (b in sharded)]
    # Each that loads begins with its own checkpoint: not all with the same.
    ordered = ((ALL[(i + j) % len(ALL)], loaded) for i, loaded in enumerate(ALL) for j in range(len(ALL)))
    return [UniversalLoad(saved, loaded, sizes, sizes) for saved, loaded in ordered if (saved, loaded) not in own]


def pairs(before: tuple[int, int], *after: tuple[int, int]) -> list[UniversalLoad]:
    return [UniversalLoad(saved, loaded, before, sizes) for sizes in after for saved, loaded in PAIRS]


def run(args: argparse.Namespace) -> tuple[list[CheckpointRow], list[UniversalLoad]]:
    """Launch each number of ranks in turn; exits with status 2 if that fails."""
    here, more = (args.ranks, args.group_size), (args.ranks + args.group_size, args.group_size)
    sources = list(dict.fromkeys(saved for saved, _ in PAIRS))
    rows, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        for sizes, plan in (
            (here, SavingPlan(folder, args.dtype, here, rows=list(STRATEGIES), sources=STOCK, loads=matrix(here))),
            (more, SavingPlan(folder, args.dtype, more, sources=sources, loads=pairs(here, more))),
            ((2, 1), SavingPlan(folder, args.dtype, (2, 1), loads=pairs(here, (2, 1), (2, 2)))),
            (here, SavingPlan(folder, args.dtype, here, loads=pairs(more, here))),
        ):
            path = Path(folder) / "plan.json"
            path.write_text(json.dumps(asdict(plan)))
            launch_workers(__spec__.name, path, args, sizes[0])
            report = json.loads(path.read_text())
            rows += [CheckpointRow(**row) for row in report["rows"]]
            loads += [UniversalLoad(**load) for load in report["loads"]]
    return rows, loads


def print_rows(rows: Sequence[CheckpointRow], args: argparse.Namespace) -> None:
    """Print a line for each strategy."""
    print(
        f"{args.ranks} ranks in groups of {args.group_size}, {args.dtype} with Adam: largest differences; of a larger "
        f"model the files of optimizer states,\nthe largest of them in MB, and MB that a save adds to a rank's memory"
    )
    titles = ("resumed", "zero_to_fp32", "16 bit", "files / due", "optimizer shard / due", "peak / whole states")
    print(f"{'':<6}" + "".join(f"{title:>{len(title) + 3}}" for title in titles))
    for row in rows:
        exact = f"{row.resumed:>10g}{row.zero_to_fp32:>15g}{row.save_16bit:>9g}{row.files:>8} /{row.shards:>4}"
        peak = "-" if row.peak is None else f"{row.peak:.1f}"
        shard = f"{row.written:>13.2f} /{row.states / row.shards:>9.2f}"
        verdict = f"out of bounds: {', '.join(row.out_of_bounds)}" if row.out_of_bounds else "ok"
        print(f"{row.strategy:<6}{exact}{shard}{peak:>13} /{row.states:>7.1f}  {verdict}")
    print(f"bounds: differences 0, shard +{SHARD_BOUND:.0%}, peak {PEAK_BOUND:.0%} of the whole optimizer's states\n")


def print_loads(loads: Sequence[UniversalLoad]) -> None:
    """Print a matrix of the loads at the same number of ranks, a table of the others, and what differs."""
    print("universal checkpoints, from the rows to the columns; '.': DeepSpeed's own loads of its own")
    print(f"{'':<5}" + "".join(f"{name:>6}" for name in ALL))
    here = {(load.saved, load.loaded): load for load in loads if load.before[0] == load.after[0]}
    for saved in ALL:
        cells = (f"{largest_of(here[saved, b].different):.1g}" if (saved, b) in here else "." for b in ALL)
        print(f"{saved:<5}" + "".join(f"{cell:>6}" for cell in cells))
    moved = [load for load in loads if load.before[0] != load.after[0]]
    moves = dict.fromkeys((*load.before, *load.after) for load in moved)
    titles = (f"{n} ({n // m}x{m}) to {after} ({after // size}x{size})" for n, m, after, size in moves)
    print("\nto other numbers of ranks (groups x ranks of a group)\n" + " " * 8 + "".join(f"{t:>20}" for t in titles))
    for pair in PAIRS:
        found = (largest_of(load.different) for load in moved if (load.saved, load.loaded) == pair)
        print(f"{pair[0]:>3}-{pair[1]:<4}" + "".join(f"{value:>20.1g}" for value in found))
    for load in (load for load in loads if load.different):
        print(f"different: {load}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every strategy's checkpoints on this machine's CPU.")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of forward and backward")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    add_options(parser, "checkpoints.log", 900)
    args = parse(parser)
    if args.worker is not None:
        work(args.worker)
        return 0
    exit_on_signals()
    rows, loads = run(args)
    print_rows(rows, args)
    print_loads(loads)
    if args.json is not None:
        report = {"strategies": [asdict(row) for row in rows], "universal": [asdict(load) for load in loads]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    wrong = sum(bool(row.out_of_bounds) for row in rows) + sum(bool(load.different) for load in loads)
    print(
        f"compared: {len(rows)} resumed runs and {len(loads)} loads of universal checkpoints, each with all weights, "
        f"moments, step counts,\nhyperparameters, frozen parameters, buffers and counters: "
        f"{f'{wrong} FAILED' if wrong else 'all exact'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
