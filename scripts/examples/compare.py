# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Train the same model twice, with stock ZeRO-3 and with a PaRO strategy, and show the differences.

Both runs use the stock ``deepspeed`` launcher, the same script and the same data; only the configuration file differs.
The losses must agree, and the bytes sent between groups must match the formula. All ranks are CPU
processes on this machine, which count as ``ranks / group size`` groups. The bytes are exact (they are read from the
kernel's counters), but the seconds say nothing about a cluster with slow links between groups.

Exit status 0 if every check passes, 1 if one fails, 2 if there was nothing to check.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from deepspeed_ext.strategy import GroupSizes, ModelStates, Strategy, Volume, parse_strategy, plain_name
from deepspeed_ext.tools.compare.verdict import BOUNDS, loss_difference
from scripts import ROOT
from scripts.emulation.launching import RunFailed, exit_on_signals, launch

CONFIGS = ROOT / "scripts" / "examples" / "configs"
BYTES_BOUND = 0.02
COLORS = ("#7a8ba6", "#d9622b")
MEGABYTE = 1e6
_STAGES = {1: "NNG", 2: "NGG", 3: "GGG"}


@dataclass
class TrainingRun:
    """A finished run: its configuration, the report of ``measured_training``, and how long all of it took."""

    config: dict[str, Any]
    report: dict[str, Any]
    wall_seconds: float

    @property
    def strategy(self) -> Strategy:
        return strategy_of(self.config)

    @property
    def label(self) -> str:
        return label_of(self.config)

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.report["steps"]]

    @property
    def measured(self) -> Volume:
        """Return the bytes that a rank received in a step, mean over steps and ranks."""
        summary = self.report["summary"]
        return Volume(summary["intra_bytes"], summary["inter_bytes"])

    @property
    def formula(self) -> Volume:
        """Return the bytes that a rank must receive in a step, from the strategy's three letters."""
        return self.strategy.volume(self._sizes, self._states, self.report["gradient_accumulation_steps"])

    @property
    def optimizer_formula(self) -> float:
        """Return the bytes of optimizer states that a rank must hold, from the strategy's three letters."""
        return self.strategy.memory(self._sizes, self._states).optimizer

    @property
    def _sizes(self) -> GroupSizes:
        return GroupSizes(self.report["world_size"], self.report["group_size"])

    @property
    def _states(self) -> ModelStates:
        width = self.report["parameter_bytes"] // self.report["parameters"]
        return ModelStates.of(self.report["parameters"], parameter_bytes=width, gradient_bytes=width)


@dataclass
class Check:
    """One line of the verdict: a number and the bound that it must keep."""

    what: str
    value: float
    bound: float
    unit: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.bound

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}  {self.what}: {self.value:.2g}{self.unit} (bound {self.bound:g}{self.unit})"


def strategy_of(config: dict[str, Any]) -> Strategy:
    """Return the strategy that a configuration asks for; a stock ZeRO stage is one of the strategies, too."""
    section = config["zero_optimization"]
    return parse_strategy(section["paro_strategy"] if "paro_strategy" in section else _STAGES[section["stage"]])


def label_of(config: dict[str, Any]) -> str:
    section = config["zero_optimization"]
    return str(strategy_of(config)) if "paro_strategy" in section else f"ZeRO-{section['stage']}"


