# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Changes of Python code: a comparison, an operator or a constant is another, or a statement is dropped.

No library makes them: cosmic-ray, which is well kept, runs one command for each change, whatever line that is in, and
here the command for all lines takes half an hour; and it knows no C++.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from scripts import ROOT
from tests.campaigns.mutants.mutant import Mutant

SWAPPED = {
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<")},
    **{ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
    **{ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*")},
    **{ast.Div: ("/", "*"), ast.Mod: ("%", "//")},
}


def changes(path: Path) -> list[Mutant]:
    """The changes of a file that can be made within its functions.

    Args:
        path: in the repository.
    """
    return _Mutations(path).found


class _Mutations(ast.NodeVisitor):
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
        start = self.text.rfind(old.encode(), self._end(left), self._at(right))  # a comment may stand before it
        if start >= 0:
            yield self._put(self.text.count(b"\n", 0, start) + 1, start, start + len(old), new)

    def _put(self, line: int, start: int, end: int, new: str) -> Mutant:
        return Mutant(self.path, line, start, end, new)

    def _at(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
