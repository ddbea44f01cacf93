# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The runs of ``long_training.py``: with which methods, the file that each run leaves, and what they say together.

Imports neither torch nor DeepSpeed.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.perf.lib.records import RESULTS

KEPT = RESULTS / "long_training"
STEPS = 3000
RANKS, GROUP_SIZE = 4, 2
SEEDS = (0, 1)
FINAL = 0.1  # of the steps
DIGITS = 5  # of a loss, which bf16 does not have

_LOCO: dict[str, Any] = {"zeropp_loco_param": {}}
_FOUR, _EXACTLY = ({"paro_quantized_updates": {"bits": bits}} for bits in (4, "exact"))
REFERENCE, EXACT, LOCO, LOSSLESS = "ZeRO-2", "NIG", "NIG + LoCo", "NIG + LoCo + exact"
CONTROL = "ZeRO-2, control"  # starts from weights that noise has moved a little: what is chance
METHODS: dict[str, dict[str, Any]] = {  # zero_optimization
    REFERENCE: {"stage": 2},
    CONTROL: {"stage": 2},
    **{
        name: {"paro_strategy": name[:3], "paro_group_size": GROUP_SIZE, **zero}
        for name, zero in {
            EXACT: {},
            LOCO: _LOCO,
            "NIG + LoCo + updates": _LOCO | _FOUR,
            LOSSLESS: _LOCO | _EXACTLY,
            "IIG + LoCo + updates": _LOCO | _FOUR,
        }.items()
    },
}


@dataclass
class LongRun:
    """A training run, as far as it has come.

    Attributes:
        method: one of ``METHODS``.
        seed: of weights and batches.
        text: its fingerprint.
        steps: that it will have.
        device: where ranks compute: cpu, or the name of a GPU.
        seconds: that steps have taken until now, and what the program was stopped for by signals.
        losses: of each step, means over ranks.
        held_out: the loss on held-out text, by the number of steps before.
        parts: of each start of the program the step that came next, the date, versions, hardware and command.
    """

    method: str
    seed: int
    text: str
    steps: int
    device: str
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the name of its file, without the ending."""
        return f"{self.method.replace(' + ', '_').replace(', ', '_')}-{self.seed}"

    @property
    def done(self) -> bool:
        """Return whether it has all of its steps."""
        return len(self.losses) >= self.steps

    @property
    def final_loss(self) -> float:
        """Return the mean over the last tenth of the steps, during which the learning rate goes to zero."""
        return statistics.fmean(self.losses[-round(FINAL * self.steps) :])

    @property
    def final_held_out(self) -> float:
        """Return the loss on held-out text after the last step."""
        return self.held_out[str(self.steps)]

    def check_same(self, found: "LongRun", where: str) -> None:
        """Check that a run that was found is this one, as far as it has come.

        Raises:
            ValueError: it is another one.
        """
        names = ("method", "seed", "text", "steps", "device")
        expected, got = ({name: getattr(run, name) for name in names} for run in (self, found))
        if expected != got:
            raise ValueError(f"{where}: expected a run of {expected}, got one of {got}: move it away.")

    def write(self, folder: Path) -> None:
        """Write it down, whole or not at all."""
        rounded = asdict(self) | {
            "seconds": round(self.seconds, 1),
            "losses": [round(loss, DIGITS) for loss in self.losses],
            "held_out": {step: round(loss, DIGITS) for step, loss in self.held_out.items()},
        }
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{self.name}.part"
        part.write_text(json.dumps(rounded, indent=None).replace(', "', ',\n"') + "\n", encoding="utf-8")
        part.replace(folder / f"{self.name}.json")

    @classmethod
    def read(cls, path: Path) -> "LongRun":
        """Return the run that a file has."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def read(folder: Path = KEPT) -> list[LongRun]:
    """Return the runs in a folder, by seed and in the order of the methods."""
    found = [LongRun.read(path) for path in folder.glob("*.json")]
    order = list(METHODS)
    return sorted(found, key=lambda run: (run.seed, order.index(run.method)))


def planned(methods: Iterable[str], seeds: Iterable[int]) -> list[tuple[str, int]]:
    """Return which runs there are, those of a seed together."""
    methods = list(methods)
    return [(method, seed) for seed in seeds for method in methods]


def table(runs: Sequence[LongRun]) -> tuple[list[str], list[list[str]]]:
    """Return a line for each method that has ended: losses, and how far they are from ZeRO-2's with the same seed.

    Cells have a value for each seed of ZeRO-2's, or a dash.
    """
    done = {(run.method, run.seed): run for run in runs if run.done}
    seeds = sorted(seed for method, seed in done if method == REFERENCE)
    header = ["method", "training loss", f"from {REFERENCE}", "held-out loss", f"from {REFERENCE}"]
    lines = []
    for method in (name for name in METHODS if any((name, seed) in done for seed in seeds)):
        cells: list[list[str]] = [[], [], [], []]
        for seed in seeds:
            run, beside = done.get((method, seed)), done[REFERENCE, seed]
            for number, kind in enumerate(("final_loss", "final_held_out")):
                loss = None if run is None else getattr(run, kind)
                cells[2 * number].append("-" if loss is None else f"{loss:.4f}")
                cells[2 * number + 1].append("-" if loss is None else f"{loss / getattr(beside, kind) - 1:+.2%}")
        lines.append([method, *(", ".join(values) for values in cells)])
    return header, lines
