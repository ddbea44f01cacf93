# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bugs of DeepSpeed's that are fixed while it runs, and nothing else.

A fork has the same fix in DeepSpeed's own files, by a patch of the series; this changes nothing there.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.deepspeed_types import Engine


def find_files_of_other_stages(names: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(names)
    def _get_all_ckpt_names(self: "Engine", checkpoints_path: str, tag: str) -> list[str]:
        found = names(self, checkpoints_path, tag)
        if found or not self.load_universal_checkpoint():
            return found
        pattern = Path(self._get_ckpt_name(checkpoints_path, tag, mp_placeholder="*", pp_placeholder="0"))
        return _other_files(pattern.name, pattern.parent)

    return _get_all_ckpt_names


def _other_files(pattern: str, folder: Path) -> list[str]:
    """Return what to take for model states where DeepSpeed's pattern finds none: those of the other stages.

    Args:
        pattern: base name of a file, of which ``zero_pp_rank_<n>_`` is missing or too much.
    """
    stages12 = re.sub(r"^zero_pp_rank_\d+_", "", pattern)
    wanted = f"zero_pp_rank_0_{pattern}" if stages12 == pattern else stages12
    return sorted(str(path) for path in folder.glob(wanted))
