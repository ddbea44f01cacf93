# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Collects the symbols of DeepSpeed that the package uses, and looks them up in the DeepSpeed that the process
imports.

``drift.py`` runs this as a program with each DeepSpeed, with JSON files:

    python -m scripts.fork.usage uses OUT        the DeepSpeed that the package is written for
    python -m scripts.fork.usage look-up IN OUT  any other one
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

OURS, THEIRS = "deepspeed_ext", "deepspeed"
# Protocols of the package, and the classes of DeepSpeed that they describe; ``*`` is any object that a module sets
# attributes of.
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
    "Engine": ("deepspeed.runtime.engine:DeepSpeedEngine",),
    "LeafOptimizer": ("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",),
    "MappedParameter": ("deepspeed.runtime.zero.stage_1_and_2:*", "deepspeed.utils.mixed_precision_linkage:*"),
    "ZeroChunk": ("deepspeed.runtime.zero.partition_parameters:*",),
    "ZeroParameter": ("deepspeed.runtime.zero.partition_parameters:*",),
}
# Methods that the package calls, or wraps, on objects without a type.
UNTYPED: dict[str, tuple[str, ...]] = {
    "deepspeed.runtime.engine:DeepSpeedEngine": ("_backward_epilogue", "_backward_prologue", "_take_model_step"),
    "deepspeed.runtime.pipe.module:PipelineModule": ("ckpt_layer_path_list", "stage_owner"),
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator": (
        "_PartitionedParameterCoordinator__params_to_release",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": ("_load_global_state", "clear_backward_seen_flag"),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": (
        "_load_global_state_stage3",
        "_restore_from_bit16_weights",
        "clear_backward_seen_flag",
        "load_hp_checkpoint_state",
    ),
}
_RETURNED = {"get_accelerator": "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator"}
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
_KINDS = {property: "a property", staticmethod: "a static method", classmethod: "a class method"}


# Symbols ##########################################################################################


def look_up(target: str) -> dict[str, Any] | None:
    """Return the kind of a symbol, the arguments of a callable and the value of a constant; None if there is none.

    Args:
        target: ``module:`` for a module, ``module:name``, ``module:Class.member``, or ``module:*.attribute``.
    """
    module, _, qualified = target.partition(":")
    names = list(filter(None, qualified.split(".")))
    try:
        value: Any = importlib.import_module(module)
        if names and not hasattr(value, names[0]) and _is_module(value, names[0]):
            importlib.import_module(f"{module}.{names[0]}")
    except Exception as error:
        return {"error": f"{module} cannot be imported: {type(error).__name__}: {error}"}
    if names and names[0] == "*":
        return {"kind": "a value"} if names[1] in _set_in(value) else None
    for name in names:
        if not isinstance(value, type):
            if not hasattr(value, name):
                return None
            value = getattr(value, name)
        elif name in dir(value):
            value = inspect.getattr_static(value, name)
        else:
            return {"kind": "a value"} if name in _set_by_methods(value) else None
    return _description(value)


def _is_module(package: ModuleType, name: str) -> bool:
    return hasattr(package, "__path__") and importlib.util.find_spec(f"{package.__name__}.{name}") is not None


def _exists(target: str) -> bool:
    return "error" not in (look_up(target) or {"error": ""})


def _description(value: Any) -> dict[str, Any]:
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if isinstance(value, ModuleType):
        return {"kind": "a module"}
    if isinstance(value, type):
        return {"kind": "a class", "arguments": _arguments(value.__init__)}
    if type(value) in _KINDS or inspect.isroutine(function):
        return {"kind": _KINDS.get(type(value), "a function"), "arguments": _arguments(function)}
    parts = value if isinstance(value, tuple | list) else [value]
    is_plain = all(isinstance(part, str | int | float | bytes | None) for part in parts)
    return {"kind": "a value", "value": repr(value) if is_plain else None}


def _arguments(function: Any) -> list[tuple[str, int, str | None]] | None:
    """Return name, kind and default of each argument."""
    from deepspeed_ext.overrides import plain_signature

    try:
        signature = plain_signature(function)
    except (TypeError, ValueError):
        return None
    results = signature.parameters.values()
    return [
        (result.name, int(result.kind), None if result.default is result.empty else repr(result.default))
        for result in results
    ]


