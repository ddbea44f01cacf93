# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Studies of ``tests.perf.convergence``: methods, files of runs, verdicts from their losses, and rows. Imports neither
torch nor DeepSpeed."""

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import GroupSizes, ModelStates, parse_strategy
from deepspeed_ext.tools.compare.verdict import ratio
from tests.perf.lib.records import RESULTS, Table, read_rows

FINAL = 0.1  # of the steps: over them the learning rate goes to zero, and losses are averaged
NORM_BOUNDS = (0.97, 1.03)
DIGITS = 5  # of a loss, which bf16 does not have
NOISE = 1e-3  # of a weight, of a control's first weights: how far two runs part that are equally good
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {**ADAM, "torch_adam": True}}
MUON = {  # embeddings, the head and norms are Adam's
    "type": "Muon",
    "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": ADAMW,
    "AdamW 2e-4": {"type": "AdamW", "params": {**ADAMW["params"], "lr": 2e-4}},  # fine-tunes
    "Muon": MUON,
    "SGD": SGD,
    "Adafactor": {"type": "Adafactor", "params": {"lr": 5e-2}},
    "Adam8bit": {"type": "Adam8bit", "params": {**ADAM, "min_8bit_size": 1}},  # of bitsandbytes
}
OUTER_SGD: dict[str, dict[str, float]] = {  # for Muon inside a smaller momentum is best, arXiv:2503.09799
    "AdamW": {"lr": 0.7, "momentum": 0.9},
    "Muon": {"lr": 0.7, "momentum": 0.7},
}
LOCO: dict[str, Any] = {"zeropp_loco_param": {}}


@dataclass(frozen=True)
class Method:
    """A way to train."""

    strategy: str  # name of the strategy, empty for ZeRO-2
    against: str  # the method that its losses are compared with
    zero: Mapping[str, Any] = field(default_factory=dict)  # additional keys of ``zero_optimization``
    outer: Mapping[str, Any] | None = None  # ``paro_outer_optimizer`` without rate and momentum
    noise: float = 0.0  # size of the perturbation of the first weights, relative to them
    # Largest difference from ``against``, on average over seeds; with every seed, if ``each``.
    bound: float | None = None
    each: bool = False
    # The difference is larger than the bound with every seed: the task detects coarse methods.
    too_coarse: bool = False

    def configured(self, optimizer: str, group_size: int) -> dict[str, Any]:
        zero = {"paro_strategy": self.strategy, "paro_group_size": group_size} if self.strategy else {"stage": 2}
        outer = {} if self.outer is None else {"paro_outer_optimizer": {**self.outer, **OUTER_SGD[optimizer]}}
        return {**zero, **self.zero, **outer}


@dataclass(frozen=True)
class Study:
    """Methods that train the same model on the same text."""

    file: str  # file of its rows, or the folder of its runs
    methods: Mapping[str, Method]
    reference: str  # the method with which all are compared on the page
    optimizers: tuple[str, ...]
    steps: int
    seeds: int = 3
    # groups, held_out: numbers of groups, and of evaluations on held-out text by outer weights.
    groups: tuple[int, ...] = (2,)
    group_size: int = 2
    bf16: bool = True
    large: bool = False  # whether it trains the larger model, on the sources of DeepSpeed
    tuned: bool = False  # whether it trains that model from weights of a run, on the text of the others
    mixture: bool = False  # whether it trains a mixture of experts
    held_out: int = 0

    @property
    def folder(self) -> Path:
        """Return where runs leave their files."""
        return RESULTS / self.file if self.large else Path("build", "convergence", self.file.partition(".")[0])


def _sent(**keys: Any) -> dict[str, Any]:
    return {"zeropp_loco_param": {"bits": 4, **keys}}


def _updates(**keys: Any) -> dict[str, Any]:
    return {"paro_quantized_updates": keys}


def _varied(**keys: Any) -> Method:
    return Method("NIG", "LoCo", {"zeropp_loco_param": keys})


def _outer(steps: int, against: str = "NIG", bound: float | None = None, **keys: int) -> Method:
    return Method("NII", against, outer={"steps": steps, **keys}, bound=bound)


def _in_few_bits(name: str, optimizers: tuple[str, ...], steps: int, **keys: Any) -> Study:
    """Return the study of exact training by this name, and of LoCo with and without updates."""
    few = {"LoCo": LOCO, "LoCo + updates": LOCO | _updates(bits=4)}
    methods = {name: Method("NIG", name), f"{name}, control": Method("NIG", name, noise=NOISE)}
    methods |= {f"{name} + {more}": Method("NIG", name, zero) for more, zero in few.items()}
    return Study(_ABLATION, methods, name, optimizers, steps, seeds=2, group_size=1, **keys)


_ABLATION = "loco_ablation.csv"
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
    "ablation": Study(  # one setting of LoCo at a time; in 600 steps, resets every 1,024 steps are none
        _ABLATION,
        {
            "NIG": Method("NIG", "NIG"),
            "NIG, control": Method("NIG", "NIG", noise=NOISE),
            "LoCo": Method("NIG", "NIG", LOCO),
            "LoCo, control": Method("NIG", "LoCo", LOCO, noise=NOISE),
            **{f"beta {beta}": _varied(err_beta=beta) for beta in (0.0, 0.5, 0.95)},
            **{f"reset {steps}": _varied(reset_T=steps) for steps in (16, 64, 512)},
            "block 4096": _varied(block_size=4096),
            "errors in 4 bits": _varied(error_bits=16),  # put in by the program, as is the next one
            "errors in fp32": _varied(error_bits=16),
            "no errors": _varied(error_feedback=False),
        },
        "NIG",
        ("AdamW", "Adafactor", "Adam8bit"),
        600,
        seeds=2,
        group_size=1,
    ),
    "mixture": _in_few_bits("Mixtral", ("AdamW",), 300, mixture=True),
    "tuning": _in_few_bits("tuned", ("AdamW 2e-4",), 200, tuned=True, held_out=1),
    "updates": Study(  # updated parameters of NIG, and sums of NII, that cross in few bits
        "updates_convergence.csv",
        {
            "NIG": Method("NIG", "NIG"),
            "NIG, control": Method("NIG", "NIG", noise=NOISE),
            "NIG + LoCo": Method("NIG", "NIG", LOCO),
            "NIG + updates": Method("NIG", "NIG", _updates(bits=4), bound=0.005),
            "NIG + LoCo + updates": Method("NIG", "NIG", LOCO | _updates(bits=4), bound=0.005),
            "NIG + LoCo + exact": Method("NIG", "NIG", LOCO | _updates(bits="exact")),
            # This and the last one are put in by the program: the package does not have them.
            "NIG + direct 4 bits": Method("NIG", "NIG", _updates(bits=4), bound=0.005, too_coarse=True),
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
            "ZeRO-2, control 2": Method("", "ZeRO-2", noise=-NOISE),
            "ZeRO-2, control 3": Method("", "ZeRO-2", noise=2 * NOISE),
            "ZeRO-3": Method("", "ZeRO-2", {"stage": 3}),
            **{name: Method(name, "ZeRO-2") for name in ("IGG", "III")},
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
    """A training run."""

    method: str
    seed: int
    text: str  # fingerprint of the text
    steps: int
    device: str = "cpu"
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # mean loss over ranks in each step
    held_out: dict[str, float] = field(default_factory=dict)  # loss on held-out text, by the number of steps taken
    # For each start of the program, its first step and its ``records.circumstances``.
    parts: list[dict[str, Any]] = field(default_factory=list)
    optimizer: str = "AdamW"
    groups: int = 2
    norms: list[float] = field(default_factory=list)  # norm of the full gradient before clipping
    own_loss: float = 0.0  # mean loss on held-out text with each group's own weights, one step before the end
    received: float = 0.0  # bytes that a rank received in a step from other groups, by the kernel's counters
    # elements, matrices: elements of the model, and those that Muon trains.
    elements: int = 0
    matrices: int = 0

    @property
    def name(self) -> str:
        more = [self.optimizer] * (self.optimizer != "AdamW") + [f"{self.groups}"] * (self.groups != 2)
        return "-".join([re.sub(r"[, +]+", "_", self.method), *more, str(self.seed)])

    @property
    def final_loss(self) -> float:
        """Return the mean over the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, round(FINAL * self.steps)) :])

    @property
    def final_held_out(self) -> float:
        return self.held_out[str(self.steps)]

    def write(self, folder: Path) -> None:
        held_out = {step: round(loss, DIGITS) for step, loss in self.held_out.items()}
        rounded = asdict(self) | {"losses": [round(loss, DIGITS) for loss in self.losses], "held_out": held_out}
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{self.name}.part"
        part.write_text(json.dumps(rounded).replace(', "', ',\n"') + "\n", encoding="utf-8")
        part.replace(folder / f"{self.name}.json")

    @classmethod
    def read(cls, path: Path) -> "Run":
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def found(self, folder: Path) -> "Run | None":
        """Return this run from its file, None without one; ValueError if that has another text or other steps."""
        path = folder / f"{self.name}.json"
        if not path.exists():
            return None
        run = Run.read(path)
        expected, got = ((run_of_file.name, run_of_file.text, run_of_file.steps) for run_of_file in (self, run))
        if expected != got:
            raise ValueError(f"{path}: expected a run of {expected}, got one of {got}: move it away.")
        return run


