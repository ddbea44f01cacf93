# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Replaces DeepSpeed's symbols at run time or by a fork's hooks, undoes it, and reports the state of each symbol."""

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


class _AppliedPatch(NamedTuple):
    """A patch that is in place."""

    owner: Any
    name: str
    original: Any
    replacement: Any


_applied: dict[str, list[_AppliedPatch]] = {}  # by the symbol's path; several if a module was reloaded
_hooked_functions: list[Any] = []  # replacements, in the order of their hooks
_unknown_hooks: list[str] = []  # hooks without a row in the table of patches


def _active_patches() -> tuple[Patch, ...]:
    """Return the patches that may be applied; with a DeepSpeed that has hooks, only those of other packages."""
    return patches.OTHER_PACKAGES if fork.version() is not None else patches.PATCHES + patches.OTHER_PACKAGES


def modules() -> frozenset[str]:
    """Return the modules that are patched after their import."""
    return frozenset({f"deepspeed.{fork.MODULE}", *(patch.module for patch in _active_patches() if patch.replace)})


def unsupported_reason() -> str | None:
    """Return why this DeepSpeed version is not supported; None if it may be."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    version = getattr(sys.modules.get("deepspeed"), "__version__", None) or _installed_version()
    # Development and local versions count as their release.
    if version is not None and not SpecifierSet(patches.DEEPSPEED_VERSIONS).contains(Version(version).base_version):
        return f"its version is {version}, supported is {patches.DEEPSPEED_VERSIONS}"
    return fork.problem()


def _installed_version() -> str | None:
    """Return DeepSpeed's version from package metadata: ``__version__`` is not set while DeepSpeed is imported."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:  # a folder on the search path
        return None


def apply(module: str) -> None:
    """Replace the symbols of an imported module, including those that a reload has restored.

    A symbol with an unexpected signature is not replaced. With an unsupported DeepSpeed no symbol is replaced. Gates
    are replaced in both cases, to refuse our keys.
    """
    missing = [patch for patch in _active_patches() if patch.module == module and not _is_in_place(patch)]
    unsupported = any(patch.replace for patch in missing) and unsupported_reason() is not None
    for patch in missing:
        if patch.replace is None or ((unsupported or patch.problem()) and not patch.gate):
            continue
        try:
            owner, name, original = patch.locate()
        except AttributeError:  # ``require`` reports a missing symbol
            continue
        extra = (require,) if patch.takes_require else ()
        replacement: Any = patch.replace(getattr(original, "__func__", original), *extra)
        setattr(replacement, MARK, True)
        if isinstance(original, staticmethod):  # a plain function would receive ``self``
            replacement = staticmethod(replacement)
        history = _applied.setdefault(patch.path, [])
        # After a reload, importers may still hold an earlier replacement.
        old_values = [original, *(applied.replacement for applied in history)]
        history.append(_AppliedPatch(owner, name, original, replacement))
        # Modules that imported the function by name keep calling the original unless replaced there, too.
        for holder in (owner, *_importers(history[-1])):
            _replace_attribute(holder, name, old_values, replacement)


def _is_in_place(patch: Patch) -> bool:
    """Return whether a symbol's current value is our replacement, or another package's wrapper around it.

    ``importlib.reload`` restores the original, and so does code that saved it earlier.
    """
    if not _exists(patch):
        return False
    *_, value = patch.locate()
    function = getattr(value, "__func__", value)
    package = patch.module.partition(".")[0]
    is_original = str(getattr(function, "__module__", "")).partition(".")[0] == package
    # Other packages' wrappers around a replacement also have the mark: ``functools.wraps`` copies it.
    return hasattr(function, MARK) or (patch.path in _applied and not is_original)


def _exists(patch: Patch) -> bool:
    try:
        return bool(patch.locate())
    except (AttributeError, ImportError):
        return False


def _importers(applied: _AppliedPatch) -> list[Any]:
    """Return the modules that may have imported a function by name (``from m import f``) from its defining module."""
    is_module_level = isinstance(applied.owner, ModuleType) and applied.owner.__name__ == applied.original.__module__
    candidates = list(sys.modules.values()) if is_module_level else []
    return [module for module in candidates if applied.name in getattr(module, "__dict__", ())]


def _replace_attribute(owner: Any, name: str, old: Iterable[Any], new: Any) -> bool:
    """Replace an attribute whose value is one of ``old``, and return whether it was."""
    value = inspect.getattr_static(owner, name, None)
    is_old = any(value is candidate for candidate in old)
    if is_old:
        setattr(owner, name, new)
    return is_old