@functools.cache
def _set_by_methods(cls: type) -> set[str]:
    """Return the fields of a class of DeepSpeed, and the attributes that its methods set."""
    results = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == THEIRS:
            stored = {name for name, context in _of_self(_syntax_of(base)) if isinstance(context, ast.Store)}
            results |= {_mangled(name, base.__name__) for name in (*stored, *vars(base).get("__annotations__", ()))}
    return results


@functools.cache
def _set_in(module: ModuleType) -> set[str]:
    """Return the attributes that a module sets on any object, and its functions, which may be set as attributes."""
    nodes = list(ast.walk(_syntax(module)))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return functions | {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


def _syntax(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))


@functools.cache
def _syntax_of(cls: type) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(cls)))


def _of_self(tree: ast.AST) -> Iterator[tuple[str, ast.expr_context]]:
    """Yield the attributes of ``self`` in a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node.attr, node.ctx


def _mangled(name: str, owner: str) -> str:
    return f"_{owner.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


# Uses #############################################################################################


def uses() -> list[dict[str, Any]]:
    """Return the used symbols, each once, with the reason, the modules that use it, and its kind."""
    modules = [importlib.import_module(name) for name in our_modules()]
    results: dict[str, dict[str, Any]] = {}
    by_module = (use for module in modules for use in _of_module(module))
    for use in (*_of_classes(modules), *_of_protocols(), *_of_untyped(modules), *by_module):
        registered = results.setdefault(
            use["target"], {"places": [], "called": False, "was": look_up(use["target"]), **use}
        )
        registered["called"] = registered["called"] or use.get("called", False)
        registered["places"] = sorted({*registered["places"], use["place"]})
    return list(results.values())


def our_modules() -> list[str]:
    """Return the names of all modules of the package."""
    spec = importlib.util.find_spec(OURS)
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    files = [path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("*.py"))]
    return [".".join(file.parts).removesuffix(".__init__") for file in files if file.name != "__main__"]


def _summary(of: Any) -> str:
    return " ".join((of.__doc__ or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".").replace("``", "")


def _of_classes(modules: list[ModuleType]) -> Iterator[dict[str, Any]]:
    """Yield overrides of methods, names that must stay free, and attributes that our classes read of themselves."""
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    classes = {cls for cls in classes if cls.__module__.partition(".")[0] == OURS}
    above = {base for cls in classes for base in cls.__bases__}
    for cls in sorted(classes - above, key=lambda cls: (cls.__module__, cls.__name__)):
        parent = next((base for base in cls.__mro__ if base.__module__.partition(".")[0] == THEIRS), None)
        if parent is not None:
            yield from _of_class(cls, parent)


def _of_class(cls: type, parent: type) -> Iterator[dict[str, Any]]:
    from deepspeed_ext.overrides import purpose

    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == OURS]
    path, own = f"{parent.__module__}:{parent.__qualname__}", {name for base in bases for name in vars(base)}
    functions = [
        (base, name, getattr(value, "fget", None) or getattr(value, "__func__", value), value)
        for base in bases
        for name, value in vars(base).items()
    ]
    is_checked = any(getattr(function, "__override__", False) for _, _, function, _ in functions)
    for base, name, function, value in functions:
        use = {"target": f"{path}.{name}", "place": base.__module__, "why": purpose(function.__doc__)}
        if getattr(function, "__override__", False):
            yield use | {"rule": "override", **_description(value)}
        elif is_checked and inspect.isroutine(function) and not name.startswith("__"):
            yield use | {"rule": "new"}
    for base in bases:
        syntax = _syntax_of(base)
        read = {name for name, _ in _of_self(syntax)} | set(vars(base).get("__annotations__", ()))
        read |= {name for of, name in _by_name(syntax) if ast.unparse(of) == "self"}
        for name in sorted(
            ({_mangled(name, base.__name__) for name in read} & {*dir(parent), *_set_by_methods(parent)}) - own
        ):
            use = {"target": f"{path}.{name}", "place": base.__module__, "why": _summary(base)}
            yield use | {"called": True}  # if it is a method: also one that is passed on


def _of_protocols() -> Iterator[dict[str, Any]]:
    try:
        module = importlib.import_module(f"{OURS}.deepspeed_types")
    except ImportError:
        return
    for name, targets in PROTOCOLS.items():
        protocol = getattr(module, name)
        methods = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[:2] != "__"}
        for of, item in ((of, item) for of in targets for item in sorted({*protocol.__annotations__, *methods})):
            if _exists(target := f"{of}.{item}"):
                why = f"read attributes of: {_summary(protocol)}"
                yield {"target": target, "place": module.__name__, "why": why, "called": item in methods}


def _of_untyped(modules: list[ModuleType]) -> Iterator[dict[str, Any]]:
    for of, name in ((of, name) for of, names in UNTYPED.items() for name in names):
        for module in modules:
            if re.search(rf"\b{name}\b", Path(str(module.__file__)).read_text(encoding="utf-8")):
                yield {"target": f"{of}.{name}", "place": module.__name__, "why": _summary(module), "called": True}


def _of_module(module: ModuleType) -> Iterator[dict[str, Any]]:
    """Yield the symbols of DeepSpeed that a module imports, at any time, and the attributes that it reads."""
    tree, aliases = _syntax(module), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] == THEIRS:
            aliases |= {item.asname or item.name: f"{node.module}:{item.name}" for item in node.names}
        elif isinstance(node, ast.Import):
            names = [item for item in node.names if item.name.partition(".")[0] == THEIRS]
            aliases |= {item.asname or THEIRS: f"{item.name if item.asname else THEIRS}:" for item in names}
            yield from (
                {"target": f"{item.name}:", "place": module.__name__, "why": _summary(module)} for item in names
            )
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    results = [(target, False) for target in aliases.values() if target != f"{THEIRS}:"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (target := _target(node, aliases)):
            results.append((target, id(node) in called))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"deepspeed(\.\w+)+", str(node.value)):
            results += [(f"{node.value}:", False)] if _exists(f"{node.value}:") else []
    results += [(step, False) for of, name in _by_name(tree) if (step := _step(_target(of, aliases), name))]
    for target, is_called in results:
        yield {"target": target, "place": module.__name__, "why": _summary(module), "called": is_called}


def _by_name(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield objects and names in ``getattr(object, name)`` and ``replace_attributes(object, name=value)``."""
    for node in ast.walk(tree):
        function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if function == "replace_attributes":
            yield from ((node.args[0], keyword.arg) for keyword in node.keywords if keyword.arg)
        elif function in _BY_NAME and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.args[0], name.value