def read_runs(study: Study) -> list[Run]:
    runs = [Run.read(path) for path in study.folder.glob("*.json")]
    order = list(study.methods)
    return sorted(runs, key=lambda run: (run.seed, order.index(run.method)))


def planned(study: Study, optimizers: Iterable[str], groups: Iterable[int], seeds: Iterable[int]) -> list[Run]:
    """Return the runs without losses, in training order: one seed of all methods before the next one."""
    return [
        Run(method, seed, "", study.steps, optimizer=optimizer, groups=number)
        for seed, number, optimizer, method in itertools.product(seeds, groups, optimizers, study.methods)
    ]


# What losses say together #########################################################################


@dataclass(frozen=True)
class Cell:
    """The runs of one method with an optimizer and a number of groups; losses by seed, its own and the reference's."""

    runs: Sequence[Run]
    losses: Mapping[int, float]
    reference: Mapping[int, float]
    against: Mapping[int, float]

    def differences(self, other_losses: Mapping[int, float]) -> list[float]:
        """Return the relative differences from others with the same seeds, one per seed."""
        return [loss / other_losses[seed] - 1 for seed, loss in self.losses.items() if seed in other_losses]


def cells(study: Study, runs: Iterable[Run]) -> dict[tuple[str, int, str], Cell]:
    runs_by_cell: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        runs_by_cell.setdefault((run.optimizer, run.groups, run.method), []).append(run)
    end = "final_held_out" if study.held_out and not study.large else "final_loss"
    losses = {key: {run.seed: getattr(run, end) for run in cell_runs} for key, cell_runs in runs_by_cell.items()}
    return {
        (*at, name): Cell(
            cell_runs, *(losses.get((*at, other), {}) for other in (name, study.reference, method.against))
        )
        for (*at, name), cell_runs in runs_by_cell.items()
        for method in [study.methods[name]]
    }


