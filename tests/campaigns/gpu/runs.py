# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The experiments, and how they run: several at once, each in its own process and within a time limit. While an
experiment runs, it writes its report, a JSON object, to a file again and again: ``checks`` (name: whether it held),
``figures`` (name: a value) and, at its end, ``done``. So its findings are kept if it is killed."""

import contextlib
import json
import os
import pkgutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

NO_GPU = 3  # exit status
SAID = "No GPU: nothing was run. torch sees none of NVIDIA's."
PASSED, FAILED, CRASHED, HUNG, NOT_RUN = "passed", "failed", "crashed", "hung", "not run"
LEAST = 15.0  # seconds; with less time left no experiment is begun
_GRACE = 5.0  # seconds between asking a process to end and killing it
_LOOK = 0.1  # seconds between looks at a process
_TAIL = 4000  # characters of the output that are kept
_SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}


class Experiment(NamedTuple):
    """An experiment."""

    name: str  # T1, ...
    title: str
    limit: float  # seconds
    function: str  # module and function
    variables: Mapping[str, str] = {}  # variables of its environment, on a GPU
    alone: bool = False  # whether it measures time, and so runs alone


# The most useful first, should the budget not suffice for all. The first builds the kernels.
EXPERIMENTS = (
    Experiment("T0", "kernels: drawn cases beside the reference and the CPU's kernels", 600, "kernels:drawn"),
    Experiment("T1", "a slow optimizer step is waited for", 150, "order:slow_step"),
    Experiment("T2", "late results are waited for: all strategies, virtual ranks", 300, "order:late_results"),
    Experiment("T3", "torch's sanitizer over T1 and T2", 420, "order:sanitizer", _SANITIZER),
    Experiment("T3B", "torch's sanitizer: other strategies", 240, "order:sanitizer_of_others", _SANITIZER),
    Experiment("T14", "a GPU's compute under an emulated network", 420, "shared_network:shared_network", alone=True),
    Experiment("T8A", "kernels: their tests", 420, "kernels:bits"),
    Experiment("T6", "ranks that share the GPU: all strategies beside stock DeepSpeed", 300, "ranks:gloo_ranks"),
    Experiment("T10", "ranks that share the GPU: states on the host, few bits, Muon", 300, "ranks:states"),
    Experiment("T11", "ranks that share the GPU: saves beside the training, exports", 220, "saves:aside"),
    Experiment("T12", "ranks that share the GPU, and one of NCCL's: reports, doctor", 220, "reports:all_checks"),
    Experiment("T13", "ranks that share the GPU: experts beside stock DeepSpeed", 220, "experts:experts"),
    Experiment("T7", "NCCL at one rank, without the short cuts", 150, "ranks:nccl_alone"),
    Experiment("T5", "host synchronizations in micro-steps 5 to 10", 180, "timeline:synchronizations"),
    Experiment("T4", "what overlaps with what", 120, "timeline:timeline", alone=True),
    Experiment("T8B", "kernels: their bandwidth beside a copy's", 180, "kernels:bandwidth", alone=True),
    Experiment("T9", "memory beside the formulas", 120, "kernels:memory"),
)


@dataclass
class Outcome:
    """The outcome of an experiment."""

    # name, title: from the ``Experiment``.
    name: str
    title: str
    kind: str  # passed, failed, crashed, hung or not run
    seconds: float = 0.0
    checks: dict[str, bool] = field(default_factory=dict)  # name: whether it held
    figures: dict[str, Any] = field(default_factory=dict)  # name: measured value
    text: str = ""  # why it did not pass; the end of its output if it crashed or hung


# ---- within an experiment


class Report:
    """The findings of an experiment, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._content: dict[str, Any] = {"checks": {}, "figures": {}}
        self.figures: dict[str, Any] = self._content["figures"]

    def check(self, name: str, held: bool) -> None:
        self._content["checks"][name] = bool(held)
        self._write()

    def figure(self, name: str, value: Any) -> None:
        self._content["figures"][name] = value
        self._write()

    def skip(self, why: str) -> None:
        self._content["skipped"] = why
        self._write()

    def done(self) -> None:
        self._content["done"] = True
        self._write()

    def _write(self) -> None:
        replace(self._file, json.dumps(self._content, indent=1))


@dataclass(frozen=True)
class Setup:
    """The setup of an experiment: device "cuda" or "cpu", short runs if small, and its report."""

    device: str
    small: bool
    report: Any
    enter: Callable[[int], None] | None = None  # what each rank that shares the GPU calls first, with its number

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


