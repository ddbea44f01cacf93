# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What of the package is computed; the rest is in pyproject.toml. Builds with and without build isolation, without
torch and without a compiler.

The kernels of ``csrc`` are built when they are used; with DS_BUILD_LOCO=1 (and --no-build-isolation) now.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def constant(name: str, file: str) -> str:
    """Return a string that a module of the package has under a name, without importing it."""
    text = (HERE / "deepspeed_ext" / file).read_text(encoding="utf-8")
    return re.search(rf'^{name} = "([^"]+)"', text, re.MULTILINE).group(1)


DEEPSPEED = constant("DEEPSPEED_VERSIONS", "integration/patches.py")  # what the package does not refuse when it runs


def kernels() -> dict[str, Any]:
    """Arguments of ``setup`` that build the kernels, where the environment asks for it."""
    if os.environ.get("DS_BUILD_LOCO") != "1":
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension

        sys.path.insert(0, str(HERE))
        from deepspeed_ext.op_builder import LocoBuilder
    except ImportError as error:
        raise SystemExit(
            f"DS_BUILD_LOCO=1 builds kernels against the torch and the DeepSpeed that are installed, but {error}. "
            f"Install them, and build with --no-build-isolation."
        ) from error
    return {"ext_modules": [LocoBuilder().builder()], "cmdclass": {"build_ext": BuildExtension}}


setup(
    version=constant("__version__", "version.py"),
    # The sources of kernels go along: they are built when they are used.
    packages=[*find_packages(include=["deepspeed_ext", "deepspeed_ext.*"]), "deepspeed_ext.csrc.loco"],
    package_dir={"deepspeed_ext.csrc.loco": "csrc/loco"},
    package_data={
        "deepspeed_ext": ["py.typed"],
        "deepspeed_ext.tools.plan": ["assets/*"],
        "deepspeed_ext.tools.report": ["assets/*"],
        "deepspeed_ext.csrc.loco": ["*.h", "*.cpp", "*.cu"],
    },
    install_requires=[f"deepspeed{DEEPSPEED}", "torch>=2.10", "packaging", "ninja"],
    **kernels(),
)
