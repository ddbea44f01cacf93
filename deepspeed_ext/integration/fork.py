# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Stand down in a DeepSpeed that has these features built in, by the series in ``patches/``.

Nothing is patched, and ``deepspeed_ext.planner`` and all others, but those that patch, are the fork's own modules
under a second name, so that a process has each of them once. Standard library only, as all that runs inside
``import torch``.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PACKAGE = "deepspeed.runtime.paro"
_FIRST, _LAST = "__init__.py", "__main__.py"  # files of the package: by the first and by the last patch
_OURS = __package__.partition(".")[0]
_STAYING = (f"{_OURS}.__main__", f"{_OURS}.integration", f"{_OURS}.overrides", f"{_OURS}.version")
_ELSEWHERE = {f"{_OURS}.op_builder": "deepspeed.ops.op_builder.loco"}


def is_installed() -> bool:
    """Whether the DeepSpeed that would be imported is such a fork, with all of the series; nothing is imported."""
    return _has(_LAST)


def is_partial() -> bool:
    """Whether that DeepSpeed has a part of the series: then neither form has all features."""
    return _has(_FIRST) and not _has(_LAST)


def _has(file: str) -> bool:
    inside = Path(*PACKAGE.split(".")[1:], file)
    try:
        spec = importlib.util.find_spec("deepspeed")
        places = [] if spec is None else spec.submodule_search_locations or []
        return any((Path(place) / inside).is_file() for place in places)
    except Exception:  # of anybody's finder: it may break the import of DeepSpeed, and not that of torch
        return False


def _theirs(name: str) -> str:
    """Return the fork's name of a module of ours."""
    return _ELSEWHERE.get(name, PACKAGE + name.removeprefix(_OURS))


class _Loader(importlib.abc.Loader):
    """Load the fork's module in the place of ours."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_theirs(spec.name))
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import has put that of the second name there


class _Aliases(importlib.abc.MetaPathFinder):
    """Find modules of ours in the fork, but those that patch, which it does not have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_OURS}.") or fullname.startswith(_STAYING):
            return None
        if importlib.util.find_spec(_theirs(fullname)) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader())


_aliases = _Aliases()


def stand_down() -> None:
    """Make our modules the fork's. Idempotent."""
    if _aliases not in sys.meta_path:
        sys.meta_path.insert(0, _aliases)