def undo() -> None:
    """Restore the originals, except where other code has patched on top of ours."""
    for path, history in list(_applied.items()):
        for applied in history:
            for holder in _importers(applied):
                if holder is not applied.owner:
                    _replace_attribute(holder, applied.name, [applied.replacement], applied.original)
        are_restored = [
            _replace_attribute(applied.owner, applied.name, [applied.replacement], applied.original)
            for applied in history
        ]
        if are_restored[-1]:
            del _applied[path]


def replaced(version: int, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of a DeepSpeed function; called by the decorator of a hook.

    The function is returned unchanged if the package is switched off, if no patch has the name, or if the signature is
    not the expected one. If the hooks have another version, only the gates are replaced: they reject our keys.

    Args:
        name: label of a patch.
        function: DeepSpeed's function.
    """
    if activation.is_off():
        return function
    patch = next((patch for patch in patches.REPLACED if patch.label == name), None)
    if patch is None or patch.replace is None:
        _unknown_hooks.append(f"{name} at {function.__module__}.{function.__qualname__}")
        return function
    if not patch.gate and (version != fork.VERSION or signature_of(function) != patch.signature):
        return function
    replacement = patch.replace(function, *((require,) if patch.takes_require else ()))
    setattr(replacement, MARK, name)
    _hooked_functions.append(replacement)
    return replacement


def unmatched_hooks() -> list[str]:
    """Return the hooks without a patch; all modules of the table must have been imported."""
    patched_ids = set()
    for patch in patches.REPLACED:
        with contextlib.suppress(AttributeError):  # a missing symbol is reported by ``Patch.problem``
            function = patch.locate()[2]
            patched_ids.add(id(getattr(function, "__func__", function)))
    unmatched = [hook for hook in _hooked_functions if id(hook) not in patched_ids]
    names = [f"{getattr(hook, MARK)} at {hook.__module__}.{hook.__qualname__}" for hook in unmatched]
    return [f"no patch corresponds to the hook {name}" for name in (*_unknown_hooks, *names)]


def import_all() -> None:
    """Import every module in the table of patches."""
    for module in {patch.module for patch in patches.PATCHES}:
        importlib.import_module(module)


def status() -> list[tuple[Patch, str]]:
    """Return each patch with its state: applied, hooked, as expected, not imported, or the problem.

    Imports nothing.
    """
    rows = []
    other_packages = [patch for patch in patches.OTHER_PACKAGES if patch.module in sys.modules and _exists(patch)]
    for patch in (*patches.PATCHES, *other_packages):
        if patch.module not in sys.modules:
            state = "not imported"
        elif problem := patch.problem():
            state = problem
        else:
            state = (_replacement_state(patch) or _missing_replacement(patch)) if patch.replace else "as expected"
        rows.append((patch, state))
    return rows


def _replacement_state(patch: Patch) -> str | None:
    """Return how a symbol has been replaced; None if it has not been."""
    if patch.is_hooked():
        return "hooked"
    return "applied" if patch.path in _applied and _is_in_place(patch) else None


def _missing_replacement(patch: Patch) -> str:
    return "not applied" if fork.version() is None else f"without its hook {patch.label}"


def override_problems() -> list[str]:
    """Return where DeepSpeed's classes differ from the expectations of our subclasses. Imports them."""
    problems: list[str] = []
    for cls in patches.OVERRIDING_CLASSES:
        module, _, name = cls.partition(":")
        try:
            problems += overrides.override_problems(getattr(importlib.import_module(module), name))
        except ImportError as error:
            if not (error.name or "").startswith("deepspeed."):
                raise
            problems.append(f"{error.name} lacks a name that {cls} imports: {error}")
    return list(dict.fromkeys(problems))


def require() -> None:
    """Check that this DeepSpeed is supported; called by the seams that receive our keys.

    Raises:
        RuntimeError: this DeepSpeed is not supported, or a symbol has moved or changed.
    """
    problems = [problem for problem in [unsupported_reason()] if problem]
    is_supported = not problems
    for patch in patches.PATCHES:
        # Symbols are compared even if no code has used their modules yet.
        importlib.import_module(patch.module)
        if patch.path in _applied and not _is_in_place(patch):  # a reload has restored the original
            apply(patch.module)
        problem = patch.problem()  # compares the original: ``functools.wraps`` keeps its signature
        if problem or (is_supported and patch.replace and not _replacement_state(patch)):
            problems.append(problem or f"{patch.path} is {_missing_replacement(patch)}")
    problems += override_problems()
    if problems:
        tested = ", ".join(patches.TESTED_VERSIONS)
        remedy = "Install a tested version" if fork.version() is None else fork.REMEDY
        raise RuntimeError(
            f"deepspeed_ext does not support this DeepSpeed: {'; '.join(problems)}. Tested: DeepSpeed {tested}. "
            f"{remedy}, or remove the keys of deepspeed_ext (paro_*, mics_*, zeropp_loco_param) from "
            f"zero_optimization."
        )
