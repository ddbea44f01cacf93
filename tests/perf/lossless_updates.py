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

and the entropy of the differences, which none of them passes. Sizes are those of windows of 2^20 weights, in the order
of the flat buffer. A budget for a message is a window's size in the step before, plus a margin.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
WINDOW = 2**20
KINDS = ("embeddings", "matrices", "norms", "biases")
ALL = "all"
CODES = ("nibble", "pairs", "bitmap", "gaps")
MARGINS = (0.0, 0.02, 0.05, 0.1)
PLAIN_BITS, QUANTIZED_BITS = 16.0, 4.125
SPAN = 2**16  # differences lie between -SPAN and SPAN


@dataclass(frozen=True)
class Case:
    """Training at a learning rate."""

    rate: float
    tuning: bool = False  # whether it goes on from the first case's weights

    @property
    def name(self) -> str:
        return f"{self.rate:g}{', tuning' if self.tuning else ''}"


class Counts:
    """How often each difference occurs among some weights in a step."""

    def __init__(self, of: Tensor, steps: int) -> None:
        self._of = of  # from -SPAN to SPAN
        self._steps = steps  # bytes for the distances between weights that have changed
        self.numel = int(of.sum())

    @classmethod
    def among(cls, differences: Tensor) -> "Counts":
        """Count differences: 1D, integers."""
        where = differences.nonzero().view(-1)
        gaps = torch.diff(where, prepend=where.new_full((1,), -1)) - 1
        return cls(torch.bincount(differences + SPAN, minlength=2 * SPAN + 1), int((gaps // 255 + 1).sum()))

    @classmethod
    def total(cls, some: Sequence["Counts"]) -> "Counts":
        """Add up."""
        return cls(torch.stack([one._of for one in some]).sum(0), sum(one._steps for one in some))

    def sizes(self) -> "Sizes":
        """Return what follows from them."""
        share = self._of[self._of > 0].double() / self.numel
        beyond = {far: 1 - self._of[SPAN - far : SPAN + far + 1].sum().item() / self.numel for far in (0, 1, 7, 8)}
        nibbles = 4 * beyond[0] + 16 * beyond[7]
        bits = {
            "nibble": 4 + 16 * beyond[7],
            "pairs": 2 + 4 * beyond[1] + 16 * beyond[8],
            "bitmap": 1 + nibbles,
            "gaps": 8 * self._steps / self.numel + nibbles,
        }
        return Sizes(beyond[0], 1 - beyond[7], -(share * share.log2()).sum().item(), bits)


@dataclass
class Sizes:
    """What some weights' differences are in a step."""

    changed: float
    within_7: float
    entropy: float
    bits: dict[str, float]  # a weight, by code


@dataclass
class Record:
    """A case's steps."""

    case: Case
    losses: list[float] = field(default_factory=list)
    windows: list[list[Sizes]] = field(default_factory=list)  # a list a step
    whole: list[Sizes] = field(default_factory=list)
    kinds: list[dict[str, Sizes]] = field(default_factory=list)


def ordinal(numbers: Tensor) -> Tensor:
    """Return the number of each bf16 number in their order; the two zeros are neighbors."""
    bits = numbers.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF) - 1, bits)


def kind_of(name: str, parameter: Tensor) -> str:
    """Return which of ``KINDS`` a parameter is."""
    if name.startswith(("token", "position")):
        return "embeddings"
    if parameter.dim() > 1:
        return "matrices"
    return "biases" if name.endswith("bias") else "norms"


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
        self._kinds = [kind_of(*named) for named in model.named_parameters()]
        self._optimizer = torch.optim.AdamW(self.masters, lr=case.rate, betas=(0.9, 0.95), weight_decay=0.1)
        warm_up = max(1, args.warm_up)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / warm_up)
        )
        self.record = Record(case)

    def steps(self) -> Iterator[int]:
        """Take all steps."""
        generator = torch.Generator().manual_seed(self._args.seed)
        length = MODEL["sequence_length"]
        for step in range(self._args.steps):
            starts = torch.randint(len(self._corpus) - length, (ROWS, 1), generator=generator)
            rows = self._corpus[starts + torch.arange(length + 1)].long()
            loss = self.model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            self.record.losses.append(loss.item())
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
        counts = [Counts.among(window) for window in torch.cat(found).split(WINDOW)]
        self.record.windows.append([one.sizes() for one in counts if one.numel == WINDOW])
        self.record.whole.append(Counts.total(counts).sizes())
        if len(self.record.whole) > self._args.steps - self._args.last:
            named = [(kind, [d for d, own in zip(found, self._kinds, strict=True) if own == kind]) for kind in KINDS]
            self.record.kinds.append({kind: Counts.among(torch.cat(some)).sizes() for kind, some in named if some})


