# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The fork does what the package does with stock DeepSpeed, to the bit; and hooks that do not fit are rejected."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.version import __version__ as OURS
from scripts import ROOT
from scripts.fork import patched_tree, series
from scripts.fork.deepspeed_source import WORK, importable

EXTENSIONS = {"TORCH_EXTENSIONS_DIR": str(WORK / "torch_extensions")}  # of the sources in the fork's wheel

pytestmark = pytest.mark.timeout(1500)  # the first test builds the fork, and its ranks compile operators


def run(python: Path, folder: Path, *arguments: str, **variables: str) -> str:
    """Run a program of an environment, and return its output."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    kept["PATH"] = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    command = [str(python), "-W", "ignore", *arguments]
    done = subprocess.run(command, cwd=folder, env=kept | variables, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests, and without the package: that comes from the environment."""
    made = tmp_path_factory.mktemp("outside")
    for name in ("tests", "scripts"):
        (made / name).symlink_to(ROOT / name)
    return made


@pytest.fixture(scope="module")
def fork(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the fork's wheel."""
    return series.environment(tmp_path_factory.mktemp("fork"))


@pytest.fixture(scope="module")
def both(fork: Path, folder: Path) -> list[dict[str, Any]]:
    """Digests of the package, which saves a checkpoint, and of the fork, which resumes from it."""
    digests = "-m", "tests.harness.digests"
    ours = run(Path(sys.executable), folder, *digests, "save", "saved")
    theirs = run(fork, folder, *digests, "resume", "saved", **EXTENSIONS)
    return [json.loads(out.splitlines()[-1]) for out in (ours, theirs)]


def test_weights_are_equal_to_the_bit(both: list[dict[str, Any]]) -> None:
    """Also those after a checkpoint of the package, with LoCo's error feedback."""
    ours, theirs = both
    assert ours == theirs and len(set(ours["ends"])) == 1
    assert all(len(set(features.values())) > 10 for features in ours["features"])  # digests of different things


def test_the_wheel_has_the_package_unchanged(fork: Path) -> None:
    (wheel,) = (fork.parents[2] / "dist").glob("*.whl")
    expected = patched_tree.package()
    with zipfile.ZipFile(wheel) as content:
        assert {name for name in content.namelist() if name.startswith("deepspeed_ext/")} == set(expected)
        assert all(content.read(name) == path.read_bytes() for name, path in expected.items())
        (entries,) = (name for name in content.namelist() if name.endswith("entry_points.txt"))
        assert "deepspeed_ext.integration.activation:autoload" in content.read(entries).decode()
    assert "deepspeed_ext/csrc/loco/loco_cpu.cpp" in expected


def test_the_command_reports_the_fork_and_no_patched_symbol(fork: Path, folder: Path) -> None:
    out = run(fork, folder, "-m", "deepspeed_ext")
    assert f"deepspeed     {metadata.version('deepspeed')}+ext.{OURS}\n" in out
    assert "this DeepSpeed is a fork with hooks (version 1): none of its symbols is patched at run time" in out
    assert out.count("  hooked ") > 20 and "  applied      deepspeed." not in out and "all as expected" in out


@pytest.mark.deep
def test_zero_to_fp32_and_the_trainer(both: Any, fork: Path, folder: Path) -> None:
    """The trainer has no stage in its configuration: Accelerate is patched at run time in a fork, too."""
    convert = "-m", "deepspeed.utils.zero_to_fp32", "saved"
    run(Path(sys.executable), folder, *convert, "package")
    run(fork, folder, *convert, "fork")
    package, converted = ((folder / name / "pytorch_model.bin").read_bytes() for name in ("package", "fork"))
    assert package == converted
    launch = str(fork.parent / "deepspeed"), "--num_accelerators", "2"
    out = run(fork, folder, *launch, str(ROOT / "scripts" / "examples" / "trainer.py"), DS_ACCELERATOR="cpu")
    assert "'train_loss'" in out


# Forks a process for each piece of code, in which DeepSpeed comes from a tree.
IN_FORKS = """
import os, sys, torch
for name, (library, code) in {pieces!r}.items():
    print(">", name, flush=True)
    if not os.fork():
        sys.path.insert(0, library)
        try:
            exec(code, {{}})
        except BaseException as error:
            print("raised", type(error).__name__, error)
        os._exit(sys.stdout.flush() or 0)
    os.wait()
"""
PLAIN_AND_OURS = """
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
for zero in ({"stage": 2}, {"paro_strategy": "NIG", "paro_group_size": 1}):
    print(int(DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero}).zero_config.stage))
"""
# One patch less and one more than there are hooks.
OTHER_PATCHES = """
from dataclasses import replace
from deepspeed_ext.integration import patches, seams
target, signature = "deepspeed.runtime.utils:see_memory_usage", "(message, force=False)"
more = replace(patches.REPLACED[0], target=target, signature=signature, replace=seams.lazily("deepspeed_ext.x:y"))
patches.PATCHES = patches.REPLACED = (*patches.REPLACED[:-1], more)
from deepspeed_ext.__main__ import patch_problems
print(patch_problems())
"""
ABSENT = """
import sys
sys.modules["deepspeed_ext"] = None
sys.meta_path[:] = [finder for finder in sys.meta_path if "deepspeed_ext" not in type(finder).__module__]
"""
REJECTED = (
    ("removed", "RuntimeError", "DeepSpeedEngine.save_checkpoint is without its hook checkpoints.save_as_a_whole"),
    ("another", "RuntimeError", f"its hooks have version 2, and deepspeed_ext {OURS} needs version 1"),
    (
        "another",
        "RuntimeError",
        f"install the fork that was built for deepspeed_ext {OURS}, or apply the whole series",
    ),
    ("absent", "DeepSpeedConfigError", "has paro_strategy, paro_group_size, which needs the package deepspeed_ext"),
)


def test_hooks_that_do_not_fit_are_rejected_if_our_keys_are_used(tree: Path, tmp_path: Path) -> None:
    """Plain configurations work nevertheless, as they do where the package is not installed."""
    trees = {"fitting": tree}
    for kind, file, old, new in (
        ("removed", "runtime/engine.py", '    @hook("checkpoints.save_as_a_whole")\n', ""),
        ("another", "deepspeed_ext_hooks.py", "VERSION = 1", "VERSION = 2"),
    ):
        trees[kind] = tmp_path / kind / "tree"
        shutil.copytree(tree, trees[kind], symlinks=True, ignore=shutil.ignore_patterns(".git", "tests"))
        text = (trees[kind] / "deepspeed" / file).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (trees[kind] / "deepspeed" / file).write_text(text.replace(old, new), encoding="utf-8")
    library = str(importable(tree))
    pieces = {kind: (str(importable(made)), PLAIN_AND_OURS) for kind, made in trees.items()}
    pieces |= {"patches": (library, OTHER_PATCHES), "absent": (library, ABSENT + PLAIN_AND_OURS)}
    out = run(Path(sys.executable), tmp_path, "-c", IN_FORKS.format(pieces=pieces), PYTHONPATH=str(ROOT))
    found = dict(part.split("\n", 1) for part in out.split("> ")[1:])
    assert found["fitting"] == "2\n2\n"
    for kind, error, message in REJECTED:
        assert found[kind].startswith(f"2\nraised {error}") and message in found[kind], found[kind]
    assert "deepspeed.runtime.utils.see_memory_usage: without its hook x.y" in found["patches"]
    assert "no patch corresponds to the hook pipeline.setup.partition_layers at deepspeed.run" in found["patches"]
