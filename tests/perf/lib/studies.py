# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``tests.perf.convergence`` trains: studies, the file of each run, and what their losses say together.

Imports neither torch nor DeepSpeed.
"""

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_ext.compare.spread import ratio
from tests.perf.lib.records import RESULTS, Table

FINAL = 0.1  # of the steps: over them the learning rate goes to zero, and losses are averaged
NORM_BOUNDS = (0.97, 1.03)
DIGITS = 5  # of a loss, which bf16 does not have
NOISE = 1e-3  # of a weight, of a control's first weights: how far two runs part that are equally good
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
MUON = {  # embeddings, the head and norms are Adam's
    "type": "Muon",
    "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
OPTIMIZERS = {"AdamW": ADAMW, "Muon": MUON, "SGD": SGD}
OUTER_SGD: dict[str, dict[str, float]] = {  # for Muon inside a smaller momentum is best, arXiv:2503.09799
    "AdamW": {"lr": 0.7, "momentum": 0.9},
    "Muon": {"lr": 0.7, "momentum": 0.7},
}
LOCO: dict[str, Any] = {"zeropp_loco_param": {}}


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        strategy: its name; empty for ZeRO-2.
        against: the method that its losses are compared with.
        zero: more of ``zero_optimization``.
        outer: of ``paro_outer_optimizer``, but for its rate and momentum.
        noise: that moves the first weights, in their size.
        bound: of the difference from ``against``, on average over seeds; with every seed, if ``each``.
        too_coarse: the difference is larger than the bound with every seed: the task shows what is too coarse.
    """

    strategy: str
    against: str
    zero: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] | None = None
    noise: float = 0.0
    bound: float | None = None
    each: bool = False
    too_coarse: bool = False

    def configured(self, optimizer: str, group_size: int) -> dict[str, Any]:
        """Return ``zero_optimization``."""
        zero = {"paro_strategy": self.strategy, "paro_group_size": group_size} if self.strategy else {"stage": 2}
        outer = {} if self.outer is None else {"paro_outer_optimizer": {**self.outer, **OUTER_SGD[optimizer]}}
        return {**zero, **self.zero, **outer}


@dataclass(frozen=True)
class Study:
    """Methods that train the same model on the same text.

    Attributes:
        file: of its rows, or the folder of its runs.
        reference: the method that all are compared with on the page.
        groups: numbers of groups.
        large: whether it trains the larger model, on the sources of DeepSpeed.
        held_out: numbers of evaluations on held-out text, by outer weights.
    """

    file: str
    methods: Mapping[str, Method]
    reference: str
    optimizers: tuple[str, ...]
    steps: int
    seeds: int = 3
    groups: tuple[int, ...] = (2,)
    group_size: int = 2
    bf16: bool = True
    large: bool = False
    held_out: int = 0

    @property
    def folder(self) -> Path:
        """Return where runs leave their files."""
        return RESULTS / self.file if self.large else Path("build", "convergence", self.file.partition(".")[0])


def _sent(**keys: Any) -> dict[str, Any]:
    return {"zeropp_loco_param": {"bits": 4, **keys}}


def _updates(**keys: Any) -> dict[str, Any]:
    return {"paro_quantized_updates": keys}


def _outer(steps: int, against: str = "NIG", bound: float | None = None, **keys: int) -> Method:
    return Method("NII", against, outer={"steps": steps, **keys}, bound=bound)


