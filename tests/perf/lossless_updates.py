# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures the bits of lossless updates of bf16 parameters in several codes.

    python -m tests.perf.lossless_updates

Trains the byte-level GPT of scripts/examples on one CPU, in bf16 with fp32 masters, by AdamW at several learning
rates; the last case continues from the weights of the first one, as fine-tuning does. After each step, a weight's
difference is counted in units of the last place. The program compares the bits of a weight in four codes for a kernel:

    nibble   4 bits for -7 to 7, and 16 bits more for an escape
    pairs    2 bits for -1 to 1, else 4 bits more for up to 8, else 16 bits more
    bitmap   1 bit for whether a weight has changed, and a nibble for each that has
    gaps     a byte for the distance to the next weight that has changed (255: continued), and a nibble for it

and the entropy of the differences, a lower bound. Rows are of the last steps, and of the worst one.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import trange

from scripts.examples.gpt import ByteGPT, read_corpus
from tests.perf.lib import records

MODEL = {"dim": 256, "layers": 4, "heads": 8, "sequence_length": 128}
ROWS = 8
CORPUS_BYTES = 4_000_000
WARM_UP, LAST = 20, 50  # steps in which the learning rate rises; steps at the end over which sizes are averaged
SPAN = 2**16  # differences lie between -SPAN and SPAN
Sizes = dict[str, float]


def sizes(differences: Tensor) -> dict[str, float]:
    """Return the shares of differences that are not zero and fit a nibble, entropy, and each code's bits."""
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


def train(rate: float, steps: int, text: Tensor, weights: list[Tensor]) -> tuple[list[Tensor], list[dict[str, float]]]:
    """Train from given weights, or from random ones; return the masters, and the sizes of each step."""
    torch.manual_seed(0)
    model = ByteGPT(**MODEL)
    for parameter, weight in zip(model.parameters(), weights, strict=False):
        parameter.data.copy_(weight)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    model = model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    generator, length, step_sizes = torch.Generator().manual_seed(0), MODEL["sequence_length"], []
    for _ in trange(steps, desc=f"{rate:g}"):
        starts = torch.randint(len(text) - length, (ROWS, 1), generator=generator)
        rows = text[starts + torch.arange(length + 1)].long()
        model(rows[:, :-1], rows[:, 1:]).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        schedule.step()
        moved = []
        for master, parameter in zip(masters, model.parameters(), strict=True):
            before = ordinal(parameter.detach())
            parameter.data.copy_(master.detach())
            moved.append((ordinal(parameter.detach()) - before).view(-1))
        step_sizes.append(sizes(torch.cat(moved)))
    return [master.detach() for master in masters], step_sizes


def rows_of(rate: float, tuning: bool, step_sizes: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return rows for the last steps, and for the worst step."""
    worst = max(range(len(step_sizes)), key=lambda step: step_sizes[step]["nibble"])
    return [
        {"learning_rate": rate, "tuning": tuning, "weights": name}
        | {key: round(statistics.fmean(row[key] for row in selected), 5) for key in selected[0]}
        for name, selected in (("all", step_sizes[-LAST:]), (f"all, step {worst}", [step_sizes[worst]]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how small updated parameters can be sent without loss.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a case")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    corpus, first = read_corpus(CORPUS_BYTES), list[Tensor]()
    for rate, tuning in ((1e-3, False), (3e-4, False), (1e-4, False), (1e-5, False), (1e-5, True)):
        masters, step_sizes = train(rate, args.steps, corpus, first if tuning else [])
        first = first or masters
        records.report(rows_of(rate, tuning, step_sizes), args.csv)


if __name__ == "__main__":
    main()