def train(path: Path, group_size: int, log_path: Path, args: argparse.Namespace) -> TrainingRun:
    """Train once with this configuration under the stock launcher."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--deepspeed_config", str(path), "--report", str(report)]
        options += ["--steps", str(args.steps), "--group-size", str(group_size)]
        launch("scripts.examples.measured_training", options, args.ranks, log_path, args.timeout)
        loaded = json.loads(report.read_text())
    return TrainingRun(loaded["config"], loaded, time.perf_counter() - begin)


def print_losses(a: TrainingRun, b: TrainingRun) -> None:
    print(f"\n{'step':>4}  {'loss ' + a.label:>14}  {'loss ' + b.label:>14}  {'difference':>11}")
    for index, (remaining, right) in enumerate(zip(a.losses, b.losses, strict=True)):
        print(f"{index:>4}  {remaining:>14.6f}  {right:>14.6f}  {right - remaining:>+11.1e}")


def print_costs(runs: tuple[TrainingRun, TrainingRun]) -> None:
    report = runs[0].report
    groups = report["world_size"] // report["group_size"]
    print(
        f"\n{report['parameters'] / 1e6:.2f} M parameters, {report['world_size']} ranks in {groups} groups, "
        f"{report['gradient_accumulation_steps']} micro-batches a step; MB that a rank receives in one step:"
    )
    print(f"{'':<16}{'':<9}{'measured':>10}{'formula':>10}{'deviation':>11}")
    for kind, title in (("inter", "between groups"), ("intra", "within a group")):
        for run in runs:
            measured, formula = getattr(run.measured, kind), getattr(run.formula, kind)
            print(
                f"{title:<16}{run.label:<9}{measured / MEGABYTE:>10.3f}{formula / MEGABYTE:>10.3f}"
                f"{measured / formula - 1:>+11.1%}"
            )
    for run in runs:
        retained, formula = run.report["optimizer_bytes"], run.optimizer_formula
        print(
            f"{'optimizer state':<16}{run.label:<9}{retained / MEGABYTE:>10.3f}{formula / MEGABYTE:>10.3f}"
            f"{retained / formula - 1:>+11.1%}   (MB that a rank holds)"
        )
    for run in runs:
        summary = run.report["summary"]
        print(
            f"{'step time':<16}{run.label:<9}{summary['seconds_median']:>8.2f} s   (median; "
            f"{summary['seconds_min']:.2f} to {summary['seconds_max']:.2f} s; whole run {run.wall_seconds:.0f} s)"
        )


def checks_of(a: TrainingRun, b: TrainingRun) -> list[Check]:
    """Return the checks: the same training; B's traffic between groups and its optimizer state match the formulas."""
    loss = loss_difference(a.losses, b.losses)
    deviation = abs(b.measured.inter / b.formula.inter - 1)
    retained = abs(b.report["optimizer_bytes"] / b.optimizer_formula - 1)
    share, due = b.measured.inter / a.measured.inter, b.formula.inter / a.formula.inter
    return [
        Check(f"largest relative difference of the losses, {b.label} against {a.label}", loss, BOUNDS["float32"]),
        Check(f"bytes between groups of {b.label} against the formula", 100 * deviation, 100 * BYTES_BOUND, " %"),
        Check(f"bytes between groups of {b.label} as a share of {a.label}'s", 100 * share, round(100 * due, 1), " %"),
        Check(
            f"optimizer state of a rank with {b.label} against the formula", 100 * retained, 100 * BYTES_BOUND, " %"
        ),
    ]


def print_verdict(a: TrainingRun, b: TrainingRun, checks: list[Check]) -> None:
    ideal, measured = a.formula.inter / b.formula.inter, a.measured.inter / b.measured.inter
    print()
    for check in checks:
        print(check)
    print(f"INFO  bytes between groups, {a.label} / {b.label}: {ideal:.1f} by formula, {measured:.1f} measured")
    print(
        f"      The formula is the fair figure: it is {a.label} with ideal collectives. gloo gives {a.label} a "
        "reduce-scatter\n      that sends as much as an all-reduce, and flat rings that cross between groups more "
        "often than need be."
    )