def _target(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Return the symbol of DeepSpeed that an expression refers to."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Call):
        return _RETURNED.get((_target(node.func, aliases) or "").rpartition(":")[2])
    return _step(_target(node.value, aliases), node.attr) if isinstance(node, ast.Attribute) else None


def _step(target: str | None, name: str) -> str | None:
    """Return the target of a name in a module or class, if there is such a name."""
    kind = (look_up(target) or {}).get("kind") if target else None
    if kind not in ("a module", "a class"):
        return None
    module, _, qualified = str(target).partition(":")
    if kind == "a module":
        longer = f"{f'{module}.{qualified}'.rstrip('.')}:{name}"
        try:
            importlib.import_module(longer.partition(":")[0])
        except ImportError:  # a module under another name, such as that of an attribute
            longer = f"{getattr(importlib.import_module(module), qualified).__name__}:{name}"
    else:
        longer = f"{target}.{name}"
    return longer if _exists(longer) else None


def failures() -> dict[str, str]:
    """Return the modules of the package that cannot be imported, with the error."""
    results = {}
    for name in our_modules():
        try:
            importlib.import_module(name)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            file = re.sub(r"^.*/(?=deepspeed(_ext)?/)", "", last.filename)
            text = f"{type(error).__name__}: {error} ({file}, line {last.lineno})"
            results[name] = re.sub(r" \(/\S*?/(?=deepspeed/)", " (", " ".join(text.split()))
    return results


def main() -> None:
    command, *provided, out = sys.argv[1:]
    if command == "uses":
        answer: Any = uses()
    else:
        targets = json.loads(Path(*provided).read_text(encoding="utf-8"))
        answer = {"symbols": {target: look_up(target) for target in targets}, "failures": failures()}
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
