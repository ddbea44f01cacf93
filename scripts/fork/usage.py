# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What of DeepSpeed we use: rows of patches, overrides, attributes that our classes read, Protocols, and imports.

Read from our source beside the source of a DeepSpeed that is known to fit: what has no row counts if it is there.
"""

import ast
import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from deepspeed_ext.integration.symbols import ENGINE, ZERO3, Patch
from deepspeed_ext.overrides import purpose
from scripts.fork.source_tree import Found, Function, Member, SourceTree, is_marked, kind, mangled, signature

ROW, OVERRIDE, READ, IMPORT = "row", "override", "read", "import"

# Protocols of ours, with DeepSpeed's classes that they describe; ``*`` is any object that a module sets
# them on.
PROTOCOLS: dict[str, tuple[str, ...]] = {
    "OffloadConfig": tuple(
        f"deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffload{what}Config" for what in ("Optimizer", "Param")
    ),
    "LeafModuleConfig": ("deepspeed.runtime.zero.leaf_module_config:DeepSpeedZeroLeafModuleConfig",),
    "ThroughputTimerConfig": ("deepspeed.utils.config:DeepSpeedThroughputTimerConfig",),
    "ZeroConfig": ("deepspeed.runtime.zero.config:DeepSpeedZeroConfig",),
    "Config": ("deepspeed.runtime.config:DeepSpeedConfig",),
    "Timers": ("deepspeed.utils.timer:SynchronizedWallClockTimer",),
    "Monitor": ("deepspeed.monitor.monitor:MonitorMaster",),
    "Engine": (ENGINE,),
    "LeafOptimizer": (ZERO3,),
    "MappedParameter": ("deepspeed.runtime.zero.stage_1_and_2:*", "deepspeed.utils.mixed_precision_linkage:*"),
    "ZeroChunk": ("deepspeed.runtime.zero.partition_parameters:*",),
    "ZeroParameter": ("deepspeed.runtime.zero.partition_parameters:*",),
}
# What functions return, where attributes are read of that.
_RETURNED = {
    "deepspeed.accelerator:get_accelerator": "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator"
}
# Calls that take an object and the name of its attribute.
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "mock.patch.object"}
_DOTTED = re.compile(r"deepspeed(\.\w+)+")


class Use(NamedTuple):
    """Something of DeepSpeed that we use.

    Attributes:
        target: module and qualified name, separated by a colon; nothing after it for a module.
        how: by a row, an override, an attribute that is read, or an import.
        why: the feature that needs it, a clause.
        places: modules of ours.
        expected: of a row, the signature; of an override, ours.
        called: whether we call it.
        is_new: whether it must not be there: a method of ours has its name.
    """

    target: str
    how: str
    why: str
    places: tuple[str, ...]
    expected: str | inspect.Signature | None = None
    called: bool = False
    is_new: bool = False


def uses(ours: SourceTree, base: SourceTree, rows: Iterable[Patch]) -> list[Use]:
    """Return all of it, each symbol once: as what says most of it."""
    found: dict[str, Use] = {}
    listed = [_row(ours, row) for row in rows]
    for use in [*listed, *_of_classes(ours, base), *_of_protocols(ours, base), *_of_modules(ours, base)]:
        kept = found.setdefault(use.target, use)
        places = tuple(dict.fromkeys(kept.places + use.places))
        found[use.target] = kept._replace(places=places, called=kept.called or use.called)
    return list(found.values())


# Rows #############################################################################################


def _row(ours: SourceTree, row: Patch) -> Use:
    name = row.target.rpartition(".")[2].rpartition(":")[2]
    places = (row.replace.__module__,) if row.replace else tuple(_naming(ours, name))
    return Use(row.target, ROW, row.why, places or (f"{ours.package}.integration.relied_on",), row.signature)


def _naming(ours: SourceTree, name: str) -> Iterator[str]:
    """Yield modules of ours that read an attribute of a name, import it or have it in a string."""
    for module, names in _names(ours).items():
        if name in names and not module.startswith(f"{ours.package}.integration."):
            yield module


@functools.cache
def _names(ours: SourceTree) -> dict[str, set[str]]:
    found = {}
    for module in ours.modules():
        nodes = list(ast.walk(ours.syntax(module) or ast.Module([], [])))
        found[module] = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        found[module] |= {
            node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        found[module] |= {node.name for node in nodes if isinstance(node, ast.alias)}
    return found


# Classes ##########################################################################################


class _Class(NamedTuple):
    """A class of ours: the module, its syntax, and DeepSpeed's classes among its bases, nearest first."""

    module: str
    node: ast.ClassDef
    parents: list[Found]


