# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Changes of the package and of the kernels for the CPU, each of one place in a function, and a random choice of them.
No library makes them. cosmic-ray runs one command for each change, whatever line it is in, and here the command for
all lines takes half an hour. mutmut counts in its own process which functions tests call, and here ranks call them.
Neither knows C++."""

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT

LEAST = 3  # of a room, however small
# Of csrc: what runs without a GPU.
CPU_KERNELS = ("block.h", "cpu_kernels.h", "cpu_vectors.h", "jobs.h", "loco_cpu.cpp", "lossless.h", "lossless_cpu.cpp")


class Mutant(NamedTuple):
    """A change of one file."""

    path: Path  # in the repository
    line: int
    start: int  # in the file's bytes
    end: int
    new: str

    def applied(self, text: bytes) -> bytes:
        return text[: self.start] + self.new.encode() + text[self.end :]

    def __str__(self) -> str:
        text = (ROOT / self.path).read_bytes()
        old, new = (item.splitlines()[self.line - 1].strip().decode() for item in (text, self.applied(text)))
        return f"{self.path}:{self.line}: {old}  ->  {new}"

    @property
    def room(self) -> str:
        """The folder or the file of the package; csrc is one."""
        return room_of(self.path)


def room_of(path: Path) -> str:
    return path.parts[0] if path.parts[0] == "csrc" else path.parts[1]


# ---- Python: a comparison, an operator or a constant is another, or a statement is dropped

_PYTHON = {
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<")},
    **{ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
    **{ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*")},
    **{ast.Div: ("/", "*"), ast.Mod: ("%", "//")},
}


class _Python(ast.NodeVisitor):
    def __init__(self, path: Path) -> None:
        self.path, self.text, self.found = path, (ROOT / path).read_bytes(), list[Mutant]()
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.visit(ast.parse(self.text))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        inside = [item for statement in node.body for item in ast.walk(statement)]
        # zip's strict guards what never happens.
        without = {id(item.value) for item in inside if isinstance(item, ast.keyword) and item.arg == "strict"}
        for item in inside:
            self.found += self._of(item) if id(item) not in without else ()

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            yield from self._swap(node.ops[0], node.left, node.comparators[0])
        elif isinstance(node, ast.BoolOp):
            yield from self._swap(node.op, node.values[0], node.values[1])
        elif isinstance(node, ast.BinOp):
            yield from self._swap(node.op, node.left, node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Mutant(self.path, node.lineno, self._at(node), self._at(node) + len("not "), "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            new = node.value + 1 if type(node.value) is int else not node.value
            yield Mutant(self.path, node.lineno, self._at(node), self._end(node), str(new))
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield Mutant(self.path, node.lineno, self._at(node), self._end(node), "pass")

    def _swap(self, operator: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        old, new = _PYTHON.get(type(operator), ("", ""))
        start = self.text.rfind(old.encode(), self._end(left), self._at(right))  # a comment may stand before it
        if old and start >= 0:
            yield Mutant(self.path, self.text.count(b"\n", 0, start) + 1, start, start + len(old), new)

    def _at(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


# ---- C++, by patterns: an operator or a constant is another, or a call is dropped

# Spaces tell operators from the brackets of templates: the sources are formatted so.
_CPP = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == "}
_CPP |= {" + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ", " && ": " || ", " || ": " && "}
_CPP |= {" << ": " >> ", " >> ": " << ", " & ": " | ", " | ": " & ", " ^ ": " & "}
_OPERATOR = re.compile("|".join(re.escape(old) for old in sorted(_CPP, key=len, reverse=True)))
_INTEGER = re.compile(r"(?<![\w.])\d+(?=u?\b)(?![\w.]*[.x])")
_CALL = re.compile(r"^ +([a-z][\w:<>]*\(.*\);)$")
_LEFT_OUT = re.compile(r"^\s*(#|//|template|static_assert|using|return \w+;$)|TORCH_LIBRARY|STD_TORCH_CHECK")


def _cpp(path: Path) -> Iterator[Mutant]:
    start = 0
    for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True), 1):
        code = line.partition("//")[0].rstrip()
        if code.startswith("  ") and not _LEFT_OUT.search(code):
            results = [(item.start(), item.end(), _CPP[item[0]]) for item in _OPERATOR.finditer(code)]
            results += [(item.start(), item.end(), str(int(item[0]) + 1)) for item in _INTEGER.finditer(code)]
            results += [(item.start(1), item.end(1), ";") for item in [_CALL.match(code)] if item]
            for first, last, new in results:
                yield Mutant(path, number, start + first, start + last, new)
        start += len(line.encode())


# ---- the choice


def changes(path: Path) -> list[Mutant]:
    return _Python(path).found if path.suffix == ".py" else list(_cpp(path))


def draw_changes(number: int, seed: int, rooms: tuple[str, ...] = ()) -> list[Mutant]:
    """Choose a number of changes, of all rooms (or these) in turn: whoever stops early has seen each. A room gets its
    share by its lines, but at least ``LEAST``."""
    paths = [*sorted((ROOT / "deepspeed_ext").rglob("*.py")), *(ROOT / "csrc" / "loco" / name for name in CPU_KERNELS)]
    of_room, lines = dict[str, list[Mutant]](), Counter[str]()
    for path in (path.relative_to(ROOT) for path in paths):
        lines[room_of(path)] += len((ROOT / path).read_bytes().splitlines())
        if not rooms or room_of(path) in rooms:
            of_room.setdefault(room_of(path), []).extend(changes(path))
    results = []
    for room, of_this in sorted(of_room.items()):
        share = max(LEAST, round(number * lines[room] / lines.total()))
        results += random.Random(f"{seed} {room}").sample(of_this, min(share, len(of_this)))
    random.Random(seed).shuffle(results)
    return results