def judged(study: Study, runs: Sequence[Run]) -> Iterator[tuple[bool, str]]:
    """Judge each method that has a bound, by the ratio of losses with ``tools/compare``'s interval over seeds."""
    for (optimizer, groups, name), cell in cells(study, runs).items():
        method, each = study.methods[name], cell.differences(cell.against)
        if method.bound is None or not each:
            continue
        own = [seed for seed in cell.losses if seed in cell.against]
        interval = ratio([[cell.against[seed]] for seed in own], [[cell.losses[seed]] for seed in own])
        mean, low, high = interval.value - 1, interval.low - 1, interval.high - 1
        within_bound = max(map(abs, each)) <= method.bound if method.each else abs(mean) <= method.bound
        passed = min(each) > method.bound if method.too_coarse else within_bound
        line = (
            f"{optimizer}, {groups} groups, {name}: the final loss is {mean:+.2%} ({low:+.2%} to {high:+.2%}) from "
            f"{method.against}, {'more than' if method.too_coarse else 'bound'} {method.bound:.1%}"
            f"{' with every seed' if method.each or method.too_coarse else ''}; "
            f"each {', '.join(f'{one:+.2%}' for one in each)}"
        )
        yield passed, f"{'PASS' if passed else 'FAIL'}  {line}"


def judged_norms(study: Study, runs: Sequence[Run]) -> Iterator[tuple[bool, str]]:
    """Judge the gradients' norms of methods that have bounds with every seed, by the ratio of means over a run."""
    runs_by_key = {(run.optimizer, run.groups, run.method, run.seed): run for run in runs}
    for run in (run for run in runs if study.methods[run.method].each):
        other = runs_by_key[run.optimizer, run.groups, study.methods[run.method].against, run.seed]
        norms = statistics.fmean(run.norms) / statistics.fmean(other.norms)
        passed, line = NORM_BOUNDS[0] <= norms <= NORM_BOUNDS[1], f"{run.name}: norms of gradients are {norms:.3f} of"
        yield passed, f"{'PASS' if passed else 'FAIL'}  {line} the exact ones"


# Rows, for each optimizer, number of groups and method, and their table ##############################


