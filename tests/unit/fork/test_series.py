# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The patch series: complete, up to date with ours, and each patch leaves a tree that can be imported."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import ROOT
from scripts.fork import deepspeed_source, patch_mails, patched_tree, series, standalone, translated_sources
from tests.harness.tiers import deep

MAIL = """From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: somebody <somebody@example.com>
Date: Sat, 21 Nov 2026 12:00:00 +0000
Subject: [PATCH] zero: a subject that is so long that it
 is folded

Because of a reason that takes more than fifteen words to be told, or nobody would believe that it is one.

{trailers}---
 file | 1 +
"""
TRAILERS = """Generated-From: deepspeed_ext/leaf/units.py
Upstream-Status: pending
Remove-When: pigs fly
Signed-off-by: somebody <somebody@example.com>
"""


def mail(tmp_path: Path, text: str = MAIL, trailers: str = TRAILERS) -> patch_mails.Mail:
    path = tmp_path / "0001-a.patch"
    path.write_text(text.format(trailers=trailers))
    return patch_mails.read(path)


@pytest.mark.parametrize("quick", [True, *deep(False)])
def test_the_series_holds(archive: Path, capsys: pytest.CaptureFixture[str], quick: bool) -> None:
    """It applies without fuzz, brings our files as they are, names all twins, and each tree can be imported; each fix
    applies alone. That the last tree can be imported, test_fork.py shows, too."""
    status = series.check(argparse.Namespace(quick=quick))
    out, err = capsys.readouterr()
    assert status == 0, out + err
    lines = out.splitlines()
    assert len([line for line in lines if ".patch: " in line]) == len(patch_mails.series())
    fixes = [line.partition(".patch: ")[0] + ".patch" for line in lines if line.endswith("lines, applies alone")]
    assert fixes == [one.path.name for one in standalone.fixes(patch_mails.series())] and len(fixes) == 8
    total = next(line for line in lines if line.startswith("in all"))
    seam, symbols = (int(word) for word in total.split() if word.isdigit())
    assert seam / symbols < 3, total  # fewer is better


def test_each_fix_applies_alone_or_is_named(archive: Path, tmp_path: Path) -> None:
    """Those of the series do; one that needs another, comes late, or does not bring its tests does not."""
    found = patch_mails.series()
    tree = deepspeed_source.unpack(deepspeed_source.requirement().version, tmp_path / "tree")
    assert standalone.problems(found, tree, do_import=False) == []
    needy = next(one for one in found if "saved-as-a-whole" in one.path.name)
    fix = standalone.fixes(found)[-1]
    tests = "tests/unit/nothing.py"
    wrong = [one._replace(trailers=(("Standalone-Test", tests),)) for one in (needy, fix)]
    late, needs, lacks = standalone.problems([found[-1], *wrong], tree, do_import=False)
    assert late == f"{fix.path.name}: a fix that applies alone comes after patches that do not"
    assert needs.startswith(f"{needy.path.name} does not apply alone: ")
    assert lacks == f"{fix.path.name}: Standalone-Test {tests} is none of its files under tests/"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["99"], r"expected the number of a fix that applies alone \(1, 2, 3, 4, 5, 6, 7, 8\), got 99"),
        (["9"], r"0009-.*\.patch needs the patches before it; these apply alone: 1, 2, 3, 4, 5, 6, 7, 8"),
        (["1"], "expected --checkout DIR, a checkout of DeepSpeed"),
        (["1", "--checkout", ".", "-k", "parity"], "--only takes no other arguments, got -k parity"),
    ],
)
def test_what_cannot_be_run_alone_is_refused(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "scripts.fork.series", "test", "--only", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and re.fullmatch(message + ".*", done.stderr.strip()), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("without", "alone", "shown"),
    [
        (["failed", "passed"], ["passed", "passed"], True),
        (["passed", "passed"], ["passed", "passed"], False),  # tests that cannot fail
        (["failed", "passed"], ["failed", "passed"], False),
        (["error", "failed"], ["passed", "passed"], False),  # not run at all
        (["failed", "failed"], ["skipped", "passed"], False),
    ],
)
def test_a_fix_is_shown_by_tests_that_fail_without_it(without: list[str], alone: list[str], shown: bool) -> None:
    assert standalone.shows(set(without), set(alone)) is shown


