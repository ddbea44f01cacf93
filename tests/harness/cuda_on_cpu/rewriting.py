# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rewrites syntax of nvcc in the sources of the kernels: launches, assembly, shared memory, their registration. Each
says how often it must match in a file: a kernel that has changed beyond them fails here, and not by a result."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

NAMESPACE = "cuda_on_cpu"  # operators with kernels for the CPU
SOURCES = ("loco_cuda.cu", "difference_cuda.cu", "lossless_cuda.cu", "sum_cuda.cu")
HEADERS = ("block.h", "cuda_block.h", "cuda_launch.h", "cuda_runs.h", "jobs.h", "lossless.h")
# What nobody rewrites, and what is left of what was to be rewritten.
_UNKNOWN = re.compile(r"<<<|\basm\b|__shared__|extern __|\bcudaLaunch|cooperative_groups|__constant__")
_BOUNDS = re.compile(r"__launch_bounds__\((\w+)")


class _Rewrite(NamedTuple):
    pattern: str
    by: str | Callable[[re.Match[str]], str]
    counts: Mapping[str, int]  # in each file; none in others


def _launched(found: re.Match[str]) -> str:
    indent, kernel, configuration, arguments = found.groups()
    name = kernel.partition("<")[0]
    return f'{indent}::cuda_on_cpu::launch("{name}", {configuration}, [&] {{ {kernel}({arguments}); }});'


def _shared(found: re.Match[str]) -> str:
    kind, declared = found.groups()
    uses = [f"::cuda_on_cpu::use_shared({name}, sizeof({name}));" for name in re.findall(r"(?:^|, )(\w+)\[", declared)]
    return " ".join((f"static {kind} {declared};", *uses))


_REWRITES = (
    _Rewrite(
        r"(?m)^( *)(\w+(?:<[^;\n]*?>)?)<<<([^;\n]*?)>>>\(([^;\n]*?)\);",
        _launched,
        {"loco_cuda.cu": 2, "difference_cuda.cu": 2, "lossless_cuda.cu": 3, "sum_cuda.cu": 1},
    ),
    _Rewrite(
        r'asm\("rcp\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\(([^;\n]*)\)\);',
        r"\1 = ::cuda_on_cpu::rcp_approx_ftz(\2);",
        {"cuda_block.h": 1},
    ),
    _Rewrite(
        r"__shared__ (\w+) ([^;\n]*);", _shared, {"loco_cuda.cu": 1, "difference_cuda.cu": 1, "lossless_cuda.cu": 5}
    ),
    _Rewrite(
        r"STABLE_TORCH_LIBRARY_IMPL\(deepspeed_paro, CUDA, library\)",
        f"STABLE_TORCH_LIBRARY_IMPL({NAMESPACE}, CPU, library)",
        dict.fromkeys(SOURCES, 1),
    ),
)


def rewritten(name: str, text: str) -> str:
    """Return a source or header of the kernels as C++ that includes ``shim.h``; ValueError if it has syntax that is
    not rewritten, or another number of matches than expected."""
    bounds = set(_BOUNDS.findall(text)) - {"kThreads"}
    if bounds:
        raise ValueError(f"{name}: expected all kernels to be bounded by and launched with kThreads, got {bounds}")
    for rewrite in _REWRITES:
        text, count = re.subn(rewrite.pattern, rewrite.by, text)
        expected = rewrite.counts.get(name, 0)
        if count != expected:
            raise ValueError(f"{name}: expected {expected} of {rewrite.pattern}, got {count}")
    if remaining := _UNKNOWN.findall(text):
        raise ValueError(f"{name}: expected nothing that only nvcc knows to be left, got {remaining}")
    return text
