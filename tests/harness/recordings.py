# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Records which tests run which lines, and runs the tests of changed lines: ``scripts/test changed [BASE]``.

A change is the difference from BASE, a revision of git (by default HEAD), including uncommitted changes. Further
arguments go to pytest.

Note [How tests are recorded]
    ``scripts/test record`` loads this module as a plugin of pytest. Every process that runs tests (pytest's own,
    workers of pytest-xdist, ranks) has a ``Recorder``, which is coverage.py with the id of the running test as its
    context. Python processes that tests start read the id from the environment.
    Code that runs once for several tests (the import of their file, the setup of a shared fixture) has the id of the
    file as its context, and counts for all tests in it. That of a fixture of the whole session counts for none.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts import ROOT
from tests.harness import recorder
from tests.harness.tiers import folder_of

FOLDER = ROOT / "build" / "recording"
SECONDS = 150.0  # of tests as recorded; with the start of everything, a change takes less than 4 minutes
_FOR_ALL = ("pyproject.toml", "scripts/development.txt", "scripts/environment", "scripts/test", "setup.py")
_CALLS_KERNELS = "deepspeed_ext/loco/ops.py"


class Recording(NamedTuple):
    """The lines that ran in each test; files and lines are those of the recorded version."""

    about: Mapping[str, Any]
    tests: Mapping[str, float]  # seconds
    lines_of: Callable[[str], Mapping[int, Set[str]]]  # of a file: the contexts in which each line ran
    source_of: Callable[[str], str]  # of a file

    def concerned(self, file: str, lines: Iterable[int]) -> set[str]:
        """Return the tests that run lines; without any, those of the file's folder, and of pages and tables."""
        if file.startswith("csrc/"):
            file, lines = _CALLS_KERNELS, [0]
        run = self.lines_of(file)
        functions = _functions(self.source_of(file)) if run else []
        contexts = {item for line in lines for near in _witnesses(line, functions, sorted(run)) for item in run[near]}
        if not contexts:
            folders = {f"{part}/" for part in Path(file).parts} | {"test_*.py"}
            return {test for test in self.tests if folder_of(test) in folders}
        results = contexts & self.tests.keys()
        return results | {test for test in self.tests if test.startswith(tuple(contexts - results))}

    def fitting(self, tests: Iterable[str], files: Iterable[str], seconds: float) -> list[str]:
        """Return as many tests as fit into a time, in the order in which a fault is likely to be found soon: first
        cases of all functions before second ones, then tests of a changed file's room, and the quickest."""
        folders = {f"{part}/" for file in files for part in Path(file).parts}
        cases, order, chosen = Counter[str](), [], []
        for test in sorted(tests, key=lambda test: (self.tests[test], test)):
            function = test.partition("[")[0]
            order.append((cases[function], folder_of(test) not in folders, self.tests[test], test))
            cases[function] += 1
        for *_, test in sorted(order):
            if self.tests[test] <= seconds:
                seconds -= self.tests[test]
                chosen.append(test)
        return chosen


def _functions(source: str) -> list[tuple[int, int, int]]:
    """Return the first line, the first line of the body, and the last line of each function."""
    nodes = [item for item in ast.walk(ast.parse(source)) if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    firsts = [min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) for node in nodes]
    return [(at, node.body[0].lineno, node.end_lineno or 0) for at, node in zip(firsts, nodes, strict=True)]


def _witnesses(line: int, functions: list[tuple[int, int, int]], run: list[int]) -> list[int]:
    """Return the lines that ran where a line matters: it or its neighbors in a function, or all of a function or file.
    A function's head matters to its body. Lines outside of functions run at import, and matter to the file."""
    for _, body, last in sorted((item for item in functions if item[0] <= line <= item[2]), reverse=True):
        if ran := [item for item in run if body <= item <= last]:
            near = [item for item in ran if item <= line][-1:] + [item for item in ran if item >= line][:1]
            return near if line >= body else ran
    return [item for item in run if any(body <= item <= last for _, body, last in functions)]


def load(folder: Path = FOLDER) -> Recording | None:
    import coverage

    if not (folder / "index.json").exists():
        return None
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    if subprocess.run(["git", "cat-file", "-e", index["tree"]], cwd=ROOT, stderr=subprocess.DEVNULL).returncode:
        return None
    data = coverage.CoverageData(str(folder / "coverage"), read_only=True)
    data.read()

    def lines_of(file: str) -> Mapping[int, Set[str]]:
        results = {line: set(names) - {""} for line, names in data.contexts_by_lineno(str(ROOT / file)).items()}
        return {line: names for line, names in results.items() if names}

    tree = index["tree"]
    return Recording(index, index["tests"], cache(lines_of), lambda file: git("show", f"{tree}:{file}"))


