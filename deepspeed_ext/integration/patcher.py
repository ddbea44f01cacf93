# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Replace DeepSpeed's symbols, at run time or by hooks of a fork, undo it, and report the state of each."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

from deepspeed_ext import overrides
from deepspeed_ext.integration import activation, fork, patches
from deepspeed_ext.integration.symbols import MARK, Patch, signature_of


class _Applied(NamedTuple):
    """A patch that is in place."""

    owner: Any
    name: str
    original: Any
    replacement: Any


_applied: dict[str, list[_Applied]] = {}  # by the symbol's path; several where a module was reloaded
_hooked: list[Any] = []  # replacements, in the order of their hooks
_unknown: list[str] = []  # hooks without a row in the table of patches


def _listed() -> tuple[Patch, ...]:
    """Return what may be patched: of a DeepSpeed with hooks, only symbols of other packages."""
    return patches.BESIDE if fork.version() is not None else patches.PATCHES + patches.BESIDE


def modules() -> frozenset[str]:
    """Return the modules after whose import something is patched."""
    return frozenset({f"deepspeed.{fork.MODULE}", *(patch.module for patch in _listed() if patch.replace)})


def foreign() -> str | None:
    """Return why this DeepSpeed as a whole is none that we know; None if it may be one."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    said = getattr(sys.modules.get("deepspeed"), "__version__", None) or _installed()
    if said is not None and not SpecifierSet(patches.DEEPSPEED_VERSIONS).contains(Version(said).base_version):
        return f"its version is {said}, supported is {patches.DEEPSPEED_VERSIONS}"
    return fork.problem()


def _installed() -> str | None:
    """Return DeepSpeed's version as pip knows it: while it is imported it does not say it yet."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:  # a folder on the search path
        return None


def apply(module: str) -> None:
    """Replace the symbols of a module that is imported already, and again those that a reload has restored.

    A symbol that is not as we know it stays as it is, and all do if this DeepSpeed is none that we know. Gates are
    replaced even then, to refuse our keys.
    """
    due = [patch for patch in _listed() if patch.module == module and not _is_in_place(patch)]
    unknown = any(patch.replace for patch in due) and foreign() is not None
    for patch in due:
        if patch.replace is None or ((unknown or patch.problem()) and not patch.gate):
            continue
        try:
            owner, name, original = patch.locate()
        except AttributeError:
            continue
        given = (require,) if patch.takes_require else ()
        replacement: Any = patch.replace(getattr(original, "__func__", original), *given)
        setattr(replacement, MARK, True)
        if isinstance(original, staticmethod):
            replacement = staticmethod(replacement)
        every = _applied.setdefault(patch.path, [])
        known = [original, *(one.replacement for one in every)]
        every.append(_Applied(owner, name, original, replacement))
        for holder in (owner, *_importers(every[-1])):
            _exchange(holder, name, known, replacement)


def _is_in_place(patch: Patch) -> bool:
    """Return whether the present value of a symbol is our replacement, or what another package has made of it.

    ``importlib.reload`` restores the original, and so does code that has kept it.
    """
    if not _exists(patch):
        return False
    *_, value = patch.locate()
    function = getattr(value, "__func__", value)
    package = patch.module.partition(".")[0]
    restored = str(getattr(function, "__module__", "")).partition(".")[0] == package
    return hasattr(function, MARK) or (patch.path in _applied and not restored)


def _exists(patch: Patch) -> bool:
    try:
        return bool(patch.locate())
    except (AttributeError, ImportError):
        return False


def _importers(applied: _Applied) -> list[Any]:
    """Return the modules that may have imported a function from the module that defines it, under its name."""
    defined = isinstance(applied.owner, ModuleType) and applied.owner.__name__ == applied.original.__module__
    every = list(sys.modules.values()) if defined else []
    return [module for module in every if applied.name in getattr(module, "__dict__", ())]


def _exchange(owner: Any, name: str, old: Iterable[Any], new: Any) -> bool:
    """Put an object in the place of another one, and return whether that was there."""
    present = inspect.getattr_static(owner, name, None)
    found = any(present is one for one in old)
    if found:
        setattr(owner, name, new)
    return found


def undo() -> None:
    """Put the originals back, except where somebody else has patched on top of us."""
    for path, every in list(_applied.items()):
        for one in every:
            for holder in _importers(one):
                if holder is not one.owner:
                    _exchange(holder, one.name, [one.replacement], one.original)
        restored = [_exchange(one.owner, one.name, [one.replacement], one.original) for one in every]
        if restored[-1]:
            del _applied[path]