# What follows from the steps ######################################################################


def overflows(record: Record, code: str, since: int, margin: float) -> float:
    """Return how often a window is larger than in the step before, by more than the margin."""
    pairs = zip(record.windows[since - 1 :], record.windows[since:], strict=False)
    larger = [new.bits[code] > old.bits[code] * (1 + margin) for a, b in pairs for old, new in zip(a, b, strict=True)]
    return statistics.fmean(larger)


def summary(record: Record, name: str, sizes: list[Sizes], windows: list[list[Sizes]]) -> dict[str, Any]:
    """Return a row about some weights in the last steps."""
    row: dict[str, Any] = {"learning_rate": record.case.rate, "tuning": record.case.tuning, "weights": name}
    row["final_loss"] = round(statistics.fmean(record.losses[-20:]), 4)
    row["changed"] = round(statistics.fmean(one.changed for one in sizes), 4)
    row["within_7"] = round(statistics.fmean(one.within_7 for one in sizes), 5)
    row["entropy"] = round(statistics.fmean(one.entropy for one in sizes), 3)
    for code in CODES:
        row[code] = round(statistics.fmean(one.bits[code] for one in sizes), 3)
        worst = max((one.bits[code] for step in windows for one in step), default=None)
        row[f"{code}_worst_window"] = worst and round(worst, 3)
    return row


def rows_of(record: Record, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return rows for all weights, for each kind, and for the worst step."""
    since = len(record.whole) - args.last
    rows = [summary(record, ALL, record.whole[since:], record.windows[since:])]
    worst = max(range(len(record.whole)), key=lambda step: record.whole[step].bits["nibble"])
    rows.append(summary(record, f"{ALL}, step {worst}", [record.whole[worst]], [record.windows[worst]]))
    for kind in record.kinds[0]:
        rows.append(summary(record, kind, [step[kind] for step in record.kinds], []))
    for row in rows:
        for margin in MARGINS:
            share = round(overflows(record, "nibble", since, margin), 4) if row["weights"] == ALL else None
            row[f"over_budget_{margin:g}"] = share
    return rows


def shown(value: float | None) -> str:
    """Return what stands in a table; nothing for what was not measured."""
    return "" if value is None else f"{value:.3f}"


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a line for each."""
    head = f"{'lr':<15}{'weights':<15}{'loss':>7}{'changed':>9}{'within 7':>10}{'entropy':>9}"
    print(
        head + "".join(f"{code:>8} (worst)" for code in CODES) + f"  over a budget with {', '.join(map(str, MARGINS))}"
    )
    for row in rows:
        name = Case(row["learning_rate"], row["tuning"]).name
        print(
            f"{name:<15}{row['weights']:<15}{row['final_loss']:>7.3f}{row['changed']:>9.4f}{row['within_7']:>10.5f}"
            f"{row['entropy']:>9.3f}"
            + "".join(f"{row[code]:>8.3f} {shown(row[f'{code}_worst_window']):>7}" for code in CODES)
            + "".join(f"{shown(row[f'over_budget_{margin:g}']):>8}" for margin in MARGINS),
            flush=True,
        )


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
    corpus, first, begin = read_corpus(CORPUS_BYTES), None, time.perf_counter()
    for case in [*map(Case, args.rates), Case(args.tuning_rate, True)]:
        run = Run(args, case, corpus, first if case.tuning else None)
        for _ in tqdm(run.steps(), case.name, args.steps):
            pass
        first = first or [master.detach() for master in run.masters]
        rows = rows_of(run.record, args)
        print_rows(rows)
        if args.csv is not None:
            records.append_rows(args.csv, rows)
    print(f"plain: {PLAIN_BITS:g} bits a weight; quantized differences: {QUANTIZED_BITS:g}")
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