_LONG: dict[str, Any] = {"fragments": 3, "delay": 5}
_BITS: dict[str, Any] = {"bits": 4, "bound": 0.002}  # what few bits may cost
STUDIES = {
    "loco": Study(  # NIG's gradients between groups
        "loco_convergence.csv",
        {
            "none": Method("NIG", "none"),
            "control": Method("NIG", "none", noise=NOISE),
            "LoCo": Method("NIG", "none", _sent(block_size=128), bound=0.005, each=True),
            "int4/128": Method("NIG", "none", _sent(block_size=128, error_feedback=False)),
            "int4/4096": Method("NIG", "none", _sent(block_size=4096, error_feedback=False)),
        },
        "none",
        ("AdamW", "SGD"),
        300,
        bf16=False,
    ),
    "updates": Study(  # updated parameters of NIG, and sums of NII, that cross in few bits
        "updates_convergence.csv",
        {
            "NIG": Method("NIG", "NIG"),
            "NIG, control": Method("NIG", "NIG", noise=NOISE),
            "NIG + LoCo": Method("NIG", "NIG", LOCO),
            "NIG + updates": Method("NIG", "NIG", _updates(bits=4), bound=0.005),
            "NIG + LoCo + updates": Method("NIG", "NIG", LOCO | _updates(bits=4), bound=0.005),
            "NIG + LoCo + exact": Method("NIG", "NIG", LOCO | _updates(bits="exact")),
            "NIG + LoCo + 8 bits": Method("NIG", "NIG", LOCO | _updates(bits=8)),
            # The next and the last one are put in by the program: the package does not have them.
            "NIG + direct 4 bits": Method("NIG", "NIG", _updates(bits=4), bound=0.005, too_coarse=True),
            "NIG + direct 8 bits": Method("NIG", "NIG", _updates(bits=8)),
            "NII": Method("NII", "NII"),
            "NII + LoCo + updates": Method("NII", "NII", LOCO | _updates(bits=4), bound=0.005),
            "NII + LoCo + 8 bits": Method("NII", "NII", LOCO | _updates(bits=8)),
            "NII + LoCo + coarse": Method("NII", "NII", LOCO | _updates(block_size=128), bound=0.005, too_coarse=True),
        },
        "NIG",
        ("AdamW", "Muon"),
        1000,
    ),
    "outer": Study(  # groups train apart under NII, which alone trains as NIG does; H steps between outer steps
        "outer_convergence.csv",
        {
            "NIG": Method("NIG", "NIG"),
            "H=30": _outer(30),
            "H=30, 4 bits": _outer(30, "H=30", **_BITS),
            "H=10": _outer(10),
            "H=30, streaming": _outer(30, **_LONG),
            "NIG + LoCo + updates": Method("NIG", "NIG", LOCO | _updates(bits=4)),
            "H=10, 4 bits": _outer(10, "H=10", **_BITS),
            "H=30, streaming, 4 bits": _outer(30, "H=30, streaming", **_LONG, **_BITS),
        },
        "NIG",
        ("AdamW", "Muon"),
        2100,  # a tenth of them ends with an outer step, with 10 and with 30 inner steps
        groups=(2, 4),
        group_size=1,
        held_out=10,
    ),
    "long": Study(
        "long_training",
        {
            "ZeRO-2": Method("", "ZeRO-2"),
            "ZeRO-2, control": Method("", "ZeRO-2", noise=NOISE),
            "NIG": Method("NIG", "ZeRO-2"),
            "NIG + LoCo": Method("NIG", "NIG", LOCO),
            "NIG + LoCo + updates": Method("NIG", "NIG", LOCO | _updates(bits=4)),
            "NIG + LoCo + exact": Method("NIG", "NIG", LOCO | _updates(bits="exact")),
            "IIG + LoCo + updates": Method("IIG", "NIG", LOCO | _updates(bits=4)),
        },
        "ZeRO-2",
        ("AdamW",),
        3000,
        seeds=2,
        large=True,
        held_out=12,
    ),
}


