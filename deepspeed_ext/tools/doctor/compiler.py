# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What compiles kernels: a C++ compiler and ninja, on a GPU also nvcc."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, by_value, ranks_text
from deepspeed_ext.tools.doctor.place import Place

_WITHOUT = (
    "LoCo's operators run in plain PyTorch, more slowly, and DeepSpeed's own (FusedAdam, CPUAdam) cannot be built; "
    "no strategy needs them"
)
_INSTALL = {
    "c++": "Install g++, or name another compiler in CXX.",
    "ninja": "Install it (pip install ninja), and have its folder in PATH.",
    "nvcc": "Install the CUDA toolkit of torch's CUDA version, and set CUDA_HOME.",
}


def examine(place: Place) -> dict[str, Any]:
    """Return the path of each tool, empty where it is missing, and whether kernels were built ahead of time."""
    import torch

    from deepspeed_ext.op_builder import LocoBuilder

    # As torch's cpp_extension finds them.
    tools = {"c++": _which(os.environ.get("CXX", "c++")), "ninja": _which("ninja")}
    cuda = ""
    if torch.version.cuda is not None and torch.cuda.is_available():
        from torch.utils.cpp_extension import CUDA_HOME

        nvcc = str(Path(CUDA_HOME, "bin", "nvcc")) if CUDA_HOME else ""
        tools["nvcc"] = _which(nvcc)
        cuda = _version(tools["nvcc"])
    return {"tools": tools, "built": LocoBuilder().is_built(), "nvcc": cuda, "torch": torch.version.cuda or ""}


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return which tools are missing where."""
    found = []
    for tool in dict.fromkeys(name for answer in answers.values() for name in answer["tools"]):
        paths = by_value({rank: answer["tools"].get(tool, "") for rank, answer in answers.items()})
        lacking = paths.pop("", [])
        if lacking:
            hosts = ", ".join(list(dict.fromkeys(place.hosts[rank] for rank in lacking))[:4])
            said = f"not found on {ranks_text(lacking)} ({hosts}): {_WITHOUT}"
            found.append(Finding(tool, Level.LOOK, said, _INSTALL[tool]))
        else:
            found.append(Finding(tool, Level.OK, ", ".join(paths)))
    other = [
        rank
        for rank, one in answers.items()
        if one["nvcc"] and one["nvcc"].split(".")[0] != one["torch"].split(".")[0]
    ]
    if other:
        one = answers[other[0]]
        said = (
            f"CUDA {one['nvcc']} on {ranks_text(other)}, torch was built with {one['torch']}: it compiles nothing then"
        )
        found.append(Finding("version of nvcc", Level.LOOK, said, _INSTALL["nvcc"]))
    if all(answer["built"] for answer in answers.values()):
        found.append(Finding("LoCo's kernels", Level.OK, "built ahead of time"))
    return found


def _which(program: str) -> str:
    return shutil.which(program.split()[0]) or "" if program.strip() else ""


def _version(nvcc: str) -> str:
    if not nvcc:
        return ""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False, timeout=30)
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else ""


CHECK = Check("compiler", examine, judge)
