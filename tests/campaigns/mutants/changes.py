# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Changes of the package, each of one place in a function, and a random choice of them.

No library makes them. cosmic-ray runs one command for each change, whatever line it is in, and here the command for
all lines takes half an hour. mutmut counts in its own process which functions tests call, and here ranks call them.
"""

import ast
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT

LEAST = 3  # of a room, however small


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
        text = (ROOT / self.path).read_bytes()
        old, new = (one.splitlines()[self.line - 1].strip().decode() for one in (text, self.applied(text)))
        return f"{self.path}:{self.line}: {old}  ->  {new}"

    @property
    def room(self) -> str:
        """The folder or the file of the package."""
        return self.path.parts[1]


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


# ---- the choice


def changes(path: Path) -> list[Mutant]:
    """Return the changes of a file that can be made within its functions."""
    return _Python(path).found


def drawn(number: int, seed: int, rooms: tuple[str, ...] = ()) -> list[Mutant]:
    """Choose changes, of all rooms in turn: whoever stops early has seen each.

    Args:
        number: of all rooms together; each room gets its share by its lines, but at least ``LEAST``.
        seed: of the choice.
        rooms: only these, if any.
    """
    paths = sorted((ROOT / "deepspeed_ext").rglob("*.py"))
    of_room, lines = dict[str, list[Mutant]](), Counter[str]()
    for path in (path.relative_to(ROOT) for path in paths):
        lines[path.parts[1]] += len((ROOT / path).read_bytes().splitlines())
        if not rooms or path.parts[1] in rooms:
            of_room.setdefault(path.parts[1], []).extend(changes(path))
    found = []
    for room, of_this in sorted(of_room.items()):
        share = max(LEAST, round(number * lines[room] / lines.total()))
        found += random.Random(f"{seed} {room}").sample(of_this, min(share, len(of_this)))
    random.Random(seed).shuffle(found)
    return found
