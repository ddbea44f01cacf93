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
    """A copy of the patches, which is read in their place."""
    for path in (*patch_mails.PATCHES.glob("*.patch"), patch_mails.SERIES):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(patch_mails, "PATCHES", tmp_path)
    monkeypatch.setattr(patch_mails, "SERIES", tmp_path / "series")
    return tmp_path


def test_a_fix_that_does_not_apply_is_named(archive: Path, copied: Path) -> None:
    """Also one that does not bring its tests."""
    _, second, third, *_ = patch_mails.series()
    text = second.path.read_text(encoding="utf-8")
    second.path.write_text(re.sub(r"(\n@@ .*\n )", r"\1another ", text, count=1), encoding="utf-8")
    text = third.path.read_text(encoding="utf-8")
    third.path.write_text(text.replace("Standalone-Test: tests/", "Standalone-Test: tests/no"), encoding="utf-8")
    both, alone, lacks = patched_tree.problems(copied / "scratch", do_import=False)
    assert both.startswith(f"{second.path.name} does not apply: ")
    assert alone.startswith(f"alone, {second.path.name} does not apply: ")
    assert lacks == f"{third.path.name} lacks its Standalone-Test {third.tests[0].replace('tests/', 'tests/no', 1)}"


def test_the_whole_series_applies_to_a_fresh_base(archive: Path, tree: Path, tmp_path: Path) -> None:
    """The tree then has the package unchanged, and DeepSpeed as the patches in git make it."""
    assert series.series(argparse.Namespace(to=tmp_path / "series")) == 0
    fresh = deepspeed_source.unpack(deepspeed_source.requirement().version, tmp_path / "tree")
    git(fresh, "am", "--quiet", "--keep-cr", *sorted(str(path) for path in (tmp_path / "series").iterdir()))
    for name, source in patched_tree.package().items():
        assert (fresh / name).read_bytes() == source.read_bytes(), name
    git(fresh, "fetch", "--quiet", str(tree), "HEAD")
    assert set(git(fresh, "diff", "--name-only", "FETCH_HEAD", "HEAD").split()) == set(patched_tree.package())
    with pytest.raises(Failed, match="exists"):
        series.series(argparse.Namespace(to=tmp_path / "series"))


@pytest.mark.quick
def test_what_is_wrong_with_a_patch_or_the_series_is_reported(copied: Path) -> None:
    last = patch_mails.series()[-1]
    text = last.path.read_text(encoding="utf-8")
    for old, new, problem in (
        (r"\nSigned-off-by: .*", "", "no trailer Signed-off-by"),
        (r"\nRemove-When: .*", "", "no trailer Remove-When"),
        ("not-applicable", "submitted", "Upstream-Status 'submitted' without an address"),
        ("not-applicable", "soon", "Upstream-Status 'soon', expected one of pending, submitted"),
        (r"(?s)\n\n.*\n\n(?=Upstream)", "\n\nBecause.\n\n", "the body does not explain the patch"),
        ("engine: a", "engine: a subject with many words, which is too long, and a", "at most 72 fit"),
    ):
        last.path.write_text(re.sub(old, new, text, count=1), encoding="utf-8")
        (found,) = patch_mails.read(last.path).problems()
        assert found.startswith(f"{last.path.name}: ") and problem in found
    names = patch_mails.SERIES.read_text(encoding="utf-8").split()
    for order, message in ((names[:-1], r"lists \[.*\], its folder has \["), (names[::-1], "before the hooks")):
        patch_mails.SERIES.write_text("\n".join(order), encoding="utf-8")
        with pytest.raises(Failed, match=message):
            patch_mails.series()
    last.path.write_text("diff --git a/x b/x\n", encoding="utf-8")
    with pytest.raises(Failed, match="is not a mail of git format-patch"):
        patch_mails.read(last.path)


@pytest.mark.quick
def test_base_names_a_version_and_its_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed_source, "WORK", tmp_path)
    version = deepspeed_source.requirement().version
    (tmp_path / f"deepspeed-{version}.tar.gz").write_bytes(b"something else")
    with pytest.raises(Failed, match=r"has SHA-256 [0-9a-f]{64}, BASE says [0-9a-f]{64}: remove it"):
        deepspeed_source.fetch(version)
    monkeypatch.setattr(deepspeed_source, "BASE", tmp_path / "BASE")
    for text in ("deepspeed==0.19.8\n", f"deepspeed>=0.19.8 --hash=sha256:{'0' * 64}", ""):
        deepspeed_source.BASE.write_text(text)
        with pytest.raises(Failed, match=r"must have a line 'deepspeed==VERSION --hash=sha256"):
            deepspeed_source.requirement()