def _of_classes(ours: SourceTree, base: SourceTree) -> Iterator[Use]:
    known = {(module, node.name): node for module in ours.modules() for node in _classes(ours.syntax(module))}
    families = [_family(ours, base, module, name) for module, name in known]
    above = {id(one.node) for family in families for one in family[1:]}  # looked at with those below
    for family in families:
        parents = [parent for one in family for parent in one.parents]
        if parents and id(family[0].node) not in above:
            yield from _of_family(base, family, parents)


def _classes(tree: ast.AST | None) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, ast.ClassDef))


def _family(ours: SourceTree, base: SourceTree, module: str, name: str) -> list[_Class]:
    """Return a class of ours and its bases that are ours, nearest first."""
    found = ours.find(module, name)
    if found is None or not isinstance(found.node, ast.ClassDef):
        return []
    aliases, parents, above = _aliases(ours, found.module), [], []
    for one in found.node.bases:
        dotted = ast.unparse(one)
        first, _, rest = dotted.partition(".")
        if first in aliases:
            parent = _step_all(base, aliases[first], rest.split(".") if rest else [])
            parents += [parent] if parent is not None else []
        else:
            of_ours = ours.chain(found.module, dotted)
            if of_ours is not None and isinstance(of_ours.node, ast.ClassDef):
                above += _family(ours, base, of_ours.module, of_ours.node.name)
    return [_Class(found.module, found.node, parents), *above]


def _of_family(base: SourceTree, family: list[_Class], parents: list[Found]) -> Iterator[Use]:
    """Yield what a class of ours, with its bases that are ours, overrides and reads of DeepSpeed's class."""
    paths = [f"{one.module}:{one.node.name}" for one in parents if isinstance(one.node, ast.ClassDef)]
    if not paths:
        return
    # The stage's class before the base that all stages have: the one that has most.
    path = max(paths, key=lambda one: len(_members(base, one)))
    members = set(_members(base, path))
    own = {name for one in family for name in _defined(one.node)}
    for one in family:
        yield from _of_methods(one, path, is_marked(family[0].node, "checked"))
        called = {node.func for node in ast.walk(one.node) if isinstance(node, ast.Call)}
        names = {node.attr for node in called if isinstance(node, ast.Attribute) and _is_own(node)}
        for name in sorted((_read(one.node) | _declared(one.node)) & members - own):
            yield Use(f"{path}.{name}", READ, _summary(one.node), (one.module,), called=name in names)


def _of_methods(one: _Class, path: str, is_checked: bool) -> Iterator[Use]:
    """Yield overrides; and of a class that is checked, other methods, whose names DeepSpeed's must not have."""
    for method in _methods(one.node):
        use = Use(f"{path}.{method.name}", OVERRIDE, purpose(ast.get_docstring(method)), (one.module,))
        if is_marked(method):
            yield use._replace(expected=signature(method))
        elif is_checked and not method.name.startswith("__"):
            yield use._replace(is_new=True)


def _members(tree: SourceTree, path: str) -> dict[str, Member]:
    module, _, name = path.partition(":")
    return tree.members(module, name) or {}


def _summary(node: ast.Module | ast.ClassDef) -> str:
    """Return the first sentence of a docstring."""
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".").replace("``", "")


def _methods(cls: ast.ClassDef) -> list[Function]:
    return [statement for statement in cls.body if isinstance(statement, Function)]


def _defined(cls: ast.ClassDef) -> set[str]:
    """Return names that a class of ours defines itself: methods, and class attributes with a value."""
    names = {method.name for method in _methods(cls)}
    for statement in cls.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _declared(cls: ast.ClassDef) -> set[str]:
    """Return names that a class has annotated and given no value: what DeepSpeed's class is to set."""
    bare = [one for one in cls.body if isinstance(one, ast.AnnAssign) and one.value is None]
    return {mangled(one.target.id, cls.name) for one in bare if isinstance(one.target, ast.Name)}


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _read(cls: ast.ClassDef) -> set[str]:
    """Return what is read or written of ``self``, by attribute or by name."""
    found = {node.attr for node in ast.walk(cls) if isinstance(node, ast.Attribute) and _is_own(node)}
    named = ((ast.unparse(one), name) for one, name in _by_name(cls))
    return found | {name for of, name in named if of == "self"}


