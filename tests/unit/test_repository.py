# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Hooks before a commit, and CI, run what scripts/test runs; each folder of tests has a budget."""

import importlib.util
import re

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from deepspeed_ext.integration.patches import DEEPSPEED_VERSIONS
from scripts import ROOT
from tests.campaigns import deep
from tests.harness.budgets import budgets
from tests.harness.tiers import folder_of

pytestmark = pytest.mark.quick


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_hooks_are_the_static_checks() -> None:
    static = text_of("scripts/test").split('echo "==> ruff"')[1].split('echo "==> pytest"')[0]
    commands = re.findall(r"^ *((?:ruff|mypy|lint-imports)\b.*?)(?: &)?$", static, re.MULTILINE)
    hooks = re.findall(r"^ *entry: (.*)$", text_of(".pre-commit-config.yaml"), re.MULTILINE)
    assert len(hooks) == 4 and sorted(hooks) == sorted(commands)


def test_each_part_of_the_deep_tier_runs_at_night() -> None:
    workflow = text_of(".github/workflows/deep.yml")
    named = re.search(r"part: \[(.*)\]\n", workflow)
    assert named is not None and named[1].split(", ") == list(deep.PARTS)
    assert "- run: scripts/test deep ${{ matrix.part }}\n" in workflow and "schedule:" in workflow
    for name, part in deep.PARTS.items():
        assert part.command[1] == "-m" and importlib.util.find_spec(part.command[2]) is not None, name


def test_oldest_and_newest_versions_run_at_night() -> None:
    workflow, ci = text_of(".github/workflows/versions.yml"), text_of(".github/workflows/ci.yml")
    rows = dict(re.findall(r'- \{versions: (\w+), python: "(3\.\d+)"\}\n', workflow))
    assert "- run: scripts/test\n" in workflow and "schedule:" in workflow
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text_of("pyproject.toml"))
    assert (rows["oldest"], rows["newest"]) == (promised[0], promised[-1])
    assert promised[0] == re.findall(r'requires-python = ">=(3\.\d+)"', text_of("pyproject.toml"))[0]
    assert {*rows.values(), *re.findall(r'python-version: "(3\.\d+)"', ci)} == set(promised)


def test_releases_use_pinned_actions_and_tools() -> None:
    workflow, tools = text_of(".github/workflows/release.yml"), text_of("scripts/release.txt")
    actions = re.findall(r"uses: \S+@(\S+)", workflow)
    assert len(actions) == 3 and all(re.fullmatch("[0-9a-f]{40}", commit) for commit in actions)
    assert "pip install --require-hashes" in workflow and "python -m build --no-isolation" in workflow
    shared = re.findall(r"^(?:build|setuptools)==\S+(?= --hash=sha256:[0-9a-f]{64}$)", tools, re.MULTILINE)
    assert len(shared) == 2 and all(f"\n{tool}\n" in text_of("scripts/development.txt") for tool in shared)


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """And of all that has none, some version is installed."""
    pinned = {
        name: dict(re.findall(r"^([\w-]+)==(\S+)$", text_of(f"scripts/{name}.txt"), re.MULTILINE))
        for name in ("oldest", "development")
    }
    assert pinned["oldest"].keys() == pinned["development"].keys()
    bounds = r'"([\w-]+)>=([\d.]+)"'
    (extra,) = re.findall(r"^frameworks = \[(.*?)\]", text_of("pyproject.toml"), re.MULTILINE | re.DOTALL)
    found = dict(re.findall(bounds, extra) + re.findall(bounds, text_of("setup.py")))
    found["deepspeed"] = next(one.version for one in SpecifierSet(DEEPSPEED_VERSIONS) if one.operator == ">=")
    assert len(re.findall('"', extra)) == 2 * (len(found) - 2) and "torch" in found, "each framework has a bound"
    for name, bound in found.items():
        assert Version(pinned["oldest"][name]) == Version(bound), name


def test_each_folder_of_tests_has_a_budget() -> None:
    files = (ROOT / "tests/unit").rglob("test_*.py")
    assert set(budgets()) == {folder_of(path.relative_to(ROOT).as_posix()) for path in files}


def test_the_newest_version_is_in_the_changes() -> None:
    version = re.search(r'__version__ = "([^"]+)"', text_of("deepspeed_ext/version.py"))
    assert version is not None and f"Version {version[1]} " in text_of("CHANGELOG.md")
