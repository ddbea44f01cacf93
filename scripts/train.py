# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level GPT on the source text of the Python standard library.

An ordinary DeepSpeed script: nothing in it knows of PaRO. Which strategy runs is decided by the
``zero_optimization`` section of the configuration file alone::

    deepspeed --num_accelerators 4 scripts/train.py --deepspeed --deepspeed_config scripts/configs/nig.json

The model and every batch follow from the seed, so two configurations that differ only in where the states are
kept must show the same losses. With ``--report`` the script also writes what each step cost: seconds, and on gloo
the bytes that the ranks received from one another; and the bytes of optimizer states that a rank holds.
"""

import argparse
import json
import os
import statistics
import sysconfig
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

VOCABULARY = 256  # a token is a byte
CORPUS_BYTES = 8_000_000
REST_SECONDS = 0.2  # the wire is at rest when so long nothing has arrived
WARM_UP_STEPS = 1  # ZeRO-3 records its trace and gloo opens its connections in the first step


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.projection = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, length, dim / heads) each
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.mlp_norm(x))


class ByteGPT(nn.Module):
    """A GPT over bytes that returns its own loss, as DeepSpeed's examples do."""

    def __init__(self, dim: int, layers: int, heads: int, sequence_length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(sequence_length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        # Small weights start the loss near ln 256, the loss of knowing nothing.
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def read_corpus(budget: int) -> Tensor:
    """The first ``budget`` bytes of the standard library's sources, in an order that every machine agrees on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    text = bytearray()
    for name in files:
        # Packages that somebody installed are not the standard library, and differ from machine to machine.
        if name.startswith(("site-packages/", "dist-packages/")):
            continue
        text += (root / name).read_bytes()
        if len(text) >= budget:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:budget]


class Batches:
    """Batches that depend on the seed, the micro-step and the data-parallel rank, and on nothing else."""

    def __init__(self, corpus: Tensor, engine: DeepSpeedEngine, sequence_length: int, seed: int) -> None:
        self._corpus = corpus
        self._rows = engine.train_micro_batch_size_per_gpu()
        self._length = sequence_length
        self._seed = seed
        self._rank = dist.get_rank(engine.data_parallel_group)
        self._world_size = dist.get_world_size(engine.data_parallel_group)
        self._device = engine.device

    def draw(self, micro_step: int) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, each of shape (micro-batch, sequence length)."""
        generator = torch.Generator()
        generator.manual_seed((self._seed << 32) + micro_step * self._world_size + self._rank)
        starts = torch.randint(len(self._corpus) - self._length, (self._rows, 1), generator=generator)
        rows = self._corpus[starts + torch.arange(self._length + 1)].long().to(self._device)
        return rows[:, :-1], rows[:, 1:]


@dataclass
class Step:
    """What one optimizer step showed."""

    loss: float
    seconds: float


class ByteCounter:
    """Counts, on gloo, the bytes that ranks receive over several steps."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._meter = None
        if dist.get_backend() == "gloo":
            # Imported here, after deepspeed.initialize, to show that training itself needs no import of ours.
            from deepspeed_ext.comm.traffic import TrafficMeter

            self._meter = TrafficMeter()
        elif dist.get_rank() == 0:
            print(f"bytes are not counted: that needs the backend gloo, this is {dist.get_backend()}", flush=True)

    def start(self) -> None:
        """Begin to count."""
        if self._meter is not None:
            self._wait_for_rest()
            self._meter.start()
            dist.barrier()  # nobody sends before everybody has read the counters

    def stop(self) -> dict[str, float | None]:
        """End; bytes by origin, means over the ranks, or None where nothing counts them."""
        if self._meter is None:
            return {"intra_bytes": None, "inter_bytes": None}
        self._wait_for_rest()
        self._meter.stop()
        traffic = self._meter.split(self._group_size)
        return {"intra_bytes": traffic.intra_mean, "inter_bytes": traffic.inter_mean}

    @staticmethod
    def _wait_for_rest() -> None:
        """Wait until nothing arrives: what a step has started may be under way when it returns."""
        from deepspeed_ext.comm.traffic import received_bytes

        before, now = None, received_bytes()
        while now != before:
            time.sleep(REST_SECONDS)
            before, now = now, received_bytes()
        dist.barrier()


def record(engine: DeepSpeedEngine, micro_batches: list[tuple[Tensor, Tensor]]) -> Step:
    """Run one step. The seconds are those of the slowest rank: they end when all have finished."""
    dist.barrier()
    begin = time.perf_counter()
    losses = train_step(engine, micro_batches)
    get_accelerator().synchronize()
    dist.barrier()
    seconds = time.perf_counter() - begin
    return Step(loss=average(losses), seconds=seconds)


def train_step(engine: DeepSpeedEngine, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One optimizer step, exactly as any DeepSpeed script writes it. Returns the loss of each micro-batch."""
    losses = []
    for tokens, targets in micro_batches:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def average(losses: Tensor) -> float:
    """Mean over micro-batches and ranks, in double precision so that averaging adds no rounding of its own."""
    total = losses.double().mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def summarize(steps: list[Step], received: dict[str, float | None]) -> dict[str, float | None]:
    """Seconds, and bytes of a step, over the steps after the warm-up."""
    seconds = [step.seconds for step in steps]
    return {
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        **{name: None if count is None else count / len(steps) for name, count in received.items()},
    }


def optimizer_bytes(engine: DeepSpeedEngine) -> int:
    """Bytes of optimizer states, master weights included, on the rank that holds most."""
    states = engine.optimizer.optimizer.state  # by master weight
    held = sum(
        tensor.nbytes
        for master, state in states.items()
        for tensor in (master, *state.values())
        if isinstance(tensor, Tensor) and tensor.dim()  # a count of steps is none
    )
    most = torch.tensor(held, device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on; None where a package is not installed as a distribution."""
    found: dict[str, str | None] = {}
    for name in ("torch", "deepspeed", "deepspeed_ext"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT with DeepSpeed.")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="decides the model and every batch")
    parser.add_argument("--dim", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes in a row")
    parser.add_argument(
        "--group-size",
        type=int,
        default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        help="ranks in a group; only splits the counted bytes (default: ranks on this node)",
    )
    parser.add_argument("--report", type=Path, help="rank 0 writes what it saw here, as JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def build_report(
    args: argparse.Namespace,
    engine: DeepSpeedEngine,
    count: int,
    held: int,
    steps: list[Step],
    summary: dict[str, Any],
) -> dict[str, Any]:
    """All that is needed to compare this run with another."""
    dtype, _ = engine.get_data_types()
    return {
        "versions": versions(),
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "group_size": args.group_size,
        "parameters": count,
        "parameter_bytes": count * dtype.itemsize,
        "optimizer_bytes": held,
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "config": json.loads(Path(args.deepspeed_config).read_text()),
        "options": {name: getattr(args, name) for name in ("seed", "dim", "layers", "heads", "sequence_length")},
        "steps": [asdict(step) for step in steps],
        "summary": summary,
    }


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    model = ByteGPT(args.dim, args.layers, args.heads, args.sequence_length)
    count = sum(parameter.numel() for parameter in model.parameters())  # before ZeRO-3 takes them apart
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    batches = Batches(read_corpus(CORPUS_BYTES), engine, args.sequence_length, args.seed)
    counter = ByteCounter(args.group_size)
    accumulation = engine.gradient_accumulation_steps()
    steps: list[Step] = []
    warm_up = min(WARM_UP_STEPS, args.steps - 1)
    bar = tqdm(range(args.steps), desc=Path(args.deepspeed_config).stem, unit="step", disable=dist.get_rank() != 0)
    for index in bar:
        micro_batches = [batches.draw(index * accumulation + micro) for micro in range(accumulation)]
        if index == warm_up:
            counter.start()
        steps.append(record(engine, micro_batches))
        bar.set_postfix(loss=f"{steps[-1].loss:.4f}")

    summary = summarize(steps[warm_up:], counter.stop())
    held = optimizer_bytes(engine)
    if dist.get_rank() == 0:
        report = build_report(args, engine, count, held, steps, summary)
        print(json.dumps(summary), flush=True)
        if args.report is not None:
            args.report.write_text(json.dumps(report, indent=2) + "\n")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