def run_here(name: str, setup: Setup) -> None:
    import deepspeed_ext  # noqa: F401  it activates itself where it is installed; here may be its sources alone

    function = next(experiment.function for experiment in EXPERIMENTS if experiment.name == name)
    pkgutil.resolve_name(f"tests.campaigns.gpu.{function}")(setup)


def has_gpu() -> bool:
    import torch

    return bool(torch.version.cuda) and torch.cuda.is_available()


# ---- all of them


def run_all(
    experiments: Sequence[Experiment],
    command: Callable[[Experiment, Path], Sequence[str]],
    budget: float,
    folder: Path,
    note: Callable[[list[Outcome]], None],
    environment: Mapping[str, str],
    at_once: int = 1,
) -> list[Outcome]:
    """Run experiments in this order while the budget of seconds lasts; one that crashes or hangs does not end the
    others. Where several run at once, those that run alone come last. ``command`` returns what runs one, given the
    file for its report; ``note`` is given all outcomes after each."""
    begin, outcomes = time.monotonic(), list[Outcome]()
    noting, over = threading.Lock(), threading.Event()

    def run_one(one: Experiment) -> None:
        remaining = budget - (time.monotonic() - begin)
        if remaining < min(LEAST, one.limit):
            outcome = Outcome(one.name, one.title, NOT_RUN, text=f"{max(0.0, remaining):.0f} s of {budget:.0f} s left")
        else:
            report, log = (folder / f"{one.name}.{end}" for end in ("json", "log"))
            arguments, variables = command(one, report), {**environment, **one.variables}
            spent = time.monotonic()
            outcome = _outcome(one, _run(arguments, variables, log, min(remaining, one.limit), over), report, log)
            outcome.seconds = round(time.monotonic() - spent, 1)
        with noting:
            outcomes.append(outcome)
            note(outcomes)

    alone = [one for one in experiments if one.alone or at_once == 1]
    for subset, workers in (([one for one in experiments if one not in alone], at_once), (alone, 1)):
        with ThreadPoolExecutor(workers) as pool:
            try:
                list(pool.map(run_one, subset))
            except BaseException:
                over.set()  # what runs ends, and nothing else begins
                pool.shutdown(cancel_futures=True)
                raise
    order = [one.name for one in experiments]
    return sorted(outcomes, key=lambda one: order.index(one.name))


def _run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float, over: threading.Event
) -> int | None:
    """Return the exit status of a command; None if it was killed, with all that it has started, after its time."""
    last = time.monotonic() + (limit - _GRACE if limit > 2 * _GRACE else limit)
    with log.open("wb") as output:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        try:
            while process.poll() is None and time.monotonic() < last and not over.wait(_LOOK):
                pass
            return process.poll()
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_GRACE)
                    time.sleep(0.2)  # for the others of its group, before they are killed


def _outcome(experiment: Experiment, status: int | None, report: Path, log: Path) -> Outcome:
    results = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    checks, figures = results.get("checks", {}), results.get("figures", {})
    outcome = Outcome(experiment.name, experiment.title, PASSED, checks=checks, figures=figures)
    broken = [name for name, retained in checks.items() if not retained]
    if status != 0 or not results.get("done"):
        outcome.kind = HUNG if status is None else CRASHED
        tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
        outcome.text = f"exit status {status}\n{tail}"
    elif results.get("skipped"):
        outcome.kind, outcome.text = NOT_RUN, results["skipped"]
    elif broken or not (checks or figures):
        outcome.kind = FAILED
        outcome.text = f"did not hold: {', '.join(broken)}" if broken else "it checked nothing"
    return outcome


def replace(file: Path, text: str) -> None:
    """Write a file at once."""
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def write_results(stem: Path, about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write the results so far: ``stem``.json, and ``stem``.txt to be read."""
    record = {**about, "experiments": [asdict(outcome) for outcome in outcomes]}
    replace(stem.with_name(stem.name + ".json"), json.dumps(record, indent=1) + "\n")
    replace(stem.with_name(stem.name + ".txt"), table(about, outcomes))


def table(about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    lines = [f"{name}: {value}" for name, value in about.items()] + [""]
    for outcome in outcomes:
        passed = sum(outcome.checks.values())
        lines.append(
            f"{outcome.name:4} {outcome.kind:8} {outcome.seconds:7.1f} s  {passed}/{len(outcome.checks)} checks  "
            f"{outcome.title}"
        )
    for outcome in outcomes:
        lines += ["", f"{outcome.name} {outcome.title}", *(f"  {line}" for line in outcome.text.splitlines())]
        lines += [f"  {name}: {value}" for name, value in outcome.figures.items()]
    return "\n".join(lines) + "\n"
