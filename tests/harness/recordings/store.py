# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The recording on disk: coverage.py's data of all tests, and what it has no place for.

See Note [How tests are recorded]. Files are those of the git tree that the recording names, uncommitted changes
included; names are relative to the repository.
"""

import contextlib
import functools
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from scripts import ROOT
from tests.harness.recordings.differences import git, tree_of_files
from tests.harness.recordings.selection import Recorded, Recording

FOLDER = ROOT / "build" / "recording"
_DATA, _INDEX, _ORIGIN = "coverage", "index.json", "origin.json"


class Origin(NamedTuple):
    """What was recorded, and when."""

    commit: str
    tree: str
    date: str
    arguments: tuple[str, ...]  # of pytest


def write_origin(parts: Path, arguments: Sequence[str]) -> None:
    """Note, before tests run, which files they run."""
    now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="minutes")
    kept = [argument for argument in arguments if not argument.startswith("tests.harness.recordings")]
    kept = [argument for argument in kept if argument != "-p"]
    origin = Origin(git("rev-parse", "HEAD").strip(), tree_of_files(parts / "index"), now, tuple(kept))
    (parts / _ORIGIN).write_text(json.dumps(origin._asdict()), encoding="utf-8")


def combine(parts: Path, folder: Path) -> int:
    """Make one recording of the files of all processes, in place of an older one; the number of its tests."""
    import coverage

    new = parts / "combined"
    new.mkdir()
    combined = coverage.Coverage(data_file=str(new / _DATA), config_file=False, context="")
    combined.combine([str(path) for path in parts.glob(f"{_DATA}.*") if path.stat().st_size])
    combined.save()
    tests, shared, opened = _notes(parts)
    counts = _count(combined.get_data())
    for name, values in tests.items():
        values["lines"] = counts[name]
    origin = json.loads((parts / _ORIGIN).read_text(encoding="utf-8"))
    index = {**origin, "tests": tests, "shared": shared, "opened": opened}
    (new / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    shutil.rmtree(parts)
    return len(tests)


def load(folder: Path = FOLDER) -> tuple[Origin, Recording] | None:
    """Return what was recorded, if there is a recording."""
    import coverage

    with contextlib.suppress(FileNotFoundError):
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        if _text(index["tree"], "setup.py") is None:
            return None  # of another clone, or git has forgotten it
        data = coverage.CoverageData(str(folder / _DATA), read_only=True)
        data.read()
        origin = Origin(index["commit"], index["tree"], index["date"], tuple(index["arguments"]))
        tests = {
            name: Recorded(values["seconds"], values["lines"], frozenset(values["fixtures"]))
            for name, values in index["tests"].items()
        }
        opened = {path: frozenset(contexts) for path, contexts in index["opened"].items()}

        def lines_of(file: str) -> Mapping[int, Set[str]]:
            found = data.contexts_by_lineno(str(ROOT / file))
            known = {line: frozenset(contexts) - {""} for line, contexts in found.items()}
            return {line: contexts for line, contexts in known.items() if contexts}

        text = functools.cache(functools.partial(_text, origin.tree))
        importers = functools.partial(_importers, origin.tree)
        return origin, Recording(tests, functools.cache(lines_of), text, importers, opened, index["shared"])
    return None


def _text(tree: str, file: str) -> str | None:
    done = subprocess.run(["git", "show", f"{tree}:{file}"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _importers(tree: str, file: str) -> list[str]:
    """The files of a tree that import a module by its name, or from its package."""
    package, _, name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
    pattern = rf"^ *(from|import) +{re.escape(package)}(\.{name}\b| +import +(.*[, ])?{name}\b)"
    command = ["git", "grep", "-lE", pattern, tree, "--", "*.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # finding none is an error
    return [line.partition(":")[2] for line in done.stdout.splitlines()]


def _notes(parts: Path) -> tuple[dict[str, Any], dict[str, float], dict[str, list[str]]]:
    tests, shared, opened = dict[str, Any](), dict[str, float](), defaultdict[str, set[str]](set)
    for note in _lines(parts):
        if "test" in note:
            tests[note["test"]] = {"seconds": note["seconds"], "fixtures": note["fixtures"]}
        elif "shared" in note:
            shared[note["shared"]] = note["seconds"]
        else:
            for path in note["opened"]:
                opened[Path(path).relative_to(ROOT).as_posix()].add(note["context"])
    files = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    known = set(files) | {parent.as_posix() for file in files for parent in Path(file).parents}
    return tests, shared, {path: sorted(opened[path]) for path in sorted(known & opened.keys())}


def _lines(parts: Path) -> Iterator[Any]:
    for path in parts.glob("*.notes"):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _count(data: Any) -> defaultdict[str, int]:
    """How many lines run in each context."""
    counts = defaultdict[str, int](int)
    for file in data.measured_files():
        for contexts in data.contexts_by_lineno(file).values():
            for context in contexts:
                counts[context] += 1
    return counts
