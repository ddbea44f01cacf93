# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How the house is built: how deep classes inherit, what adapters hold, and what of DeepSpeed they read."""

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from scripts import ROOT

pytestmark = pytest.mark.quick

PACKAGE = ROOT / "deepspeed_ext"
DEPTH = 2  # classes of ours, one above the other
# What all hops have, what a reduction is, and one kind of it.
DEEPER = {"AllToAllReduce", "NativeReduce", "AllReduceReduce", "LocoHop"}
MOST_LINES = 500  # of a file
OVERRIDE = 10  # lines of its body
ADAPTERS = ("zero/optimizer.py", "zero/stage12.py", "zero/stage3.py")
THEIRS = {
    "Stage12Optimizer": "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
    "Stage3Optimizer": "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
    "GroupCoordinator": "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator",
}


class Class(NamedTuple):
    bases: tuple[str, ...]
    node: ast.ClassDef

    def defined(self) -> set[str]:
        """Names that it gives a value: methods that are not abstract, class attributes, what is assigned to self."""
        names = {method.name for method in methods(self.node) if "abstractmethod" not in decorators(method)}
        for statement in self.node.body:
            if isinstance(statement, ast.Assign):
                names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                names.add(last_name(statement.target))
        return names | {use.attr for use in attributes(self.node) if isinstance(use.ctx, ast.Store)}

    def declared(self) -> set[str]:
        """Names that it has annotated and given no value: what DeepSpeed's class is to set."""
        annotated = [s for s in self.node.body if isinstance(s, ast.AnnAssign) and s.value is None]
        return {last_name(statement.target) for statement in annotated}


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript | ast.Call):
        return last_name(node.value if isinstance(node, ast.Subscript) else node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [statement for statement in node.body if isinstance(statement, ast.FunctionDef)]


def decorators(method: ast.FunctionDef) -> set[str]:
    return {last_name(decorator) for decorator in method.decorator_list}


def attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield what is read and written of ``self``."""
    for use in ast.walk(node):
        if isinstance(use, ast.Attribute) and isinstance(use.value, ast.Name) and use.value.id == "self":
            yield use


@functools.cache
def classes() -> dict[str, Class]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] = Class(tuple(last_name(base) for base in node.bases), node)
    return found


def depth(name: str, known: dict[str, Class]) -> int:
    return 1 + max((depth(base, known) for base in known[name].bases if base in known), default=0)


def test_inheritance_is_shallow() -> None:
    known = classes()
    assert {name for name in known if depth(name, known) > DEPTH} == DEEPER
    assert all(depth(name, known) == DEPTH + 1 for name in DEEPER)


def test_files_hold_one_concept() -> None:
    lengths = {p.relative_to(PACKAGE).as_posix(): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert not {path for path, length in lengths.items() if length > MOST_LINES}


def test_overrides_are_short() -> None:
    """What an adapter does is an object of its own."""
    long = []
    for path in ADAPTERS:
        for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if isinstance(node, ast.FunctionDef) and "override" in decorators(node):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body and (body[-1].end_lineno or 0) - body[0].lineno >= OVERRIDE:
                    long.append(f"{path}: {node.name}")
    assert not long


def deepspeed_has(cls: type) -> set[str]:
    """Names of a class of DeepSpeed's and its bases: methods, class attributes, and what is assigned to self; private
    ones as others read them."""
    found = set()
    for base in cls.__mro__[:-1]:
        if base.__module__.startswith("deepspeed."):
            node = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            stored = {use.attr for use in attributes(node) if isinstance(use.ctx, ast.Store)}
            found |= {mangled(name, base) for name in stored} | set(vars(base))
    return found


def mangled(name: str, cls: type) -> str:
    return f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


@pytest.mark.parametrize("name", THEIRS)
def test_what_is_read_of_deepspeed_is_listed(name: str) -> None:
    """Attributes in the class of the adapter, so one look shows what a release moves. ``drift`` compares methods."""
    module, _, theirs = THEIRS[name].partition(":")
    parent = getattr(importlib.import_module(module), theirs)
    known, has = classes(), deepspeed_has(parent)
    adapters = [known[one] for one in (name, *known[name].bases) if one in known]
    used = {use.attr for one in adapters for use in attributes(one.node)}
    own = {method.name for one in adapters for method in methods(one.node)}
    called = {one for one in (used & has) - own if inspect.isroutine(getattr(parent, one, None))}
    declared = set().union(*(one.declared() for one in adapters))
    read = {one for one in (used & has) - own - called if not one.startswith("__")}
    assert not read - declared, "read of DeepSpeed's and not listed in the class"
    of_ours = set().union(*(one.defined() for one in adapters)) - has
    assert not declared - has - of_ours, "listed, and DeepSpeed's class does not set it"
