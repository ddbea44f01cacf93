# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Marks for cases that need newer packages than the installed ones; see ``tests/versions.md``.

Imports none of the packages: it serves the process that runs pytest, too.
"""

import importlib.metadata

import pytest
from packaging.version import Version


def since(**versions: str) -> pytest.MarkDecorator:
    """Skip a test where a package, named by a keyword, is missing or older than a version."""
    return pytest.mark.skipif(bool(_older(versions)), reason=f"needs {_older(versions)}")


def skip_before(**versions: str) -> None:
    """Skip the case that runs, on its ranks too, where a package is missing or older than a version."""
    if older := _older(versions):
        pytest.skip(f"needs {older}")


def _older(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if not _is_new(name, version))


def _is_new(name: str, version: str) -> bool:
    try:
        return Version(importlib.metadata.version(name)) >= Version(version)
    except importlib.metadata.PackageNotFoundError:
        return False