@dataclass
class Run:
    """A training run.

    Attributes:
        text: its fingerprint.
        device: where ranks compute.
        losses: of each step, means over ranks.
        held_out: the loss on held-out text, by the number of steps before.
        norms: of the whole gradient in each step, as the engine reports them before clipping.
        own_loss: on held-out text, of each group's own weights, on average, a step before the end.
        received: bytes that a rank received in a step from other groups, by the kernel's counters.
        elements, matrices: of the model, and those that Muon trains.
        parts: of each start of the program the step that came next, and what ``records.circumstances`` says.
    """

    method: str
    seed: int
    text: str
    steps: int
    device: str = "cpu"
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    optimizer: str = "AdamW"
    groups: int = 2
    norms: list[float] = field(default_factory=list)
    own_loss: float = 0.0
    received: float = 0.0
    elements: int = 0
    matrices: int = 0

    @property
    def name(self) -> str:
        """Return the name of its file, without the ending."""
        more = [self.optimizer] * (self.optimizer != "AdamW") + [f"{self.groups}"] * (self.groups != 2)
        return "-".join([self.method.replace(" + ", "_").replace(", ", "_"), *more, str(self.seed)])

    @property
    def final_loss(self) -> float:
        """Return the mean over the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, round(FINAL * self.steps)) :])

    @property
    def final_held_out(self) -> float:
        """Return the loss on held-out text after the last step."""
        return self.held_out[str(self.steps)]

    def write(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        rounded = asdict(self) | {
            "losses": [round(loss, DIGITS) for loss in self.losses],
            "held_out": {step: round(loss, DIGITS) for step, loss in self.held_out.items()},
        }
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{self.name}.part"
        part.write_text(json.dumps(rounded).replace(', "', ',\n"') + "\n", encoding="utf-8")
        part.replace(folder / f"{self.name}.json")

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Return the run that a file has."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def found(self, folder: Path) -> "Run | None":
        """Return this run as its file has it; None if there is none.

        Raises:
            ValueError: the file is of a run with another text or other steps.
        """
        path = folder / f"{self.name}.json"
        if not path.exists():
            return None
        run = Run.read(path)
        expected, got = ((one.name, one.text, one.steps) for one in (self, run))
        if expected != got:
            raise ValueError(f"{path}: expected a run of {expected}, got one of {got}: move it away.")
        return run


def read_runs(study: Study) -> list[Run]:
    """Return the runs in a study's folder, by seed and in the order of the methods."""
    found = [Run.read(path) for path in study.folder.glob("*.json")]
    order = list(study.methods)
    return sorted(found, key=lambda run: (run.seed, order.index(run.method)))


def planned(study: Study, optimizers: Iterable[str], groups: Iterable[int], seeds: Iterable[int]) -> list[Run]:
    """Return the runs without their losses, in the order in which they train: a seed of all before the next one."""
    product = itertools.product(seeds, groups, optimizers, study.methods)
    return [
        Run(method, seed, "", study.steps, optimizer=optimizer, groups=number)
        for seed, number, optimizer, method in product
    ]


# What losses say together #########################################################################


class End(NamedTuple):
    """Where a run ended: its loss, that of own weights, that of training, and bytes that a rank received in a step."""

    optimizer: str
    groups: int
    method: str
    seed: int
    loss: float
    own_loss: float = 0.0
    training_loss: float = 0.0
    received: float = 0.0


def ends_of(study: Study, runs: Iterable[Run]) -> list[End]:
    """Return the ends of runs: their held-out losses if they have an outer study's, else those of training."""
    held_out = study.held_out and not study.large
    return [
        End(
            *(run.optimizer, run.groups, run.method, run.seed),
            run.final_held_out if held_out else run.final_loss,
            *(run.own_loss, run.final_loss, run.received),
        )
        for run in runs
    ]