def replaced(version: int, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of a function of DeepSpeed: the decorator of its hook calls this.

    The function is returned unchanged if the package is switched off, if no patch has the name, or if the signature is
    not the expected one. If the version of the hooks is not ours, only the gates are replaced: they reject our keys.

    Args:
        version: of the hooks.
        name: the label of a patch.
        function: DeepSpeed's.
    """
    if activation.is_off():
        return function
    patch = next((patch for patch in patches.REPLACED if patch.label == name), None)
    if patch is None or patch.replace is None:
        _unknown.append(f"{name} at {function.__module__}.{function.__qualname__}")
        return function
    if not patch.gate and (version != fork.VERSION or signature_of(function) != patch.signature):
        return function
    replacement = patch.replace(function, *((require,) if patch.takes_require else ()))
    setattr(replacement, MARK, name)
    _hooked.append(replacement)
    return replacement


def surplus() -> list[str]:
    """Return the hooks that no patch corresponds to; all modules of the table must have been imported."""
    known = set()
    for patch in patches.REPLACED:
        with contextlib.suppress(AttributeError):  # the symbol is gone, which the patch itself reports
            value = patch.locate()[2]
            known.add(id(getattr(value, "__func__", value)))
    others = [one for one in _hooked if id(one) not in known]
    names = [f"{getattr(one, MARK)} at {one.__module__}.{one.__qualname__}" for one in others]
    return [f"no patch corresponds to the hook {name}" for name in (*_unknown, *names)]


def import_all() -> None:
    """Import every module that holds a symbol of the list."""
    for module in {patch.module for patch in patches.PATCHES}:
        importlib.import_module(module)


def status() -> list[tuple[Patch, str]]:
    """Return each patch with its state: applied, hooked, as expected, not imported, or what is wrong.

    Nothing is imported for it.
    """
    rows = []
    beside = [patch for patch in patches.BESIDE if patch.module in sys.modules and _exists(patch)]
    for patch in (*patches.PATCHES, *beside):
        if patch.module not in sys.modules:
            state = "not imported"
        elif problem := patch.problem():
            state = problem
        else:
            state = (_replaced_by(patch) or _unreplaced(patch)) if patch.replace else "as expected"
        rows.append((patch, state))
    return rows


def _replaced_by(patch: Patch) -> str | None:
    """Return how a symbol has been replaced; None if it has not been."""
    if patch.is_hooked():
        return "hooked"
    return "applied" if patch.path in _applied and _is_in_place(patch) else None


def _unreplaced(patch: Patch) -> str:
    return "not applied" if fork.version() is None else f"without its hook {patch.label}"


def override_problems() -> list[str]:
    """Return what of DeepSpeed's classes is not as our subclasses know it. Imports them."""
    problems: list[str] = []
    for cls in patches.OVERRIDING:
        module, _, name = cls.partition(":")
        try:
            problems += overrides.problems(getattr(importlib.import_module(module), name))
        except ImportError as error:
            if not (error.name or "").startswith("deepspeed."):
                raise
            problems.append(f"{error.name} has not what {cls} imports: {error}")
    return list(dict.fromkeys(problems))


def require() -> None:
    """Check that this DeepSpeed is one that we know: the seams where our keys arrive call it.

    Raises:
        RuntimeError: this DeepSpeed is not one that we know, or a symbol has moved or changed.
    """
    problems = [problem for problem in [foreign()] if problem]
    known = not problems
    for patch in patches.PATCHES:
        importlib.import_module(patch.module)
        if patch.path in _applied and not _is_in_place(patch):
            apply(patch.module)
        problem = patch.problem()  # of the original: a replacement shows the signature of what it wraps
        if problem or (known and patch.replace and not _replaced_by(patch)):
            problems.append(problem or f"{patch.path} is {_unreplaced(patch)}")
    problems += override_problems()
    if problems:
        tested = ", ".join(patches.TESTED_VERSIONS)
        remedy = "Install one of those" if fork.version() is None else fork.REMEDY
        raise RuntimeError(
            f"deepspeed_ext does not know this DeepSpeed: {'; '.join(problems)}. Tested: DeepSpeed {tested}. "
            f"{remedy}, or remove the keys of deepspeed_ext (paro_*, mics_*, zeropp_loco_param) from "
            f"zero_optimization."
        )
