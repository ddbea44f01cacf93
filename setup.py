# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Packaging. Builds with and without build isolation, without torch and without a compiler.

The kernels of ``csrc`` are built when they are used; with DS_BUILD_LOCO=1 (and --no-build-isolation) now.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

HERE = Path(__file__).parent

FRAMEWORKS = ["transformers", "accelerate", "peft", "trl", "datasets", "lightning", "bitsandbytes"]
RUNNER = ["pytest", "pytest-timeout", "pytest-xdist", "coverage", "hypothesis", "covertable"]
TEST = [*RUNNER, *FRAMEWORKS, "safetensors", "yapf", "mypy", "import-linter"]
PLOT = ["matplotlib"]
# The one place for the versions that development and CI use.
DEV = [
    "deepspeed==0.19.8",
    "torch==2.13.0",
    "numpy==2.4.6",
    "pydantic==2.14.3",
    "packaging==26.3",
    "ninja==1.13.2",
    "pytest==9.2.0",
    "pytest-timeout==2.4.0",
    "pytest-xdist==3.8.0",
    "hypothesis==6.170.15",
    "coverage==7.17.4",
    "covertable==3.2.0",
    "transformers==5.23.0",
    "safetensors==0.8.0",
    "accelerate==1.15.0",
    "peft==0.21.2",
    "trl==1.16.0",
    "datasets==5.2.0",
    "lightning==2.6.6",
    "bitsandbytes==0.50.2",
    "matplotlib==3.11.2",
    "ruff==0.17.5",
    "mypy==2.4.1",
    "import-linter==2.16",
    "yapf==0.43.0",
]


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
    name="deepspeed-ext",
    version=constant("__version__", "version.py"),
    description="Group-aware ZeRO for DeepSpeed: PaRO sharding and LoCo gradients, switched on by ds_config keys",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    # The sources of kernels go along: they are built when they are used.
    packages=[*find_packages(include=["deepspeed_ext", "deepspeed_ext.*"]), "deepspeed_ext.csrc.loco"],
    package_dir={"deepspeed_ext.csrc.loco": "csrc/loco"},
    package_data={"deepspeed_ext.csrc.loco": ["*.h", "*.cpp", "*.cu"]},
    install_requires=[f"deepspeed{DEEPSPEED}", "torch>=2.10", "packaging", "ninja"],
    extras_require={"test": TEST, "plot": PLOT, "dev": DEV},
    # torch imports the entry points of this group at the end of its own import: installing is activating.
    entry_points={"torch.backends": ["deepspeed_ext = deepspeed_ext.integration.activation:autoload"]},
    **kernels(),
)
