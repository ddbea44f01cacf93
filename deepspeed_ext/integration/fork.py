# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Recognize a DeepSpeed with hooks for this package, which the series in ``patches/`` makes.

It is not patched at run time: each symbol in the table of patches has a decorator in DeepSpeed's source instead, which
asks ``hooks.replaced`` for the replacement.
"""

import importlib.util
import re
from pathlib import Path

from deepspeed_ext.integration.symbols import Patch
from deepspeed_ext.version import __version__

VERSION = 2  # of the set of hooks: increase it if a hook is added, moved or removed, in patches/ as well
MODULE = "deepspeed_ext_hooks"  # of DeepSpeed: has the version and the decorator
MARK = "__deepspeed_ext__"  # attribute of a replacement; of the one of a hook, its label
REMEDY = (
    f"For hooks of version {VERSION}, install the fork that was built for deepspeed_ext {__version__}, or apply the "
    f"whole series of its patches"
)


def version() -> int | None:
    """Return the version of the hooks of the DeepSpeed that would be imported; None if it has none."""
    try:
        spec = importlib.util.find_spec("deepspeed")
        folders = [] if spec is None else spec.submodule_search_locations or []
        files = [file for folder in folders if (file := Path(folder, f"{MODULE}.py")).is_file()]
        found = re.search(r"^VERSION = (\d+)", files[0].read_text(encoding="utf-8"), re.MULTILINE) if files else None
    except Exception:  # of another package's finder: it may break the import of DeepSpeed, and not that of torch
        return None
    return int(found[1]) if found else 0 if files else None


def problem() -> str | None:
    """Return why this package cannot use the hooks; None if it can, or if there are none."""
    found = version()
    if found in (None, VERSION):
        return None
    return f"its hooks have version {found}, and deepspeed_ext {__version__} needs version {VERSION}"


def label(patch: Patch) -> str:
    """Return the name of a patch's replacement in a hook: without the package or the folder ``seams``."""
    assert patch.replace is not None
    path = f"{patch.replace.__module__}.{patch.replace.__name__}"
    return path.removeprefix(f"{__package__}.seams.").removeprefix(f"{__package__.partition('.')[0]}.")


def is_hooked(patch: Patch) -> bool:
    """Whether the symbol of a patch is the replacement that its hook has made."""
    try:
        *_, value = patch.locate()
    except AttributeError:
        return False
    return getattr(getattr(value, "__func__", value), MARK, None) == label(patch)
