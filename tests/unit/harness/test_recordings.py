# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a recording contains, what git reports as changed, and which tests `scripts/test changed` derives from both."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import ROOT
from tests.harness.installed import since
from tests.harness.recordings import changed, store
from tests.harness.recordings.differences import Hunk, git, hunks, lines_before, tree_of_files
from tests.harness.recordings.selection import Recorded, Recording

EMPTY = Recording(tests={}, lines_of=lambda file: {}, source_of=lambda file: None)


def pytest_of(*arguments: str, folder: Path = ROOT) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=-q", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@since(coverage="7.17")  # the first that reads without writing
def test_a_recording_names_what_only_ranks_run(tmp_path: Path) -> None:
    file = "tests/unit/harness/test_ranks.py"
    test = f"{file}::test_results_come_in_rank_order"
    folder = tmp_path / "recording"
    pytest_of("-p", "tests.harness.recordings.recording", f"--recording={folder}", test)
    loaded = store.load(folder)
    assert loaded is not None
    origin, recording = loaded
    assert origin.commit == git("rev-parse", "HEAD").strip()
    source = (ROOT / file).read_text(encoding="utf-8").splitlines()
    in_ranks = source.index("    rank = torch.distributed.get_rank()") + 1
    assert recording.lines_of(file)[in_ranks] == {test}
    known = recording.tests[test]
    assert known.seconds > 0 and known.lines > 0 and "ranks" in known.fixtures
    assert recording.opened[file] == {f"{file}#collection"}


@pytest.mark.quick
def test_lines_of_another_version() -> None:
    inserted, replaced, removed = Hunk(4, 0, 4, 2), Hunk(10, 1, 12, 3), Hunk(20, 2, 24, 0)
    found = [lines_before([line], [inserted, replaced, removed]) for line in (3, 4, 5, 6, 11, 12, 14, 15, 23, 24)]
    assert found == [{3}, {3, 4}, {3, 4}, {4}, {9}, {10}, {10}, {11}, {19}, {22}]
    assert removed.lines() == {20, 21} and Hunk(1, 0, 1, 5).lines() == {1}


@pytest.mark.quick
def test_git_sees_what_is_not_committed(tmp_path: Path) -> None:
    git("init", "-q", root=tmp_path)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "kept").write_text("".join(f"{line}\n" for line in range(1, 31)))
    git("add", ".", root=tmp_path)
    git("-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "first", root=tmp_path)
    text = [str(line) for line in range(1, 31) if line not in (20, 21)]
    text[9:10] = ["a", "b", "c"]
    text[3:3] = ["d", "e"]
    (tmp_path / "kept").write_text("\n".join(text) + "\n")
    for name in ("new", "ignored"):
        (tmp_path / name).write_text("x\n")
    now = tree_of_files(tmp_path / ".git" / "scratch", root=tmp_path)
    assert git("diff", "--name-only", "HEAD", now, root=tmp_path).split() == ["kept", "new"]
    expected = [Hunk(4, 0, 4, 2), Hunk(10, 1, 12, 3), Hunk(20, 2, 24, 0)]
    assert hunks("HEAD", now, "kept", root=tmp_path) == expected
    assert git("status", "--short", root=tmp_path).split() == ["M", "kept", "??", "new"]  # its own index is as it was


@pytest.mark.quick
@pytest.mark.parametrize(
    "file, is_so",
    [
        ("tests/harness/ranks.py", True),
        ("tests/unit/loco/conftest.py", True),
        ("scripts/test", True),
        ("setup.py", True),
        ("scripts/quickstart", False),
        ("deepspeed_ext/strategy.py", False),
    ],
)
def test_some_files_concern_all_tests(file: str, is_so: bool) -> None:
    assert changed.concerns_all(file) == is_so


@pytest.mark.quick
def test_kernels_concern_loco_and_who_builds_them() -> None:
    loco, builds, other = (
        "tests/unit/loco/test_a.py::test",
        "tests/unit/zero/test_b.py::test",
        "tests/unit/test_c.py::test",
    )
    tests = {loco: Recorded(1.0, 1), builds: Recorded(1.0, 1, {"kernels"}), other: Recorded(1.0, 1)}
    choice = changed.choose(replace(EMPTY, tests=tests), {"csrc/loco/cpu_kernels.cpp": {3}})
    assert set(choice.run) == {loco, builds}
    assert choice.why[-1] == "2 tests touch these lines (0.0 minutes), and all of them run"


@pytest.mark.quick
def test_it_says_what_does_not_fit() -> None:
    names = [f"tests/unit/test_a.py::test[{number}]" for number in range(10)]
    recording = replace(EMPTY, tests={name: Recorded(60.0, 1) for name in names}, opened={"README.md": set(names)})
    choice = changed.choose(recording, {"README.md": set()})
    assert len(choice.run) == 2
    expected = "10 tests touch these lines (10.0 minutes); the 2 that fit into 150 s run; scripts/test runs all"
    assert choice.why == ["  README.md: 10 tests", expected]


@pytest.mark.quick
def test_chosen_tests_run_and_new_ones_and_none_that_is_gone(tmp_path: Path) -> None:
    for name in ("old", "edited"):
        (tmp_path / f"test_{name}.py").write_text("def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n")
    content = {
        "run": ["test_old.py::test_a", "test_old.py::test_gone", "test_edited.py::test_a"],
        "changed": {"test_edited.py": ["test_edited.py::test_a", "test_edited.py::test_b"]},
    }
    (tmp_path / "chosen.json").write_text(json.dumps(content))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    arguments = ("-p", "tests.harness.recordings.chosen", "--chosen=chosen.json", "test_old.py", "test_edited.py")
    output = pytest_of("-rA", *arguments, folder=tmp_path)
    ran = [line.split()[1] for line in output.splitlines() if line.startswith("PASSED")]
    assert ran == ["test_old.py::test_a", "test_edited.py::test_a", "test_edited.py::test_c"]
