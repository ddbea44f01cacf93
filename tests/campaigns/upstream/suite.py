# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs tests of a DeepSpeed checkout against the DeepSpeed that is installed, by workers of pytest-xdist.
pytest-timeout ends a worker whose test takes too long, and pytest-xdist starts another one."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import ROOT
from tests.campaigns.upstream.outcomes import ERROR, Outcome, counts, file_of

INSIDE = Path(__file__).resolve().parent / "inside"
# Compiled before the first test, since it takes longer than a test may, and a killed compile leaves a lock.
_BUILDERS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "CPUAdagradBuilder", "PinMemoryBuilder")

# What is put in the place of what in the copy: file, old, new. A checkout that has no such text needs no such change.
_ADAPTED = (
    # On a CPU the current device is a number in a string, which torch takes for no device.
    (
        "unit/common.py",
        "device = get_accelerator().current_device()\n",
        "device = get_accelerator().current_device_name()\n",
    ),
    # A rank that ends in what is no Exception (pytest.raises that saw none) is never heard of again by the pool.
    (
        "unit/common.py",
        "            else:\n                raise e\n",
        "            else:\n                raise e if isinstance(e, Exception) else AssertionError(str(e))\n",
    ),
    # DeepSpeed 0.19.8 has removed it, and tests of checkpoints compare it.
    (
        "unit/checkpoint/common.py",
        "    assert saved_model.sparse_tensor_module_names == loaded_model.sparse_tensor_module_names\n",
        "",
    ),
)


