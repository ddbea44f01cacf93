# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA sources with the builder's flags, and reads the resources of each kernel from ptxas."""

import os
import re
import shutil
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from deepspeed_ext.op_builder import LocoBuilder, source_folder
from tests.harness.compiler import run

NVCC = shutil.which("nvcc")
SOURCES = ("loco_cuda.cu", "difference_cuda.cu", "lossless_cuda.cu", "sum_cuda.cu")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_ONE = threading.Lock()  # of a process' environment
_NAME = re.compile(r"[a-z_]+_tile")


class Taken(NamedTuple):
    """Resources of one instantiation of a kernel."""

    source: str
    kernel: str  # without its template arguments
    symbol: str
    architecture: int  # 80: sm_80
    registers: int  # of a thread
    shared: int  # bytes of a thread block, that are declared
    stack: int  # bytes of local memory of a thread
    spilled: int  # bytes that are stored and loaded, as instructions


def compile_source(source: str, capabilities: Sequence[str], output: Path, *more: str) -> tuple[list[Taken], str]:
    """Compile one of ``SOURCES`` as the package's builder does, for capabilities such as "9.0"; return the resources
    of its kernels, and the output of nvcc, or raise RuntimeError if it does not compile. ``more`` has ``-c`` for an
    object, ``-fatbin`` for the device's code alone."""
    from torch.utils import cpp_extension

    assert NVCC is not None, "nvcc, of the CUDA toolkit, is needed"
    folders = [*LocoBuilder().include_paths(), *cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    command = [NVCC, *arguments(capabilities), *(f"-I{folder}" for folder in folders), "-Xptxas=-v", *more]
    command += ["-Xcompiler=-fPIC", "-DTORCH_EXTENSION_NAME=loco", "-o", str(output), str(source_folder() / source)]
    answer = run(*command)
    return list(parse_resources(source, answer)), answer


def arguments(capabilities: Sequence[str]) -> list[str]:
    """Return the builder's arguments of nvcc for these architectures, also where torch has no CUDA."""
    toolkit = mock.patch("torch.utils.cpp_extension.CUDA_HOME", str(Path(NVCC or "").parents[1]))
    with _ONE, toolkit, mock.patch.dict(os.environ, TORCH_CUDA_ARCH_LIST=";".join(capabilities)):
        builder = LocoBuilder()
        builder.build_for_cpu = False
        assert {Path(source).name for source in builder.sources() if source.endswith(".cu")} == set(SOURCES)
        return list(builder.strip_empty_entries(builder.nvcc_args()))


def parse_resources(source: str, said: str) -> Iterator[Taken]:
    """Read ptxas' output; each kernel has an entry, properties and a line of resources."""
    parts = _ENTRY.split(said)
    for symbol, architecture, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        memory, used, shared = (results.search(text) for results in (_MEMORY, _USED, _SHARED))
        names = _NAME.findall(symbol)
        assert memory and used and names, f"ptxas says of {symbol} something else than expected: {text[:500]}"
        stack, stored, loaded = map(int, memory.groups())
        own = int(used[1]), int(shared[1]) if shared else 0, stack, stored + loaded
        yield Taken(source, names[-1], symbol, int(architecture.rstrip("af")), *own)


def knows(capability: str) -> bool:
    """Return whether this nvcc compiles for an architecture: "10.0". An older one does not know the newest."""
    assert NVCC is not None
    return f"compute_{capability.replace('.', '')}" in run(NVCC, "--list-gpu-arch").split()


def version() -> str:
    assert NVCC is not None
    match = re.search(r"release ([\d.]+)", run(NVCC, "--version"))
    return match[1] if match else "unknown"