@dataclass(frozen=True)
class Cell:
    """The seeds of one method with an optimizer and a number of groups, with those of the methods beside it."""

    ends: tuple[End, ...]
    reference: tuple[End, ...]
    against: tuple[End, ...]

    @property
    def loss(self) -> float:
        return statistics.fmean(end.loss for end in self.ends)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds."""
        return statistics.stdev(end.loss for end in self.ends) if len(self.ends) > 1 else 0.0

    def differences(self, others: Sequence[End]) -> list[float]:
        """Return the relative differences from others with the same seeds, a seed each."""
        there = {end.seed: end.loss for end in others}
        return [end.loss / there[end.seed] - 1 for end in self.ends if end.seed in there]


def cells(study: Study, ends: Sequence[End]) -> dict[tuple[str, int, str], Cell]:
    """Return the cells by optimizer, groups and method."""

    def some(optimizer: str, groups: int, method: str) -> tuple[End, ...]:
        return tuple(end for end in ends if end[:3] == (optimizer, groups, method))

    return {
        key: Cell(some(*key), some(*key[:2], study.reference), some(*key[:2], study.methods[key[2]].against))
        for key in dict.fromkeys(end[:3] for end in ends)
    }


def judged(study: Study, ends: Sequence[End]) -> Iterator[tuple[bool, str]]:
    """Judge each method that has a bound, by the ratio of losses with its interval of ``deepspeed_ext.compare``, in
    which seeds are rounds."""
    for (optimizer, groups, name), cell in cells(study, ends).items():
        method, each = study.methods[name], cell.differences(cell.against)
        if method.bound is None or not each:
            continue
        seeds = {end.seed: end.loss for end in cell.against}
        own = [end for end in cell.ends if end.seed in seeds]
        found = ratio([[seeds[end.seed]] for end in own], [[end.loss] for end in own])
        mean, low, high = found.value - 1, found.low - 1, found.high - 1
        kept = max(map(abs, each)) <= method.bound if method.each else abs(mean) <= method.bound
        passed = min(each) > method.bound if method.too_coarse else kept
        yield (
            passed,
            f"{'PASS' if passed else 'FAIL'}  {optimizer}, {groups} groups, {name}: the final loss is {mean:+.2%} "
            f"({low:+.2%} to {high:+.2%}) from {method.against}, {'more than' if method.too_coarse else 'bound'} "
            f"{method.bound:.1%}{' with every seed' if method.each or method.too_coarse else ''}; "
            f"each {', '.join(f'{one:+.2%}' for one in each)}",
        )


def judged_norms(study: Study, runs: Sequence[Run]) -> Iterator[tuple[bool, str]]:
    """Judge the gradients' norms of methods that have bounds with every seed, by the ratio of means over a run."""
    found = {(run.optimizer, run.groups, run.method, run.seed): run for run in runs}
    for run in (run for run in runs if study.methods[run.method].each):
        other = found[run.optimizer, run.groups, study.methods[run.method].against, run.seed]
        norms = statistics.fmean(run.norms) / statistics.fmean(other.norms)
        passed = NORM_BOUNDS[0] <= norms <= NORM_BOUNDS[1]
        yield (
            passed,
            f"{'PASS' if passed else 'FAIL'}  {run.name}: norms of gradients are {norms:.3f} of the exact ones",
        )


def table(study: Study, ends: Sequence[End]) -> Table:
    """Return a line for each optimizer, number of groups and method."""
    held_out = study.held_out > 0
    header = ["inside", "groups", "method", "seeds", "held-out loss" if held_out else "final loss", "± seeds"]
    header += [f"% from {study.reference}", "each seed", "% from its own", "own weights", "training", "kB a step"]
    if study.held_out:
        header[8] = "% from 32 bits"
    lines = []
    for (optimizer, groups, name), cell in cells(study, ends).items():
        each, own = cell.differences(cell.reference), cell.differences(cell.against)
        apart = study.methods[name].against != study.reference
        line = [optimizer, str(groups), name, " ".join(str(end.seed) for end in cell.ends), f"{cell.loss:.4f}"]
        line += [f"{cell.spread:.4f}" if len(cell.ends) > 1 else "", _mean(each), _percents(each)]
        line.append(_mean(own) if apart else "")
        means = [statistics.fmean(getattr(end, name) for end in cell.ends) for name in End._fields[5:7]]
        line += [f"{mean:.4f}" if mean else "" for mean in means]
        lines.append([*line, f"{statistics.fmean(end.received for end in cell.ends) / 1e3:.1f}"])
    return header, lines


def _mean(values: Sequence[float]) -> str:
    return _percents([statistics.fmean(values)] if values else [])


def _percents(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:+.2f}" for value in values)


def long_table(runs: Sequence[Run]) -> Table:
    """Return a line for each method of the long study: losses, and how far they are from ZeRO-2's with the same seed.

    Cells have a value for each seed of ZeRO-2's, or a dash.
    """
    study = STUDIES["long"]
    done = {(run.method, run.seed): run for run in runs}
    seeds = sorted(seed for method, seed in done if method == study.reference)
    header = ["method", "training loss", f"from {study.reference}", "held-out loss", f"from {study.reference}"]
    lines = []
    for method in (name for name in study.methods if any((name, seed) in done for seed in seeds)):
        columns: list[list[str]] = [[], [], [], []]
        for seed in seeds:
            run, beside = done.get((method, seed)), done[study.reference, seed]
            for number, kind in enumerate(("final_loss", "final_held_out")):
                loss = None if run is None else getattr(run, kind)
                columns[2 * number].append("-" if loss is None else f"{loss:.4f}")
                columns[2 * number + 1].append("-" if loss is None else f"{loss / getattr(beside, kind) - 1:+.2%}")
        lines.append([method, *(", ".join(values) for values in columns)])
    return header, lines
