# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The patch series: it applies without fuzz, each fix also alone, and the hooks are those of the run-time patches."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import ROOT
from scripts.fork import deepspeed_source, patch_mails, patched_tree, series
from scripts.fork.deepspeed_source import Failed, git
from tests.harness.tiers import deep


@pytest.mark.parametrize("arguments", [["--quick"], *deep([])])
def test_the_series_passes_its_check(archive: Path, arguments: list[str]) -> None:
    """With git am of the patches in git, and the package as pip has installed it."""
    command = [sys.executable, "-m", "scripts.fork.series", "check", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for path in (*patch_mails.PATCHES.glob("*.patch"), patch_mails.SERIES):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(patch_mails, "PATCHES", tmp_path)
    monkeypatch.setattr(patch_mails, "SERIES", tmp_path / "series")
    return tmp_path


def test_a_fix_that_does_not_apply_is_named(archive: Path, copied: Path) -> None:
    second = patch_mails.series()[1]
    text = second.path.read_text(encoding="utf-8")
    second.path.write_text(re.sub(r"(\n@@ .*\n )", r"\1another ", text, count=1), encoding="utf-8")
    problems = [one.partition(": ")[0] for one in patched_tree.problems(copied / "scratch", do_import=False)]
    assert problems == [f"{second.path.name} does not apply", f"alone, {second.path.name} does not apply"]


@pytest.mark.deep  # the check above applies it, too
def test_the_whole_series_applies_to_a_fresh_base(archive: Path, tree: Path, tmp_path: Path) -> None:
    """The tree then has the package unchanged, and DeepSpeed as the patches in git make it."""
    assert series.series(argparse.Namespace(to=tmp_path / "series")) == 0
    fresh = deepspeed_source.unpack(deepspeed_source.requirement().version, tmp_path / "tree")
    git(fresh, "am", "--quiet", "--keep-cr", *sorted(str(path) for path in (tmp_path / "series").iterdir()))
    for name, source in patched_tree.package().items():
        assert (fresh / name).read_bytes() == source.read_bytes(), name
    git(fresh, "fetch", "--quiet", str(tree), "HEAD")
    assert set(git(fresh, "diff", "--name-only", "FETCH_HEAD", "HEAD").split()) == set(patched_tree.package())


@pytest.mark.quick
def test_base_is_a_version_and_its_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed_source, "WORK", tmp_path)
    (tmp_path / f"deepspeed-{deepspeed_source.requirement().version}.tar.gz").write_bytes(b"something else")
    with pytest.raises(Failed, match=r"has SHA-256 [0-9a-f]{64}, BASE says [0-9a-f]{64}: remove it"):
        deepspeed_source.fetch(deepspeed_source.requirement().version)
    monkeypatch.setattr(deepspeed_source, "BASE", tmp_path / "BASE")
    deepspeed_source.BASE.write_text("deepspeed==0.19.8\n")
    with pytest.raises(Failed, match=r"must have a line 'deepspeed==VERSION --hash=sha256"):
        deepspeed_source.requirement()
