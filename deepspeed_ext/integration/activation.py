# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches DeepSpeed's modules as they are imported.

torch imports the ``torch.backends`` entry points of installed packages at the end of its own import; ours is
``autoload``. DeepSpeed imports torch before any of its submodules, so hooks on submodules work in every import order.
A hook on the package ``deepspeed`` would not: its import has already started. This module only uses the standard
library and never raises, because an exception would break ``import torch`` for every program in the environment.

Most of these programs never import DeepSpeed. Until it is imported, nothing else of this package is imported, and
nothing is replaced.
"""

import functools
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_WATCHED = ("deepspeed", "accelerate", "transformers")  # packages whose modules are patched when they are imported
_WATCHED_PREFIXES = tuple(f"{name}." for name in _WATCHED)
_OFF_SWITCH = "DEEPSPEED_EXT_DISABLE"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

logger = logging.getLogger(__name__)


def _patcher() -> Any:
    """Import and return the module ``patcher``."""
    return importlib.import_module("deepspeed_ext.integration.patcher")


class _PostImportHook(importlib.abc.MetaPathFinder):
    """Delegates to the other finders, and applies our patches after a module has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_WATCHED_PREFIXES) or fullname not in _patcher().modules():
            return None
        for finder in sys.meta_path:
            # Skip this finder itself: calling it would recurse endlessly.
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _run_after(spec.loader, fullname)
                return spec
        return None


def _run_after(loader: importlib.abc.Loader, name: str) -> None:
    """Patch module ``name`` after its loader (which serves no other module) has executed it."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _apply(name)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _apply(name: str) -> None:
    try:
        for module in (name, *_imported_unwatched()):
            _patcher().apply(module)
    except Exception:
        logger.exception("deepspeed_ext could not patch %s; its ds_config keys will not work", name)


def _imported_unwatched() -> list[str]:
    """Return already imported modules to patch whose packages are not watched."""
    return [name for name in _patcher().modules() if not name.startswith(_WATCHED_PREFIXES) and name in sys.modules]


def is_off() -> bool:
    """Whether the environment variable disables the package."""
    return _is_off(os.environ.get(_OFF_SWITCH, ""))


@functools.cache
def _is_off(value: str) -> bool:
    """Whether a value means yes. Warns once about a value that means neither yes nor no."""
    word = value.strip().lower()
    if word and word not in (*_YES, *_NO):
        logger.warning(
            "%s must be one of %s, or of %s, got %r: deepspeed_ext stays active",
            _OFF_SWITCH,
            ", ".join(_YES),
            ", ".join(_NO),
            value,
        )
    return word in _YES


_hook = _PostImportHook()


def activate() -> None:
    """Patch DeepSpeed's imported modules now, and the others after their import. Idempotent.

    If DeepSpeed has hooks for this package, only symbols of other packages are patched.
    """
    if is_off():
        return
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)  # first: any earlier finder would load modules without the hook
    if not any(name in sys.modules for name in _WATCHED):
        return
    for name in _patcher().modules():
        module = sys.modules.get(name)
        # A module that is still being executed is incomplete; the hook patches it afterwards.
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _apply(name)


def deactivate() -> None:
    """Undo all patches, and patch no later imports. A fork's hooks are not affected."""
    if _hook in sys.meta_path:
        sys.meta_path.remove(_hook)
    if "deepspeed_ext.integration.patcher" in sys.modules:
        _patcher().undo()


def autoload() -> None:
    """Do nothing: loading this ``torch.backends`` entry point imports the package, which activates it."""