def _by_name(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield objects, with names of their attributes that are read or written by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1 and ast.unparse(node.func) in _BY_NAME:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.args[0], name.value


# Protocols ########################################################################################


def _of_protocols(ours: SourceTree, base: SourceTree) -> Iterator[Use]:
    module = f"{ours.package}.deepspeed_types"
    for node in _classes(ours.syntax(module)):
        why = _summary(node)
        for target in PROTOCOLS.get(node.name, ()):
            of, _, name = target.partition(":")
            found = base.set_in(of) if name == "*" else _members(base, target)
            for attribute in sorted((_declared(node) | _defined(node)) & set(found)):
                yield Use(f"{target}.{attribute}", READ, f"read attributes of: {why}", (module,))


# Imports ##########################################################################################


@functools.cache
def _aliases(ours: SourceTree, module: str) -> dict[str, str]:
    """Return names in a module of ours that stand for something of DeepSpeed's: targets."""
    found = {}
    for node in ast.walk(ours.syntax(module) or ast.Module([], [])):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "deepspeed"
            and not node.level
        ):
            found.update({one.asname or one.name: f"{node.module}:{one.name}" for one in node.names})
        elif isinstance(node, ast.Import):
            for one in node.names:
                if one.name.partition(".")[0] == "deepspeed":
                    found[one.asname or "deepspeed"] = f"{one.name if one.asname else 'deepspeed'}:"
    return found


def _step_all(tree: SourceTree, target: str, rest: Iterable[str]) -> Found | None:
    """Return what an alias with more names behind it stands for."""
    found = tree.look_up(target)
    for name in rest:
        found = tree.find(found.module, name) if found is not None and isinstance(found.node, ast.Module) else None
    return found


def _of_modules(ours: SourceTree, base: SourceTree) -> Iterator[Use]:
    for module in ours.modules():
        tree = ours.syntax(module)
        aliases = _aliases(ours, module)
        if tree is None:
            continue
        why = _summary(tree)
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            is_called = id(node) in called
            for target in _targets(base, node, aliases):
                yield Use(target, IMPORT, why, (module,), called=is_called)
        for of, name in _by_name(tree):
            at = _last(base, of, aliases)
            found = _step(base, at, name) if at is not None else None
            if found is not None:
                yield Use(found, IMPORT, why, (module,))


def _targets(base: SourceTree, node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Yield what a node names: an import, a dotted name that begins with one, or a string with a dotted name."""
    if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "deepspeed":
        yield from (f"{node.module}:{one.name}" for one in node.names)
    elif isinstance(node, ast.Import):
        yield from (f"{one.name}:" for one in node.names if one.name.partition(".")[0] == "deepspeed")
    elif isinstance(node, ast.Attribute | ast.Name):
        target = _last(base, node, aliases)
        if target is not None and target != "deepspeed:":
            yield target
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
        yield from (target for target in [f"{node.value}:"] if base.look_up(target) is not None)


def _last(base: SourceTree, node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Return what an expression stands for, if all of it is of DeepSpeed's."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Call):
        return _RETURNED.get(_last(base, node.func, aliases) or "")
    if isinstance(node, ast.Attribute):
        before = _last(base, node.value, aliases)
        return _step(base, before, node.attr) if before is not None else None
    return None


def _step(base: SourceTree, target: str, name: str) -> str | None:
    """Return the target of a name in a module or of a member of a class, if BASE has it."""
    found = base.look_up(target)
    if found is None:
        return None
    module, _, qualified = target.partition(":")
    if isinstance(found.node, ast.Module):
        longer = f"{module}.{qualified}:{name}" if qualified else f"{module}:{name}"
    elif isinstance(found.node, ast.ClassDef):
        longer = f"{target}.{name}"
    else:
        return None
    return longer if base.look_up(longer) is not None else None


def described(node: ast.AST | None) -> str:
    """Return what a symbol is, in words."""
    if isinstance(node, Function):
        return kind(node)
    return "a class" if isinstance(node, ast.ClassDef) else "a module" if isinstance(node, ast.Module) else "a value"
