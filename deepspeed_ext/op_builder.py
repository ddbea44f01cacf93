# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels of ``csrc`` with DeepSpeed's op builder, at first use or ahead of time with DS_BUILD_LOCO=1."""

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder.builder import CUDAOpBuilder

# The stable ABI of the oldest torch that we support, so that a build with a newer torch runs with all releases since.
_STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Bits must not depend on the compiler, so each operation is rounded once.
_EXACT = ("-ffp-contract=off", "-Wno-psabi")


class LocoBuilder(CUDAOpBuilder):
    """Builds LoCo's kernels for the CPU, and for CUDA if torch has it."""

    BUILD_VAR = "DS_BUILD_LOCO"
    NAME = "loco"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=self.NAME if name is None else name)

    def absolute_name(self) -> str:
        """Return the name of the module that is built ahead of time."""
        return "deepspeed_ext.loco._kernels"

    def sources(self) -> list[str]:
        """Return the source files."""
        names = ["loco_cpu.cpp", "lossless_cpu.cpp"]
        if not self.build_for_cpu:
            names += ["loco_cuda.cu", "difference_cuda.cu", "lossless_cuda.cu"]
        return [str(source_folder() / name) for name in names]

    def include_paths(self) -> list[str]:
        """Return the folders of headers."""
        return [str(source_folder())]

    def cxx_args(self) -> list[str]:
        """Return DeepSpeed's compiler flags, with torch's stable ABI and exact arithmetic.

        Debug symbols are left out, since they take a quarter of the compile time.
        """
        cuda = [] if self.build_for_cpu else ["-DUSE_CUDA"]
        return [*(arg for arg in super().cxx_args() if arg != "-g"), _STABLE_ABI, *_EXACT, *cuda]

    def nvcc_args(self) -> list[str]:
        """Return DeepSpeed's nvcc flags, with exact arithmetic."""
        args = [arg for arg in super().nvcc_args() if arg != "--use_fast_math"]
        return [*args, "-fmad=false", "-DUSE_CUDA", _STABLE_ABI] if args else args

    def builder(self) -> Any:
        """Return the extension for a ``setup.py``, with relative paths of sources, as setuptools requires."""
        extension = super().builder()
        extension.sources = [os.path.relpath(source) for source in extension.sources]
        return extension

    def is_built(self) -> bool:
        """Return whether the kernels were built ahead of time."""
        return importlib.util.find_spec(self.absolute_name()) is not None

    def load(self, verbose: bool = True) -> Any:
        """Import the kernels if they were built ahead of time; otherwise build them now."""
        if self.is_built():
            return importlib.import_module(self.absolute_name())
        from deepspeed.utils import logger
        from torch.utils.cpp_extension import _get_build_directory  # where ``jit_load`` will build

        from deepspeed_ext.build_lock import built_once

        folder = Path(_get_build_directory(self.name, verbose=False))
        with built_once(folder, "the kernels of LoCo"):
            if not (folder / f"{self.name}.so").exists():  # else it is loaded, and compiled only if sources are newer
                logger.warning(
                    f"deepspeed_ext: compiling the kernels of LoCo in {folder}, which takes a minute or two, once"
                )
            return self.jit_load(verbose)


def source_folder() -> Path:
    """Return ``csrc/loco``, which is beside the package in a clone, and inside an installed package."""
    package = Path(__file__).resolve().parent
    installed = package / "csrc" / "loco"
    return installed if installed.is_dir() else package.parent / "csrc" / "loco"
