# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Packaging. Pure Python: builds with and without build isolation, without torch and without a compiler."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

TEST = ["pytest", "pytest-timeout", "hypothesis", "peft", "transformers"]
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
    "hypothesis==6.170.15",
    "peft==0.21.2",
    "transformers==5.23.0",
    "matplotlib==3.11.2",
    "ruff==0.17.5",
]


def version() -> str:
    """The version in the package, read without importing it."""
    text = (HERE / "deepspeed_ext" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE).group(1)


setup(
    name="deepspeed-ext",
    version=version(),
    description="Group-aware ZeRO for DeepSpeed: PaRO sharding strategies, switched on by ds_config keys",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["deepspeed_ext", "deepspeed_ext.*"]),
    install_requires=["deepspeed>=0.19.8", "torch>=2.10", "packaging", "ninja"],
    extras_require={"test": TEST, "plot": PLOT, "dev": DEV},
    # torch imports the entry points of this group at the end of its own import: installing is activating.
    entry_points={"torch.backends": ["deepspeed_ext = deepspeed_ext.activation:autoload"]},
)
