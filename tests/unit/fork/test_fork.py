# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The fork equals the package with stock DeepSpeed bit for bit; hooks of another version are rejected."""

import os
import re
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
from tests.campaigns import bits
from tests.harness.fork_runner import run_in_forks
from tests.harness.tiers import deep

HERE, FORK = sys.executable, "environment/bin/python"

pytestmark = pytest.mark.timeout(1500)  # the first test builds the fork, and its ranks compile operators


def run(python: str, folder: Path, *arguments: str, **variables: str) -> str:
    variables_of_run = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables_of_run |= {"PATH": f"{(folder / python).parent}{os.pathsep}{variables_of_run['PATH']}", **variables}
    command = [str(folder / python), "-W", "ignore", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables_of_run, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fork and its environment, and with the tests, but without this repository's package."""
    fork_folder = tmp_path_factory.mktemp("fork")
    series.environment(fork_folder)
    for name in ("tests", "scripts"):
        (fork_folder / name).symlink_to(ROOT / name)
    return fork_folder


@pytest.fixture(scope="module", params=[("defaults", "pipeline"), *deep((("units", "LoCo"),))], ids=" ".join)
def compared(request: pytest.FixtureRequest, folder: Path, ranks: Any) -> str:
    """The fork's comparison with digests of the package, from whose checkpoints it resumes."""
    names = ("NIG", "IIG", "GGG") if "units" in request.param else ("NIG", "IIG")  # units with neither of the two
    sets = ("--only", *request.param, "--strategies", *names)
    written, saved = str(folder / "digests.json"), str(folder / "saved")
    bits.main(["--write", written, "--save", saved, *sets], ranks)
    theirs = ("-m", "tests.campaigns.bits", "--compare", written, "--load", saved)
    return run(FORK, folder, *theirs, *sets, TORCH_EXTENSIONS_DIR=str(WORK / "torch_extensions"))


def test_weights_are_equal_to_the_bit(compared: str) -> None:
    """Also those after a checkpoint of the package; in the deep tier with LoCo, whose kernels are built."""
    assert re.search(r"^[1-9]\d* cases, all bits equal$", compared, re.MULTILINE), compared


# The report; and again with one patch less and one more than there are hooks.
REPORTS = """
from dataclasses import replace
from deepspeed_ext import __main__ as command
from deepspeed_ext.integration import patches, seams
command.main()
target, signature = "deepspeed.runtime.utils:see_memory_usage", "(message, force=False)"
more = replace(patches.REPLACED[0], target=target, signature=signature, replace=seams.lazily("deepspeed_ext.x:y"))
patches.PATCHES = patches.REPLACED = (*patches.REPLACED[:-1], more)
print("with others:", command.patch_problems())
"""


def test_the_wheel_has_the_package_and_patches_no_symbol(folder: Path) -> None:
    (wheel,), expected = (folder / "dist").glob("*.whl"), patched_tree.package()
    with zipfile.ZipFile(wheel) as content:
        assert {name for name in content.namelist() if name.startswith("deepspeed_ext/")} == set(expected)
        assert all(content.read(name) == path.read_bytes() for name, path in expected.items())
    out, _, others = run(FORK, folder, "-c", REPORTS).partition("with others:")
    assert f"deepspeed     {metadata.version('deepspeed')}+ext.{OURS}\n" in out
    assert "this DeepSpeed is a fork with hooks (version 2): none of its symbols is patched at run time" in out
    assert out.count("  hooked ") > 20 and "  applied      deepspeed." not in out and "all as expected" in out
    assert "deepspeed.runtime.utils.see_memory_usage: without its hook x.y" in others
    assert "no patch corresponds to the hook pipeline.setup.partition_layers at deepspeed.run" in others


@pytest.mark.deep
def test_zero_to_fp32_and_the_trainer(compared: str, folder: Path) -> None:
    """The trainer has no stage in its configuration: Accelerate is patched at run time in a fork, too."""
    saved = str(next((folder / "saved").glob("*/NIG")))
    for name, python in (("package", HERE), ("fork", FORK)):
        run(python, folder, "-m", "deepspeed.utils.zero_to_fp32", saved, name)
    package, fork = ((folder / name / "pytorch_model.bin").read_bytes() for name in ("package", "fork"))
    assert package == fork
    launch = "environment/bin/deepspeed", "--num_accelerators", "2", "scripts/examples/trainer.py"
    assert "'train_loss'" in run(FORK, folder, *launch, DS_ACCELERATOR="cpu")


PLAIN_AND_OURS = """
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
for zero in ({"stage": 2}, {"paro_strategy": "NIG", "paro_group_size": 1}):
    print(int(DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero}).zero_config.stage))
"""
ABSENT = """
sys.modules["deepspeed_ext"] = None
sys.meta_path[:] = [finder for finder in sys.meta_path if "deepspeed_ext" not in type(finder).__module__]
"""

CHANGES = {
    "removed": ("runtime/engine.py", '    @hook("save_as_a_whole")\n', ""),
    "another": ("deepspeed_ext_hooks.py", "VERSION = 2", "VERSION = 3"),
}
ERRORS = {
    "removed": "RuntimeError.*DeepSpeedEngine.save_checkpoint is without its hook save_as_a_whole",
    "another": f"RuntimeError.* version 3, but deepspeed_ext {OURS} needs version 2.* install the fork",
    "absent": "DeepSpeedConfigError .* paro_strategy, paro_group_size, which needs the package deepspeed_ext",
}


@pytest.mark.parametrize("kinds", [("absent", "removed"), *deep((("another",),))], ids=" ".join)
def test_hooks_that_do_not_fit_are_rejected_with_our_keys(tree: Path, tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Plain configurations work nevertheless, as they do where the package is not installed."""
    trees = {"absent": tree} if "absent" in kinds else {}
    for kind, (file, old, new) in ((kind, CHANGES[kind]) for kind in kinds if kind in CHANGES):
        trees[kind] = tmp_path / kind / "tree"
        shutil.copytree(tree, trees[kind], symlinks=True, ignore=shutil.ignore_patterns(".git", "tests"))
        path = trees[kind] / "deepspeed" / file
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    pieces = {}
    for kind, fork_folder in trees.items():
        first = f"import sys\nsys.path.insert(0, {str(importable(fork_folder))!r})\n"
        pieces[kind] = first + (ABSENT if kind == "absent" else "") + PLAIN_AND_OURS
    found = run_in_forks("import torch", pieces)
    for kind in kinds:
        assert re.match(f"2\nraised {ERRORS[kind]}", found[kind]), found[kind]