def rows_of(study: Study, runs: Sequence[Run]) -> list[dict[str, Any]]:
    runs_by_key = {(run.optimizer, run.groups, run.method, run.seed): run for run in runs}
    rows = []
    for (optimizer, groups, name), cell in cells(study, runs).items():
        against = study.methods[name].against
        pairs = [(run, runs_by_key.get((optimizer, groups, against, run.seed))) for run in cell.runs]
        norms = [statistics.fmean(run.norms) / statistics.fmean(o.norms) for run, o in pairs if o and run.norms]
        apart = study.held_out and not study.large  # the loss is held out, that of training another one
        each, losses = cell.differences(cell.against), list(cell.losses.values())
        rows.append(
            {
                "dtype": "bf16" if study.bf16 else "fp32",
                "ranks": groups * study.group_size,
                "group_size": study.group_size,
                "steps": cell.runs[0].steps,
                "seeds": len(losses),
                "optimizer": optimizer,
                "method": name,
                "final_loss": _mean(losses),
                "seed_spread": round(statistics.stdev(losses), 6) if len(losses) > 1 else 0.0,
                "relative_difference": _mean(each) if each else "",
                "relative_difference_by_seed": _listed(each),
                "from_reference_by_seed": _listed(cell.differences(cell.reference)),
                "held_out_loss": _mean(run.final_held_out for run in cell.runs) if study.large else "",
                "own_loss": _mean(run.own_loss for run in cell.runs) if apart else "",
                "training_loss": _mean(run.final_loss for run in cell.runs) if apart else "",
                "ratio_of_mean_norms": round(statistics.fmean(norms), 5) if norms else "",
                "inter_bytes": round(max(run.received for run in cell.runs)),  # older runs have none
                "inter_bytes_formula": "" if study.held_out else round(formula(study, cell.runs[0])),
                "seconds_a_run": round(statistics.fmean(run.seconds for run in cell.runs), 1),
            }
        )
    return rows


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 6)


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.6f}" for value in values)


def formula(study: Study, run: Run) -> float:
    """Return the bytes that a rank receives between groups in a step, by the planner; with Muon, an upper bound."""
    method, width = study.methods[run.method], 2 if study.bf16 else 4
    sent = Compression.parse(*(method.zero.get(key) for key in ("zeropp_loco_param", "paro_quantized_updates")))
    sizes = GroupSizes(run.groups * study.group_size, study.group_size)
    strategy = parse_strategy(method.strategy)
    states = ModelStates.of(run.elements, parameter_bytes=width, gradient_bytes=width)
    moved = [sent.volume(phase, width, width) for phase in strategy.phases(sizes, states)]
    return sum(volume.inter for volume in [*moved, strategy.exchange(sizes, width * run.matrices)])


def read(study: Study) -> list[dict[str, str]]:
    rows_by_key = {(row["optimizer"], row["ranks"], row["method"]): row for row in read_rows(RESULTS / study.file)}
    at = dict.fromkeys((optimizer, ranks) for optimizer, ranks, _ in rows_by_key)
    return [rows_by_key[(*key, name)] for key in at for name in study.methods if (*key, name) in rows_by_key]


def table(study: Study, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each row; columns that are empty in all lines are left out."""
    header = ["optimizer", "ranks", "method", "loss", "± seeds", "baseline", "% apart", "each seed"]
    header += [f"% from {study.reference}", "own weights", "training", "held-out", "kB a step"]
    lines = []
    for row in rows:
        against = study.methods[row["method"]].against
        line = [row["optimizer"], str(row["ranks"]), row["method"], _loss(row["final_loss"])]
        line += [_loss(row["seed_spread"]), against, _percents(str(row["relative_difference"]))]
        line.append(_percents(row["relative_difference_by_seed"]))
        line.append(_percents(row.get("from_reference_by_seed", "")) if against != study.reference else "")
        line += [_loss(row.get(f"{name}_loss")) for name in ("own", "training", "held_out")]
        lines.append([*line, f"{float(row['inter_bytes']) / 1e3:.1f}" if row.get("inter_bytes") else ""])
    columns = [at for at in range(len(header)) if any(line[at] for line in lines)]
    return [header[at] for at in columns], [[line[at] for at in columns] for line in lines]


def _loss(value: Any) -> str:
    return f"{float(value):.4f}" if value and float(value) else ""


def _percents(listed: str) -> str:
    return ", ".join(f"{100 * float(number):+.2f}" for number in listed.split())


def stored(name: str, *optimizers: str) -> Table:
    """Return the table of a study's rows in the repository, of some optimizers."""
    study = STUDIES[name]
    return table(study, [row for row in read(study) if not optimizers or row["optimizer"] in optimizers])