def draw_losses(axes: Axes, a: TrainingRun, b: TrainingRun, checks: list[Check]) -> None:
    axes.plot(a.losses, color=COLORS[0], linewidth=6, alpha=0.6, label=a.label, solid_capstyle="round")
    axes.plot(b.losses, color=COLORS[1], linewidth=1.5, marker="o", markersize=3.5, label=b.label)
    axes.set(title="Loss", xlabel="optimizer step", ylabel="loss (nats per byte)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.text(0.97, 0.72, f"largest relative difference {checks[0].value:.1e}", transform=axes.transAxes, ha="right")
    axes.legend(frameon=False, loc="upper right")


def draw_bytes(axes: Axes, runs: tuple[TrainingRun, TrainingRun]) -> None:
    measured = [run.measured.inter / MEGABYTE for run in runs]
    formula = [run.formula.inter / MEGABYTE for run in runs]
    axes.bar([run.label for run in runs], measured, width=0.55, color=COLORS)
    axes.hlines(formula, [-0.36, 0.64], [0.36, 1.36], color="black", linewidth=1.5, label="formula")
    for index, (observed, due) in enumerate(zip(measured, formula, strict=True)):
        label = f"{observed:.1f} MB\n(formula {due:.1f})"
        axes.text(index, max(observed, due) + 0.015 * max(measured), label, ha="center", va="bottom")
    axes.set(title="Bytes between groups", ylabel="MB received per rank and step", ylim=(0, 1.18 * max(measured)))
    axes.legend(frameon=False, loc="upper right")


def draw_seconds(axes: Axes, runs: tuple[TrainingRun, TrainingRun]) -> None:
    for index, run in enumerate(runs):
        seconds = [step["seconds"] for step in run.report["steps"][1:]]
        median = run.report["summary"]["seconds_median"]
        # Points are spread sideways in the order of steps, so that none hides another.
        places = [index - 0.2 + 0.4 * position / max(len(seconds) - 1, 1) for position in range(len(seconds))]
        axes.scatter(places, seconds, s=14, color=COLORS[index], alpha=0.8, linewidths=0)
        axes.hlines(median, index - 0.3, index + 0.3, color="black", linewidth=1.5, label="median" if index else None)
        axes.text(index + 0.33, median, f"{median:.2f} s", va="center")
    axes.set_xticks([0, 1], [run.label for run in runs])
    axes.set(title="Step time on this machine (no slow links)", ylabel="seconds per step", xlim=(-0.6, 1.75))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")


def draw(path: Path, a: TrainingRun, b: TrainingRun, checks: list[Check]) -> None:
    """Draw one picture of the comparison: losses, bytes between groups, seconds."""
    report = a.report
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (remaining, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4.3), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, wspace=0.03)
    draw_losses(remaining, a, b, checks)
    draw_bytes(middle, (a, b))
    draw_seconds(right, (a, b))
    groups = report["world_size"] // report["group_size"]
    figure.suptitle(
        f"{b.label} against {a.label}: {report['parameters'] / 1e6:.1f} M parameters, {report['world_size']} CPU "
        f"ranks in {groups} groups on one machine, gloo, {report['gradient_accumulation_steps']} micro-batches a step",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_rows(path: Path, runs: tuple[TrainingRun, TrainingRun], checks: list[Check]) -> None:
    """Write all numbers of the table and the picture."""
    rows = {
        "runs": [
            {
                "label": plain_name(run.label),
                "strategy": run.strategy.name,
                "wall_seconds": run.wall_seconds,
                "formula": {"intra_bytes": run.formula.intra, "inter_bytes": run.formula.inter},
                **run.report,
            }
            for run in runs
        ],
        "checks": [
            {"what": check.what, "value": check.value, "bound": check.bound, "passed": check.passed}
            for check in checks
        ],
    }
    path.write_text(json.dumps(rows, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare two DeepSpeed configurations on this machine's CPU.")
    configs = [CONFIGS / name for name in ("zero3.json", "nig.json")]
    parser.add_argument("configs", nargs="*", type=Path, default=configs, help="two configurations: A, then B")
    parser.add_argument("--ranks", type=int, default=4, help="processes to train with")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one run may take")
    parser.add_argument("--output", type=Path, default=Path("quickstart.png"), help="the picture; rows beside it")
    args = parser.parse_args()
    if len(args.configs) != 2:
        parser.error(f"expected two configurations, got {len(args.configs)}")
    return args


def main() -> int:
    args = parse_arguments()
    exit_on_signals()
    sections = [json.loads(path.read_text())["zero_optimization"] for path in args.configs]
    group_size = next((s["paro_group_size"] for s in reversed(sections) if "paro_group_size" in s), 2)
    if not 1 < group_size < args.ranks:
        print(f"expected groups of 2 to {args.ranks - 1} of the {args.ranks} ranks, got {group_size}", file=sys.stderr)
        return 2
    runs = []
    for path in args.configs:
        log_path = args.output.with_name(f"{args.output.stem}-{path.stem}.log").resolve()
        print(f"training with {path.name} on {args.ranks} CPU ranks; log: {log_path}", flush=True)
        try:
            runs.append(train(path.resolve(), group_size, log_path, args))
        except RunFailed as failure:
            print(failure, file=sys.stderr)
            return 2
    a, b = runs
    checks = checks_of(a, b)
    print_losses(a, b)
    print_costs((a, b))
    write_rows(args.output.with_suffix(".json"), (a, b), checks)
    draw(args.output, a, b, checks)
    print_verdict(a, b, checks)
    print(f"picture: {args.output}, rows: {args.output.with_suffix('.json')}")
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
