# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The package builds without torch, without a compiler and without an index, and a wheel is all that it needs."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import deepspeed_ext
from deepspeed_ext.integration import patcher
from deepspeed_ext.integration.patches import DEEPSPEED_VERSIONS, TESTED_VERSIONS
from scripts import ROOT
from scripts.fork.deepspeed_source import requirement
from tests.harness.documents import page


def test_archives_build_without_torch_and_compilers(tmp_path: Path) -> None:
    source = tmp_path / "source"  # since a build leaves files there
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "deepspeed_ext", source / "deepspeed_ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "csrc", source / "csrc")
    # A module named torch that cannot be imported, and a search path without programs.
    (tmp_path / "torch.py").write_text("raise ImportError('setup.py must not need torch')\n", encoding="utf-8")
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(tmp_path), "CC": "/nonexistent"}
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)]
    done = subprocess.run(build, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,), (archive,) = (list((tmp_path / "dist").glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    twine = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(archive)]
    checked = subprocess.run(twine, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    assert wheel.name == f"deepspeed_ext-{deepspeed_ext.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        metadata = next(name for name in names if name.endswith("entry_points.txt"))
        assert "deepspeed_ext = deepspeed_ext.integration.activation:autoload" in content.read(metadata).decode()
        metadata = next(name for name in names if name.endswith("METADATA"))
        needed = re.findall("^Requires-Dist: (deepspeed[^;\n]*)$", content.read(metadata).decode(), re.MULTILINE)
    # pip installs what the patcher does not refuse.
    assert [Requirement(line).specifier for line in needed] == [SpecifierSet(DEEPSPEED_VERSIONS)]
    assert "deepspeed_ext/py.typed" in names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "deepspeed_ext").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assets = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("deepspeed_ext/tools/*/assets/*")}
    assert assets == {name for name in names if "/assets/" in name}
    kernels = {f"deepspeed_ext/csrc/loco/{path.name}" for path in (ROOT / "csrc" / "loco").iterdir()}
    assert kernels == {name for name in names if "/csrc/" in name}


@pytest.mark.quick
@pytest.mark.parametrize("version, known", [("0.19.7", False), ("0.19.8", True), ("0.19.9", True), ("0.20.0", False)])
def test_other_versions_of_deepspeed_are_refused(monkeypatch: pytest.MonkeyPatch, version: str, known: bool) -> None:
    assert SpecifierSet(DEEPSPEED_VERSIONS).contains(version) == known
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))
    refused = None if known else f"its version is {version}, supported is {DEEPSPEED_VERSIONS}"
    assert patcher.unsupported_reason() == refused


@pytest.mark.quick
def test_pages_name_the_versions_that_are_supported() -> None:
    """``DEEPSPEED_VERSIONS`` is the one place: pages that say what is installed repeat it, the table of other versions
    agrees with it, and what is called tested is what the tests run with."""
    supported, release = SpecifierSet(DEEPSPEED_VERSIONS), r"DeepSpeed `?(\d+\.\d+\.\d+)"
    readme, limits = page("README.md").text, page("deepspeed_ext/zero/README.md").section("## Limits").text
    assert f"DeepSpeed {DEEPSPEED_VERSIONS}" in readme and f"DeepSpeed `{DEEPSPEED_VERSIONS}`" in limits
    assert set(re.findall(release, readme)) == set(TESTED_VERSIONS)
    assert set(re.findall(r"(\d+\.\d+\.\d+) is tested", limits)) == set(TESTED_VERSIONS)
    development = (ROOT / "scripts/development.txt").read_text(encoding="utf-8")
    pinned = re.findall("^deepspeed==(.*)$", development, re.MULTILINE)
    assert {requirement().version, *pinned} == set(TESTED_VERSIONS) and all(map(supported.contains, TESTED_VERSIONS))
    rows = {row[0]: row[3] for row in page("patches/README.md").rows("DeepSpeed")}
    versions = {name for name in rows if not name.startswith("main")}
    assert versions == {"0.18.9", *(f"0.19.{number}" for number in range(9))}
    for version in versions:
        tested = "yes, tested" if version in TESTED_VERSIONS else "yes"
        assert rows[version] == (tested if supported.contains(version) else "no"), version
