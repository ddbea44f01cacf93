# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The functions and classes of a Python file, and the lines that must have run for a line to have mattered."""

import ast
from collections.abc import Collection, Iterator
from typing import NamedTuple

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Scope(NamedTuple):
    """A function or a class: its lines from the first decorator on."""

    first: int
    body: int
    last: int
    is_function: bool

    def __contains__(self, line: object) -> bool:
        return isinstance(line, int) and self.first <= line <= self.last


def scopes(source: str) -> list[Scope]:
    """Return the functions and classes of a file, outer ones first."""
    return sorted(_scopes(ast.parse(source)), key=lambda scope: (scope.first, -scope.last))


def _scopes(tree: ast.AST) -> Iterator[Scope]:
    for node in ast.walk(tree):
        if isinstance(node, (*_Function, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            body = min(one.lineno for one in ast.walk(node.body[0]) if isinstance(one, (ast.stmt, ast.expr)))
            yield Scope(first, body, node.end_lineno or node.lineno, isinstance(node, _Function))


def witnesses(line: int, found: Collection[Scope], run: Collection[int]) -> set[int]:
    """Return the lines with the tests that a change of ``line`` concerns, among lines that run in some test.

    A line inside of a function: itself, or its neighbors, or all of the function. The head of a function: its body.
    Other lines run when the module is imported, once: what runs in functions of the class, or else of the file.
    """
    inside = [scope for scope in found if line in scope]
    for scope in reversed(inside):
        body = _inside((scope,) if scope.is_function else [one for one in found if one.first in scope], run)
        if scope.is_function and line >= scope.body:
            body = {line} if line in run else _neighbors(line, body) or body
        if body:
            return body
    return _inside(found, run)


def _inside(found: Collection[Scope], run: Collection[int]) -> set[int]:
    bodies = [scope for scope in found if scope.is_function]
    return {line for line in run if any(scope.body <= line <= scope.last for scope in bodies)}


def _neighbors(line: int, run: Collection[int]) -> set[int]:
    before, after = [one for one in run if one < line], [one for one in run if one > line]
    return ({max(before)} if before else set()) | ({min(after)} if after else set())
