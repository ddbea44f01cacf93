# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Changes the package at random, in one place at a time, and counts what the quick tests, or the fuzzer, find.

    python -m tests.campaigns.mutants --number 20 --seed 1
    python -m tests.campaigns.mutants --number 40 --rooms --fuzz 10   # minutes of the fuzzer; in each room as many

With the fuzzer, rooms are those that training passes through.

A change swaps a comparison, an operator or a constant, or drops a statement, within a function. Each is made in a
copy of the repository, where ``pytest -m quick -x``, or ``tests.campaigns.fuzz``, then runs. Some changes make no
difference to any caller; so look at what survives.
"""

import argparse
import ast
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT

# What does not run where there is no GPU, compiler or fork; and what is only printed.
LEFT_OUT = ("build_lock.py", "cli/", "integration/fork.py", "loco/build_lock.py", "op_builder.py", "planner/report.py")
# What training passes through.
TRAINED = (
    "checkpoint",
    "comm",
    "config",
    "leaf",
    "loco",
    "model_bytes.py",
    "pipeline",
    "planner",
    "strategy.py",
    "zero",
)
COPIED = ("csrc", "deepspeed_ext", "patches", "scripts", "tests", ".ci", ".github", ".pre-commit-config.yaml")
COPIED += ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "setup.py")
SWAPPED = {
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<")},
    **{ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
    **{ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*")},
    **{ast.Div: ("/", "*"), ast.Mod: ("%", "//")},
}


class Mutant(NamedTuple):
    """A change of one file."""

    path: Path  # in the repository
    line: int
    start: int  # in the file's bytes
    end: int
    new: str

    def applied(self, text: bytes) -> bytes:
        """Return the changed file."""
        return text[: self.start] + self.new.encode() + text[self.end :]

    def __str__(self) -> str:
        lines = [text.splitlines()[self.line - 1].strip() for text in self._texts()]
        return f"{self.path}:{self.line}: {lines[0].decode()}  ->  {lines[1].decode()}"

    def _texts(self) -> tuple[bytes, bytes]:
        text = (ROOT / self.path).read_bytes()
        return text, self.applied(text)


class Mutations(ast.NodeVisitor):
    """Finds the changes of a file that can be made within its functions."""

    def __init__(self, path: Path) -> None:
        self.path, self.text, self.found = path, (ROOT / path).read_bytes(), list[Mutant]()
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.visit(ast.parse(self.text))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        inside = [one for statement in node.body for one in ast.walk(statement)]
        # zip's strict guards what never happens.
        without = {id(one.value) for one in inside if isinstance(one, ast.keyword) and one.arg == "strict"}
        for one in inside:
            self.found += self._of(one) if id(one) not in without else ()

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            yield from self._swap(node.ops[0], node.left, node.comparators[0])
        elif isinstance(node, ast.BoolOp):
            yield from self._swap(node.op, node.values[0], node.values[1])
        elif isinstance(node, ast.BinOp):
            yield from self._swap(node.op, node.left, node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._put(node.lineno, self._at(node), self._at(node) + len("not "), "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            new = node.value + 1 if type(node.value) is int else not node.value
            yield self._put(node.lineno, self._at(node), self._end(node), str(new))
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield self._put(node.lineno, self._at(node), self._end(node), "pass")

    def _swap(self, operator: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        if type(operator) not in SWAPPED:
            return
        old, new = SWAPPED[type(operator)]
        start = self.text.find(old.encode(), self._end(left), self._at(right))
        if start >= 0:
            yield self._put(self.text.count(b"\n", 0, start) + 1, start, start + len(old), new)

    def _put(self, line: int, start: int, end: int, new: str) -> Mutant:
        return Mutant(self.path, line, start, end, new)

    def _at(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


def mutants() -> list[Mutant]:
    """Return all changes, in a fixed order."""
    package = ROOT / "deepspeed_ext"
    paths = [path for path in sorted(package.rglob("*.py")) if path.name != "__main__.py"]
    chosen = [path for path in paths if not str(path.relative_to(package)).startswith(LEFT_OUT)]
    return [one for path in chosen for one in Mutations(path.relative_to(ROOT)).found]


def of_rooms(everything: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """Choose so many changes, of each room of the package about as many."""
    chance, rooms = random.Random(seed), dict[str, list[Mutant]]()
    for one in everything:
        rooms.setdefault(one.path.parts[1], []).append(one)
    for changes in rooms.values():
        chance.shuffle(changes)
    in_turns = itertools.chain(*itertools.zip_longest(*rooms.values()))
    return [one for one in in_turns if one is not None][:number]


QUICK_TESTS = ("-m", "pytest", "-x", "-m", "quick", "-p", "no:cacheprovider", "-o", "addopts=-q")


def fuzzer(minutes: float) -> tuple[str, ...]:
    """What runs the fuzzer until its first failure."""
    return (
        "-m",
        "tests.campaigns.fuzz",
        "--minutes",
        str(minutes),
        "--first",
        "--batch",
        "5",
        "--worlds",
        "2",
        "2",
        "4",
    )


def run(copy: Path, limit: float, what: tuple[str, ...]) -> tuple[str, float]:
    """Run tests in a copy; the first that fails ("" if all pass, "hangs"), and seconds."""
    command = [sys.executable, *what]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy), "TORCH_EXTENSIONS_DIR": str(copy / ".extensions")},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            passed = process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "hangs", time.monotonic() - begin
        output.seek(0)
        lines = output.read().splitlines()
    told = [at for at, line in enumerate(lines) if line.startswith(("FAILED", "ERROR"))]
    failed = "the session"
    if told and what == QUICK_TESTS:
        failed = lines[told[0]].split(" - ")[0]
    elif told:  # below the case
        failed = lines[told[0] + 1].strip()[:100]
    return "" if passed else failed, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=20, help="of changes")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("--first", type=int, default=0, help="of them to run")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds until tests count as hanging")
    parser.add_argument("--rooms", action="store_true", help="choose as many in each room")
    parser.add_argument("--fuzz", type=float, default=0.0, help="minutes of the fuzzer, in place of the quick tests")
    arguments = parser.parse_args()
    everything = mutants()
    if arguments.fuzz:
        everything = [one for one in everything if one.path.parts[1] in TRAINED]
    chosen = random.Random(arguments.seed).sample(everything, arguments.number)
    if arguments.rooms:
        chosen = of_rooms(everything, arguments.number, arguments.seed)
    chosen = chosen[arguments.first :]
    what = fuzzer(arguments.fuzz) if arguments.fuzz else QUICK_TESTS
    print(f"{len(chosen)} of {len(everything)} changes, seed {arguments.seed}", flush=True)
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, Path(folder, name))
        if failed := run(Path(folder), arguments.limit, what)[0]:
            sys.exit(f"without a change: {failed}")
        for mutant in chosen:
            path = Path(folder, mutant.path)
            text = path.read_bytes()
            path.write_bytes(mutant.applied(text))
            failed, seconds = run(Path(folder), arguments.limit, what)
            path.write_bytes(text)
            found += bool(failed)
            print(f"{'found' if failed else 'SURVIVED':<9}{seconds:5.0f} s  {mutant}  {failed}", flush=True)
    print(f"{found} of {len(chosen)} found")


if __name__ == "__main__":
    main()
