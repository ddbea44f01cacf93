# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Versions are the same on all ranks, and DeepSpeed is patched as expected."""

import platform
import re
from pathlib import Path
from typing import Any

from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, by_value, ranks_text
from deepspeed_ext.tools.doctor.place import Place
from deepspeed_ext.version import __version__

_DRIVER = Path("/proc/driver/nvidia/version")
_SHOWN = 4  # problems of patches
_HARMLESS = ("python", "driver", "device")  # which may differ, though one hardly wants it


def examine(place: Place) -> dict[str, Any]:
    """Return this rank's versions, and what of the patches is not as expected."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from deepspeed_ext.clocks import device_name

    found = {
        "deepspeed_ext": __version__,
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(),
    }
    if get_accelerator().device_name() == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver()
    return {"versions": found, "patches": place.patch_problems()}


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return a finding for each version, and one for the patches."""
    names = dict.fromkeys(name for answer in answers.values() for name in answer["versions"])
    found = [_same(name, {rank: one["versions"].get(name, "none") for rank, one in answers.items()}) for name in names]
    patches = by_value({rank: tuple(one["patches"]) for rank, one in answers.items()})
    for problems, ranks in patches.items():
        if problems:
            more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            said = f"{ranks_text(ranks)}: {'; '.join(problems[:_SHOWN])}{more}"
            advice = "Our keys are refused there. See python -m deepspeed_ext on that host."
            found.append(Finding("patches", Level.WRONG, said, advice))
        elif len(patches) == 1:
            found.append(Finding("patches", Level.OK, "as expected"))
    return found


def _same(name: str, values: dict[int, str]) -> Finding:
    found = by_value(values)
    if len(found) == 1:
        return Finding(name, Level.OK, next(iter(found)))
    said = "; ".join(f"{value}: {ranks_text(ranks)}" for value, ranks in found.items())
    if name in _HARMLESS:
        return Finding(name, Level.LOOK, said, "Ranks wait for the slowest one: better have the same everywhere.")
    return Finding(name, Level.WRONG, said, "Install the same version on every node.")


def _driver() -> str:
    text = _DRIVER.read_text() if _DRIVER.exists() else ""
    match = re.search(r"Kernel Module\D*?\s(\d+[\d.]*)", text)
    return match[1] if match else "unknown"


CHECK = Check("versions", examine, judge)