def git(*arguments: str, index: Path | None = None) -> str:
    environment = os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {})
    done = subprocess.run(["git", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def tree_of_files(scratch: Path) -> str:
    """Return git's name of the files as they are now, uncommitted ones included."""
    scratch.mkdir(parents=True, exist_ok=True)
    for command in (("read-tree", "HEAD"), ("add", "--all")):
        git(*command, index=scratch / "index")
    return git("write-tree", index=scratch / "index").strip()


def lines_in(diff: str, side: str) -> set[int]:
    """Return the lines of one side ("-" or "+") of a diff without context; where it has none, the neighbors."""
    results = set[int]()
    for start, count in re.findall(rf"^@@ .*?\{side}(\d+)(?:,(\d+))? .*?@@", diff, re.MULTILINE):
        first, length = int(start), int(count or 1)
        results |= set(range(first, first + (length or 2)))
    return results


def differing(base: str, recorded: str, now: str, file: str) -> set[int]:
    """Return the recorded lines of a file that differ from BASE, or now."""
    options = ("-U0", "--no-color", "--no-ext-diff", "--no-renames")
    before, behind = (git("diff", *options, *trees, "--", file) for trees in ((base, recorded), (recorded, now)))
    return lines_in(before, "+") | lines_in(behind, "-")


def main() -> int:
    base, *of_pytest = sys.argv[1:] if sys.argv[1:2] and sys.argv[1][0] != "-" else ["HEAD", *sys.argv[1:]]
    now, recording = tree_of_files(ROOT / "build" / "changed"), load()
    files = git("diff", "--name-only", "--no-renames", base, now).splitlines()
    if not files:
        print(f"nothing differs from {base}")
        return 0
    for_all = [file for file in files if file in _FOR_ALL or re.search(r"^tests/harness/|conftest\.py$", file)]
    if for_all or recording is None:
        why = f"any may depend on {', '.join(for_all)}" if for_all else "there is no recording (scripts/test record)"
        print(f"all tests run, because {why}", flush=True)
        return pytest.main(of_pytest)
    print(f"recording: {len(recording.tests)} tests; {recording.about['commit'][:8]}, {recording.about['date']}")
    tests = {file: recording.concerned(file, differing(base, recording.about["tree"], now, file)) for file in files}
    print("\n".join(f"  {file}: {len(results)} tests" for file, results in tests.items()))
    results = set[str]().union(*tests.values())
    run = recording.fitting(results, files, SECONDS)
    minutes = sum(recording.tests[test] for test in results) / 60
    print(f"{len(run)} of {len(results)} tests ({minutes:.1f} minutes) fit into {SECONDS:.0f} s", flush=True)
    edited = {file for file in files if re.match(r"tests/unit/(.*/)?test_\w+\.py$", file)}
    paths = {path for path in edited.union(test.split("::")[0] for test in run) if (ROOT / path).exists()}
    chosen = ROOT / "build" / "changed" / "chosen.json"
    chosen.write_text(json.dumps({"run": run, "known": list(recording.tests), "edited": [*edited]}), encoding="utf-8")
    code = pytest.main(["-p", __spec__.name, f"--chosen={chosen}", *of_pytest, *sorted(paths)]) if paths else 0
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FOLDER", help="record which test runs which line")
    parser.addoption("--chosen", metavar="FILE", help="run only these tests, and new ones; ids may be gone")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record:
        config.pluginmanager.register(_Recording(config, Path(config.option.record).resolve()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.chosen:
        chosen = json.loads(Path(config.option.chosen).read_text(encoding="utf-8"))
        new = {item.nodeid for item in items if item.nodeid.split("::")[0] in chosen["edited"]} - {*chosen["known"]}
        run = {*chosen["run"], *new}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in run])
        items[:] = [item for item in items if item.nodeid in run]


class _Recording:
    """Records a session; the process that has all reports of tests makes one recording of all processes' files."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._folder, self._parts = folder, folder.with_name(folder.name + ".parts")
        self._seconds, self._has_all = defaultdict[str, float](float), not hasattr(config, "workerinput")
        if self._has_all:
            shutil.rmtree(self._parts, ignore_errors=True)
            date, tree = datetime.now(timezone.utc).isoformat(" ", "minutes"), tree_of_files(self._parts)
            self._about = {"commit": git("rev-parse", "HEAD").strip(), "tree": tree, "date": date}
            recorder.prepare(self._parts)
        self._recorder = recorder.Recorder(self._parts)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        with self._recorder.context(collector.nodeid if isinstance(collector, pytest.Module) else ""):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with self._recorder.context(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
        with self._recorder.context(request.node.nodeid):  # of the test, its file or its folder
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        import coverage

        self._recorder.stop()
        if self._has_all:
            del os.environ[recorder.FOLDER]
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            data = coverage.Coverage(data_file=str(self._folder / "coverage"), config_file=False, context="")
            data.combine([str(path) for path in self._parts.glob("coverage.*") if path.stat().st_size])
            data.save()
            tests = {test: round(seconds, 3) for test, seconds in self._seconds.items()}
            (self._folder / "index.json").write_text(json.dumps({**self._about, "tests": tests}), encoding="utf-8")
            shutil.rmtree(self._parts)
            print(f"recorded {len(tests)} tests in {self._folder}")


if __name__ == "__main__":
    sys.exit(main())
