# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What would it take to send updated bf16 parameters without loss, as what they differ from the last ones?

    python -m tests.perf.lossless_updates

Trains the byte-level GPT of scripts/examples on one CPU, in bf16 with fp32 masters, by AdamW at several learning
rates; the last case goes on from the weights of the first one, as fine-tuning does. After each step a weight's
difference is counted in units of the last place: of the bf16 numbers between the weight and the one before, so that
crossing zero takes thousands. Compared are the bits that a weight would take in four codes that a kernel could write:

    nibble   4 bits for -7 to 7, and 16 bits more for an escape
    pairs    2 bits for -1 to 1, else 4 bits more for up to 8, else 16 bits more
    bitmap   1 bit for whether a weight has changed, and a nibble for each that has
    gaps     a byte for the distance to the next weight that has changed (255: go on), and a nibble for it

and the entropy of the differences, which none of them passes. Rows are of the last steps, and of the worst one.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from scripts.examples.gpt import ByteGPT, read_corpus
from tests.perf.lib import records

MODEL = {"dim": 256, "layers": 4, "heads": 8, "sequence_length": 128}
ROWS = 8
CORPUS_BYTES = 4_000_000
SPAN = 2**16  # differences lie between -SPAN and SPAN


@dataclass(frozen=True)
class Case:
    """Training at a learning rate."""

    rate: float
    tuning: bool = False  # whether it goes on from the first case's weights

    @property
    def name(self) -> str:
        return f"{self.rate:g}{', tuning' if self.tuning else ''}"


def sizes(differences: Tensor) -> dict[str, float]:
    """Return the share of differences (1D, integers) that are not zero and that a nibble holds, their entropy, and
    the bits of a weight in each code."""
    counts = torch.bincount(differences + SPAN, minlength=2 * SPAN + 1)
    share = counts[counts > 0].double() / differences.numel()
    beyond = {far: 1 - counts[SPAN - far : SPAN + far + 1].sum().item() / differences.numel() for far in (0, 1, 7, 8)}
    where = differences.nonzero().view(-1)
    gaps = torch.diff(where, prepend=where.new_full((1,), -1)) - 1
    steps = int((gaps // 255 + 1).sum())  # bytes for the distances
    nibbles = 4 * beyond[0] + 16 * beyond[7]
    return {
        "changed": beyond[0],
        "within_7": 1 - beyond[7],
        "entropy": -(share * share.log2()).sum().item(),
        "nibble": 4 + 16 * beyond[7],
        "pairs": 2 + 4 * beyond[1] + 16 * beyond[8],
        "bitmap": 1 + nibbles,
        "gaps": 8 * steps / differences.numel() + nibbles,
    }


def ordinal(numbers: Tensor) -> Tensor:
    """Return the number of each bf16 number in their order; the two zeros are neighbors."""
    bits = numbers.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF) - 1, bits)


class Run:
    """Trains one case, and measures each step."""

    def __init__(self, args: argparse.Namespace, case: Case, corpus: Tensor, weights: list[Tensor] | None) -> None:
        torch.manual_seed(args.seed)
        self._args = args
        self._corpus = corpus
        model = ByteGPT(**MODEL)
        if weights is not None:
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.data.copy_(weight)
        self.masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        self.model: nn.Module = model.bfloat16()
        self._optimizer = torch.optim.AdamW(self.masters, lr=case.rate, betas=(0.9, 0.95), weight_decay=0.1)
        warm_up = max(1, args.warm_up)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / warm_up)
        )
        self.losses: list[float] = []
        self.sizes: list[dict[str, float]] = []  # of each step

    def steps(self) -> Iterator[int]:
        """Take all steps."""
        generator = torch.Generator().manual_seed(self._args.seed)
        length = MODEL["sequence_length"]
        for step in range(self._args.steps):
            starts = torch.randint(len(self._corpus) - length, (ROWS, 1), generator=generator)
            rows = self._corpus[starts + torch.arange(length + 1)].long()
            loss = self.model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            self.losses.append(loss.item())
            self._update()
            yield step

    def _update(self) -> None:
        parameters = list(self.model.parameters())
        for master, parameter in zip(self.masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        found = []
        for master, parameter in zip(self.masters, parameters, strict=True):
            before = ordinal(parameter.detach())
            parameter.data.copy_(master.detach())
            found.append((ordinal(parameter.detach()) - before).view(-1))
        self.sizes.append(sizes(torch.cat(found)))


def rows_of(run: Run, case: Case, last: int) -> list[dict[str, Any]]:
    """Return rows for the last steps, and for the worst step."""
    worst = max(range(len(run.sizes)), key=lambda step: run.sizes[step]["nibble"])
    rows = []
    for name, some in (("all", run.sizes[-last:]), (f"all, step {worst}", [run.sizes[worst]])):
        row: dict[str, Any] = {"learning_rate": case.rate, "tuning": case.tuning, "weights": name}
        row["final_loss"] = round(statistics.fmean(run.losses[-20:]), 4)
        rows.append(row | {key: round(statistics.fmean(one[key] for one in some), 5) for key in some[0]})
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how small updated parameters can be sent without loss.")
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 3e-4, 1e-4, 1e-5], help="learning rates")
    parser.add_argument("--tuning-rate", type=float, default=1e-5, help="of the last case")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a case")
    parser.add_argument("--warm-up", type=int, default=20, help="steps in which the learning rate rises")
    parser.add_argument("--last", type=int, default=50, help="steps at the end over which sizes are averaged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    args = parser.parse_args()
    if not 0 < args.last < args.steps:
        parser.error(f"--last must be less than the {args.steps} steps, and at least 1, got {args.last}")
    return args


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    corpus, first = read_corpus(CORPUS_BYTES), None
    for case in [*map(Case, args.rates), Case(args.tuning_rate, True)]:
        run = Run(args, case, corpus, first if case.tuning else None)
        for _ in tqdm(run.steps(), case.name, args.steps):
            pass
        first = first or [master.detach() for master in run.masters]
        rows = rows_of(run, case, args.last)
        records.report(rows, args.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
