# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Recognizes a DeepSpeed with hooks for this package: one with the patch series of ``patches/`` applied.

It is not patched at run time: each symbol in the table of patches has a decorator in DeepSpeed's source instead, which
gets the replacement from ``patcher.replaced``.
"""

import importlib.util
import re
from pathlib import Path

from deepspeed_ext.version import __version__

VERSION = 2  # of the set of hooks: if a hook is added, moved or removed, increase it here and in patches/
MODULE = "deepspeed_ext_hooks"  # module of the fork that defines the version and the decorator
REMEDY = (
    f"For hooks of version {VERSION}, install the fork that was built for deepspeed_ext {__version__}, or apply the "
    f"whole series of its patches"
)


def version() -> int | None:
    """Return the hook version of the DeepSpeed that would be imported; None if it has no hooks."""
    try:
        spec = importlib.util.find_spec("deepspeed")  # does not import it
        folders = [] if spec is None else spec.submodule_search_locations or []
        files = [file for folder in folders if (file := Path(folder, f"{MODULE}.py")).is_file()]
        match = re.search(r"^VERSION = (\d+)", files[0].read_text(encoding="utf-8"), re.MULTILINE) if files else None
    except Exception:  # another package's finder may raise, which must not break ``import torch``
        return None
    return int(match[1]) if match else 0 if files else None


def problem() -> str | None:
    """Return why this package cannot use the hooks; None if it can, or if DeepSpeed has none."""
    installed = version()
    if installed in (None, VERSION):
        return None
    return f"its hooks have version {installed}, but deepspeed_ext {__version__} needs version {VERSION}"
