# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Cases that run in the deep tier only, or with newer packages (``tests/versions.md``), and folders of tests; see
tests/README.md. This imports none of the packages."""

import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from packaging.version import Version


def deep(*cases: Any) -> list[Any]:
    """Return cases that only ``scripts/test deep`` runs, to be parametrized; one of several values is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.deep) for case in cases]


def with_some(cases: Iterable[Any], some: Sequence[str], every: Sequence[str]) -> list[Any]:
    """Return each case with some strategies, and for the deep tier with all, to be parametrized."""
    retained = list(cases)
    return [*((case, some) for case in retained), *deep(*((case, every) for case in retained))]


def with_cases(names: str, *cases: Any, ids: Any = None) -> pytest.MarkDecorator:
    """Parametrize a test; ids say which strategies a case has."""
    return pytest.mark.parametrize(names, cases, ids=ids or _by_strategies)


def _by_strategies(value: Any) -> str | None:
    has_names = isinstance(value, tuple) and bool(value) and isinstance(value[0], str)
    return f"{len(value)} strategies, {value[0]}" if has_names else None


def folder_of(test: str) -> str:
    first, slash, _ = test.partition("::")[0].removeprefix("tests/unit/").partition("/")
    return first + slash if slash else "test_*.py"


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