def test_drift_is_none_on_base(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither where sources are compared nor where our modules are imported beside it."""
    version = deepspeed_source.requirement().version
    status = series.drift(argparse.Namespace(of=[version], json=False, markdown=False, no_import=False, output=None))
    out, err = capsys.readouterr()
    assert status == 0, out + err
    found = re.fullmatch(rf"DeepSpeed {version}: 0 differences break something; (\d+) symbols are used\n", out)
    assert found and int(found[1]) > 600, out + err


def test_a_mail_is_read(tmp_path: Path) -> None:
    one = mail(tmp_path)
    assert one.subject == "zero: a subject that is so long that it is folded"
    assert one.body.startswith("Because of") and "Signed-off" not in one.body
    assert one.values("Remove-When") == ["pigs fly"] and one.generated == ["deepspeed_ext/leaf/units.py"]
    assert one.problems() == []
    assert patch_mails.targets(one) == {"deepspeed/runtime/paro/leaf/units.py": "deepspeed_ext/leaf/units.py"}


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("Signed-off-by: somebody <somebody@example.com>\n", "", "no trailer Signed-off-by"),
        ("Remove-When: pigs fly\n", "", "no trailer Remove-When"),
        ("pending", "submitted", "Upstream-Status 'submitted' without an address"),
        (
            "Remove-When",
            "Standalone-Test: tests/unit/test_a.py\nRemove-When",
            "it has Generated-From and Standalone-Test",
        ),
        ("pending", "soon", "Upstream-Status 'soon', expected one of pending, submitted"),
        ("Because of a reason that takes more than fifteen words", "So", "does not say why"),
        ("zero: a", "zero: a subject with many words, and a", "characters, at most 72 fit"),
    ],
)
def test_what_a_mail_lacks_is_said(tmp_path: Path, old: str, new: str, problem: str) -> None:
    text = MAIL.format(trailers=TRAILERS).replace(old, new)
    if problem.endswith("why"):
        text = text.replace(" to be told, or nobody would believe that it is one", "")
    (found,) = mail(tmp_path, text).problems()
    assert problem in found


def test_what_is_no_mail_is_refused(tmp_path: Path) -> None:
    with pytest.raises(deepspeed_source.Failed, match="is not a mail of git format-patch"):
        mail(tmp_path, "diff --git a/x b/x\n")
    with pytest.raises(deepspeed_source.Failed, match=r"deepspeed_ext/nothing\*.py matches no file"):
        _ = mail(tmp_path, trailers="Generated-From: deepspeed_ext/nothing*.py\n").generated


def test_every_file_of_ours_is_in_one_patch(tmp_path: Path) -> None:
    found = patch_mails.series()
    assert patch_mails.unplaced(found) == []
    assert set(translated_sources.sources()) == {name for one in found for name in one.generated}
    assert any("units.py is in 2 patches" in line for line in patch_mails.unplaced([*found, mail(tmp_path)]))
    assert any("is in 0 patches" in line for line in patch_mails.unplaced(found[:-1]))


def test_series_and_folder_must_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "series").write_text("# a comment\n0001-a.patch\n0002-b.patch\n")
    mail(tmp_path)
    monkeypatch.setattr(patch_mails, "SERIES", tmp_path / "series")
    monkeypatch.setattr(patch_mails, "PATCHES", tmp_path)
    with pytest.raises(deepspeed_source.Failed, match=r"lists \['0001-a.patch', '0002-b.patch'\], its folder has"):
        patch_mails.series()


def test_what_is_stale_is_named(tmp_path: Path) -> None:
    one = mail(tmp_path)
    place = tmp_path / "deepspeed/runtime/paro/leaf/units.py"
    place.parent.mkdir(parents=True)
    assert "units.py is not what deepspeed_ext/leaf/units.py gives" in patched_tree.stale(tmp_path, one)[0]
    place.write_text(translated_sources.translated("deepspeed_ext/leaf/units.py"))
    assert patched_tree.stale(tmp_path, one) == patched_tree.stale(tmp_path, one, formatted=False) == []
    text = place.read_text()
    place.write_text(text + "\n")
    assert patched_tree.stale(tmp_path, one) and not patched_tree.stale(tmp_path, one, formatted=False)
    for old, new in (("import", "from"), ("#", "# More:")):
        place.write_text(text.replace(old, new, 1))
        assert patched_tree.stale(tmp_path, one, formatted=False), old
    assert not translated_sources.says_the_same("if a:\n    b()\nc()\n", "if a:\n    b()\n    c()\n")


def test_seams_and_twins_are_the_same(tmp_path: Path) -> None:
    symbols = [("keys.parse_our_keys", "get_zero_config"), ("strategies.make_our_optimizer", "_do_something_else")]
    problems = patched_tree.twin_problems([patched_tree.PatchRow("0001-a.patch", mail(tmp_path), [], 1, symbols)])
    assert "strategies.make_our_optimizer replaces _do_something_else in a seam, and not at run time" in problems
    assert "strategies.make_our_optimizer replaces _configure_zero_optimizer at run time, and in no seam" in problems
    assert not any("parse_our_keys" in problem for problem in problems)


def test_what_is_imported_must_be_there(tmp_path: Path) -> None:
    """Also what is imported late, for that is not seen when a tree is imported."""
    one = mail(tmp_path, trailers="Generated-From: deepspeed_ext/integration/seams/keys.py\n")
    place = tmp_path / "deepspeed/runtime/paro/integration/seams/keys.py"
    place.parent.mkdir(parents=True)
    place.write_text(translated_sources.translated("deepspeed_ext/integration/seams/keys.py"))
    found = patched_tree.missing(tmp_path, one)
    modules = [line.partition("imports ")[2].removesuffix(", which is not there") for line in found]
    assert "deepspeed.runtime.paro.config.section" in modules
    for module in modules:
        path = tmp_path / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert patched_tree.missing(tmp_path, one) == []


def test_what_is_imported_late_from_a_package_must_be_there(tmp_path: Path) -> None:
    one = mail(tmp_path, trailers="Generated-From: deepspeed_ext/leaf/units.py\n")
    place = tmp_path / "deepspeed/runtime/paro/leaf/units.py"
    place.parent.mkdir(parents=True)
    place.write_text("def late():\n    from deepspeed.runtime.paro.leaf import modified\n")
    assert "imports deepspeed.runtime.paro.leaf.modified, which is not there" in patched_tree.missing(tmp_path, one)[0]
    place.with_name("modified.py").touch()
    assert patched_tree.missing(tmp_path, one) == []


def test_a_tree_that_is_not_finished_is_not_taken(tmp_path: Path) -> None:
    """Or the seams of commits that are not there would be lost: they are nowhere else."""
    tree = tmp_path / "tree"
    tree.mkdir()
    deepspeed_source.git(tree, "init", "--quiet")
    deepspeed_source.git(tree, "commit", "--quiet", "--allow-empty", "-m", "base")
    deepspeed_source.git(tree, "tag", "base")
    with pytest.raises(deepspeed_source.Failed, match="has no commits after base"):
        series._finished(tree)
    deepspeed_source.git(tree, "commit", "--quiet", "--allow-empty", "-m", "a seam")
    assert series._finished(tree) == tree
    (tree / ".git" / "rebase-merge").mkdir()
    with pytest.raises(deepspeed_source.Failed, match="in the middle of a rebase"):
        series._finished(tree)
    (tree / ".git" / "rebase-merge").rmdir()
    (tree / "file").touch()
    with pytest.raises(deepspeed_source.Failed, match="changes that are not committed"):
        series._finished(tree)


def test_modules_are_translated() -> None:
    text = translated_sources.translated("deepspeed_ext/op_builder.py")
    assert text.startswith(
        "# Copyright (c) deepspeed_ext contributors\n# SPDX-License-Identifier: Apache-2.0\n\n# DeepSpeed Team\n"
    )
    assert "from .builder import CUDAOpBuilder" in text and '"deepspeed.runtime.paro.loco._kernels"' in text
    assert translated_sources.target("deepspeed_ext/op_builder.py") == "op_builder/loco.py"
    for source in translated_sources.sources():
        text = translated_sources.translated(source, formatted=False)
        assert "deepspeed_ext" not in text.replace("deepspeed_ext contributors", ""), source
        if not source.endswith((".css", ".html")):
            assert "DeepSpeed Team" in text.splitlines()[3], source
        if source.endswith(".py"):
            compile(text, source, "exec")
    assert "deepspeed.ops.op_builder.loco import LocoBuilder" in translated_sources.translated(
        "deepspeed_ext/loco/ops.py"
    )


@pytest.mark.parametrize("text", ["deepspeed==0.19.8\n", "deepspeed>=0.19.8 --hash=sha256:" + "0" * 64, ""])
def test_base_names_a_version_and_its_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    monkeypatch.setattr(deepspeed_source, "BASE", tmp_path / "BASE")
    deepspeed_source.BASE.write_text(text)
    with pytest.raises(deepspeed_source.Failed, match=r"must have a line 'deepspeed==VERSION --hash=sha256"):
        deepspeed_source.requirement()


def test_another_archive_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed_source, "WORK", tmp_path)
    (tmp_path / f"deepspeed-{deepspeed_source.requirement().version}.tar.gz").write_bytes(b"something else")
    with pytest.raises(deepspeed_source.Failed, match=r"has SHA-256 [0-9a-f]{64}, BASE says [0-9a-f]{64}: remove it"):
        deepspeed_source.fetch(deepspeed_source.requirement().version)