class Failed(Exception):
    """Something that a user must be told, without a traceback."""


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: stock, or strategies by stage."""

    strategies: tuple[str, ...] = ()  # strategies of the stages 1, 2 and 3; none for stock
    group_size: int | None = None  # see ``upstream_forced.with_strategy``

    @property
    def name(self) -> str:
        return "-".join(self.strategies) or "stock"


@dataclass
class Suite:
    """The tests of a checkout."""

    # A copy of the folder ``tests``, with nothing beside it: upstream's tests put the folder above it on the search
    # path, and would find the checkout's DeepSpeed there.
    tests: Path
    work: Path  # the folder for all files
    limit: float = 120.0  # seconds that a test may take
    extra: Path | None = None  # a folder of packages that come before the environment's
    _numbers: Any = field(default_factory=itertools.count)

    @classmethod
    def of(cls, checkout: Path, work: Path, **more: Any) -> "Suite":
        """Copy the tests of a checkout; Failed if there are none."""
        if not (checkout / "tests" / "unit" / "common.py").is_file():
            raise Failed(f"expected a checkout of DeepSpeed with tests/unit/common.py, got {checkout}")
        tests = work / "checkout" / "tests"
        shutil.rmtree(tests, ignore_errors=True)
        shutil.copytree(checkout / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in _ADAPTED:
            path = tests / file
            if path.is_file():
                path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        return cls(tests, work, **more)

    @property
    def _extensions(self) -> Path:
        return self.work / "torch_extensions"

    def build(self) -> None:
        """Compile the operators that tests on a CPU use. Those that cannot be compiled are missing on both sides."""
        for lock in self._extensions.glob("*/lock"):  # of a compile that was killed
            lock.unlink()
        job = self._job(Side(), None)
        ask = (
            "import sys\n"
            "from deepspeed.accelerator import get_accelerator\n"
            f"for name in {_BUILDERS}:\n"
            "    builder = get_accelerator().create_op_builder(name)\n"
            "    try:\n"
            "        builder.load()\n"
            "    except Exception as error:\n"
            "        print(name, 'cannot be compiled:', error, file=sys.stderr)\n"
        )
        with open(job.log, "wb") as log:
            command = [sys.executable, "-c", ask]
            subprocess.run(command, env=self._environment(job), stdout=log, stderr=log, check=False)
        for line in _tail(job.log).splitlines():
            if "cannot be compiled" in line:
                print(line)

    def collect(self, paths: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the ids of all tests in these files and folders, and why files have none that cannot be imported;
        Failed if pytest could not run, or found another DeepSpeed than the installed one."""
        node = [path for path in paths if (self.tests / file_of(path)).exists()]
        if not node:
            raise Failed(f"none of these is in {self.tests}: {', '.join(paths)}")
        job = self._job(Side(), None)
        self._run(job, ["--collect-only", *node])
        lines = _lines(job.record)
        results = [line for line in lines if "collected" in line]
        if not results:
            raise Failed(f"pytest collected nothing:\n{_tail(job.log)}")
        location = results[0]["deepspeed"]
        if location is None or Path(location).is_relative_to(self.tests.parent):
            raise Failed(f"expected an installed DeepSpeed, got {location}")
        return results[0]["collected"], {line["uncollected"]: line["text"] for line in lines if "uncollected" in line}

    def run(self, tests: Sequence[str], side: Side) -> dict[str, Outcome]:
        if not tests:
            return {}
        job = self._job(side, list(tests))
        print(f"{side.name}: {len(tests)} tests; progress is in {job.log}", flush=True)
        limit = ["--timeout", str(self.limit), "--timeout-method", "thread", "--max-worker-restart", str(len(tests))]
        self._run(job, ["-n", "2", *limit, *dict.fromkeys(map(file_of, sorted(tests)))])
        lines = _lines(job.record)
        outcomes = {line["test"]: Outcome.of(line) for line in lines if "test" in line}
        why = "\n".join(line["text"] for line in lines if "uncollected" in line) or f"not run: {_tail(job.log)}"
        outcomes |= {test: Outcome(ERROR, why) for test in tests if test not in outcomes}
        print(f"{side.name}: {counts(outcomes.values())}", flush=True)
        return outcomes

    def _job(self, side: Side, tests: list[str] | None) -> "_PytestRun":
        folder = self.work / "jobs" / f"{side.name}-{os.getpid()}-{next(self._numbers)}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        job = _PytestRun(folder, side)
        entry = job.library / "upstream_forced-0.dist-info" / "entry_points.txt"
        entry.parent.mkdir(parents=True)
        entry.write_text("[torch.backends]\nupstream_forced = upstream_forced:autoload\n", encoding="utf-8")
        if side.strategies:  # this package, whichever is installed
            (job.library / "deepspeed_ext").symlink_to(ROOT / "deepspeed_ext")
        content = {"tests": tests, "record": str(job.record), "notes": str(job.notes)}
        job.file.write_text(json.dumps(content), encoding="utf-8")
        return job

    def _run(self, job: "_PytestRun", arguments: list[str]) -> None:
        """Run pytest to its end, and kill what it has left."""
        command = [sys.executable, "-m", "pytest", "-p", "upstream_recorder", "-p", "no:cacheprovider"]
        command += ["--basetemp", str(job.temporary), "-c", "pytest.ini", "--continue-on-collection-errors"]
        command += arguments
        how: dict[str, Any] = {"cwd": self.tests, "env": self._environment(job), "start_new_session": True}
        with open(job.log, "wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **how)
            try:
                process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(job.temporary, ignore_errors=True)

    def _environment(self, job: "_PytestRun") -> dict[str, str]:
        path = [INSIDE, job.library, *([self.extra] if self.extra else [])]
        added = {"UPSTREAM_JOB": str(job.file), "TORCH_EXTENSIONS_DIR": str(self._extensions)}
        added |= {"DS_UNITTEST_TIMEOUT": str(int(10 * self.limit)), "DS_DISABLE_REUSE_DIST_ENV": "1"}
        if job.side.strategies:
            strategies = dict(zip("123", job.side.strategies, strict=True))
            forced = {"strategies": strategies, "group_size": job.side.group_size, "notes": str(job.notes)}
            added["UPSTREAM_FORCED"] = json.dumps(forced)
        else:
            added["DEEPSPEED_EXT_DISABLE"] = "1"
        defaults = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if os.environ.get("DS_ACCELERATOR", "cpu") == "cpu":
            defaults["LOCAL_SIZE"] = "8"  # what a process that is no rank takes for the number of devices
        # A folder of ours on the search path would bring the package to stock's side as well.
        hidden = ("PYTHONPATH", "DEEPSPEED_EXT_DISABLE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        retained: Mapping[str, str] = {key: value for key, value in os.environ.items() if key not in hidden}
        return {**defaults, **retained, **added, "PYTHONPATH": os.pathsep.join(map(str, path))}


class _PytestRun:
    """One run of pytest, and its files in a folder."""

    def __init__(self, folder: Path, side: Side) -> None:
        self.side, self.file, self.record = side, folder / "job.json", folder / "record.jsonl"
        self.notes, self.log = folder / "made.txt", folder / "pytest.log"
        self.library, self.temporary = folder / "library", folder / "temporary"


def _lines(record: Path) -> list[dict[str, Any]]:
    """Return what a recorder has written; the last line may be a part of one."""
    if not record.is_file():
        return []
    return [json.loads(line) for line in record.read_text(encoding="utf-8").split("\n")[:-1]]


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]
