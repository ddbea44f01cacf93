# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A package read from its source, without importing it: names of modules, members of classes, signatures.

So it tells of a release that cannot be imported here, or of which our classes cannot be made, as much as of any other.
What is made while the code runs, by ``setattr`` or a module's ``__getattr__``, it does not see.
"""

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
_KINDS = {"property": "a property", "staticmethod": "a static method", "classmethod": "a class method"}


class Default:
    """A default value that is no literal, shown as it is written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class Found(NamedTuple):
    """What a name stands for.

    Attributes:
        module: of the package, where it is defined; another package's if ``node`` is None.
        node: a definition, the value of an assignment, or a module.
    """

    module: str
    node: ast.AST | None


class Member(NamedTuple):
    """A member of a class: the module and the name of the class that defines it, and its node: a method, or what
    assigns an attribute."""

    module: str
    owner: str
    node: ast.AST


def literal(node: ast.AST | None) -> Any:
    """Return the value of a literal, or a ``Default`` that shows the expression."""
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return Default(ast.unparse(node) if node else "")


def signature(function: Function) -> inspect.Signature:
    """Return names, kinds and defaults of what a function takes, as ``overrides.plain_signature`` has them."""
    kinds, given, found = inspect._ParameterKind, function.args, []
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    for number, (one, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = kinds.POSITIONAL_ONLY if number < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        found.append(_parameter(one, kind, default))
    if given.vararg:
        found.append(_parameter(given.vararg, kinds.VAR_POSITIONAL))
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(_parameter(one, kinds.KEYWORD_ONLY, default))
    if given.kwarg:
        found.append(_parameter(given.kwarg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


def _parameter(one: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
    return inspect.Parameter(one.arg, kind, default=inspect.Parameter.empty if default is None else literal(default))


def kind(node: ast.AST) -> str:
    """Return what a member of a class is, in words."""
    if not isinstance(node, Function):
        return "an attribute"
    names = [ast.unparse(one).rpartition(".")[2] for one in node.decorator_list]
    return next((_KINDS[name] for name in names if name in _KINDS), "a property" if "setter" in names else "a method")


def is_marked(node: Function | ast.ClassDef, name: str = "override") -> bool:
    """Return whether a function or class has a decorator of a name."""
    return any(ast.unparse(one).rpartition(".")[2] == name for one in node.decorator_list)


def mangled(name: str, owner: str) -> str:
    """Return the name of a member as it is read from outside of its class."""
    private = name.startswith("__") and not name.endswith("__")
    return f"_{owner.lstrip('_')}{name}" if private else name


class SourceTree:
    """The source of a package.

    Args:
        root: the folder that has the package's.
        package: its name.

    Attributes:
        broken: why modules could not be read, by their names: those that were asked for until now.
    """

    def __init__(self, root: Path, package: str) -> None:
        self.root, self.package = root, package
        self.broken: dict[str, str] = {}
        self._names: dict[str, dict[str, Found]] = {}
        self._stars: dict[str, list[str]] = {}
        self._members: dict[tuple[str, str], dict[str, Member]] = {}

    def modules(self) -> Iterator[str]:
        """Yield the names of all modules."""
        for path in sorted((self.root / self.package).rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def path(self, module: str) -> Path | None:
        """Return the file of a module; None if there is none."""
        folder = self.root.joinpath(*module.split("."))
        found = (path for path in (folder / "__init__.py", folder.with_suffix(".py")) if path.is_file())
        return next(found, folder if folder.is_dir() else None)

    @functools.cache  # noqa: B019 - as long as the tree
    def syntax(self, module: str) -> ast.Module | None:
        """Return the syntax of a module; None if there is none, or it cannot be read: ``broken`` says why."""
        path = self.path(module)
        if path is None:
            return None
        try:
            return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
        except (SyntaxError, ValueError, OSError) as error:
            self.broken[module] = f"{type(error).__name__}: {error}"
            return None

    def find(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Found | None:
        """Return what a name of a module stands for, wherever it is imported from; None if there is none."""
        if (module, name) in seen or self.syntax(module) is None:
            return None
        seen |= {(module, name)}
        found = self._of_module(module).get(name)
        if found is not None and isinstance(found.node, ast.alias):
            return self._follow(found.module, found.node.name, seen)
        if found is not None:
            return found
        if self.path(f"{module}.{name}") is not None:
            return Found(f"{module}.{name}", ast.Module([], []))
        if not name.startswith("_"):
            for star in self._stars[module]:
                if (found := self.find(star, name, seen)) is not None:
                    return found
        return None

    def _follow(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Found | None:
        """Return what is imported as ``name`` from a module, or a module if there is no name."""
        if module.partition(".")[0] != self.package:
            return Found(module, None)
        if name:
            return self.find(module, name, seen)
        return Found(module, ast.Module([], [])) if self.path(module) is not None else None

    def _of_module(self, module: str) -> dict[str, Found]:
        """Return names that a module defines or imports, those in branches included."""
        if module not in self._names:
            names: dict[str, Found] = {}
            self._names[module], self._stars[module] = names, []
            tree = self.syntax(module)
            for statement in _statements(tree.body if tree else []):
                self._bind(module, statement, names)
        return self._names[module]

    def _bind(self, module: str, statement: ast.stmt, names: dict[str, Found]) -> None:
        if isinstance(statement, Function | ast.ClassDef):
            names[statement.name] = Found(module, statement)
        elif isinstance(statement, ast.Import):
            for one in statement.names:
                target = one.name if one.asname else one.name.partition(".")[0]
                names[one.asname or target] = Found(target, ast.alias(""))
        elif isinstance(statement, ast.ImportFrom):
            source = self.absolute(module, statement)
            for one in statement.names:
                if one.name != "*":
                    names[one.asname or one.name] = Found(source, ast.alias(one.name))
                elif source.partition(".")[0] == self.package:
                    self._stars[module].append(source)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            bound = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            for name in bound:
                if name not in names or not isinstance(names[name].node, Function | ast.ClassDef):
                    names[name] = Found(module, statement)

    def absolute(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the full name of the module that is imported from."""
        path = self.path(module)
        above = statement.level - (path is not None and path.name == "__init__.py")
        parts = module.split(".")
        base = parts[: len(parts) - above] if statement.level else []
        return ".".join([*base, *filter(None, [statement.module])])

    def bases(self, found: Found) -> Iterator[Found]:
        """Yield the base classes of a class that are in the package."""
        for base in found.node.bases if isinstance(found.node, ast.ClassDef) else ():
            parent = self.chain(found.module, ast.unparse(base))
            if parent is not None and isinstance(parent.node, ast.ClassDef):
                yield parent

    def chain(self, module: str, dotted: str) -> Found | None:
        """Return what a dotted name in a module stands for, if it leads to a module, a function, a class or a
        constant of the package."""
        first, *rest = dotted.split(".")
        found = self.find(module, first)
        for name in rest:
            if found is None or not isinstance(found.node, ast.Module):
                return None
            found = self.find(found.module, name)
        return found

    def members(self, module: str, name: str) -> dict[str, Member] | None:
        """Return the members of a class and its bases in the package, by the names under which others read them:
        methods, class attributes, and what a method assigns to ``self``. None if there is no such class."""
        found = self.find(module, name)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return None
        key = found.module, found.node.name
        if key not in self._members:
            self._members[key] = {}  # for a class that is its own base
            merged: dict[str, Member] = {}
            for base in self.bases(found):
                assert isinstance(base.node, ast.ClassDef)
                merged = {**(self.members(base.module, base.node.name) or {}), **merged}
            own = {mangled(one, found.node.name): node for one, node in _own_members(found.node)}
            self._members[key] = merged | {one: Member(*key, node) for one, node in own.items()}
        return self._members[key]

    @functools.cache  # noqa: B019 - as long as the tree
    def set_in(self, module: str) -> dict[str, ast.AST]:
        """Return attributes that are set on anything in a module, and functions in it: many are set under their
        names."""
        nodes = list(ast.walk(self.syntax(module) or ast.Module([], [])))
        functions = {node.name: node for node in nodes if isinstance(node, Function)}
        stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        return functions | {node.attr: node for node in stored}

    def look_up(self, target: str) -> Found | None:
        """Return what a target stands for; None if there is none.

        Args:
            target: ``module:`` for a module, ``module:name``, ``module:Class.member``, or ``module:*.attribute`` for
                what is set in the module on any object.
        """
        module, _, qualified = target.partition(":")
        if not qualified:
            return Found(module, self.syntax(module)) if self.syntax(module) is not None else None
        name, _, member = qualified.partition(".")
        if not member:
            return self.find(module, name)
        if name == "*":
            node = self.set_in(module).get(member)
            return Found(module, node) if node is not None else None
        members = self.members(module, name)
        if members is None or member not in members:
            return None
        return Found(members[member].module, members[member].node)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those inside of branches included."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(statement, Function | ast.ClassDef):
                yield from _statements(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _own_members(cls: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """Yield names of a class with their nodes; of what has several, a method or class attribute comes last."""
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            yield node.attr, node
    for statement in _statements(cls.body):
        if isinstance(statement, ast.Assign):
            yield from ((one.id, statement) for one in statement.targets if isinstance(one, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement
    seen = set()
    for statement in _statements(cls.body):
        if isinstance(statement, Function) and statement.name not in seen:  # the getter, not the setter after it
            seen.add(statement.name)
            yield statement.name, statement
