# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A git repository of DeepSpeed with a commit for each patch of the series, and its checks."""

import importlib
import multiprocessing
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from scripts import ROOT
from scripts.fork.deepspeed_source import Failed, git, importable, requirement, unpack
from scripts.fork.patch_mails import ALONE, Mail, series

_DATE = "2026-11-28T12:00:00Z"  # of the generated patch: the same input gives the same bytes
_MESSAGE = """deepspeed_ext: add the package, version {version}

The package deepspeed_ext as it is in its own repository, for the hooks of the
patches that follow: group-aware strategies of ZeRO, LoCo, and their tools. setup.py
installs it together with DeepSpeed. Its kernels are compiled at first use.

Upstream-Status: not-applicable
Remove-When: the package is installed separately, by pip
Signed-off-by: deepspeed_ext contributors <deepspeed_ext@users.noreply.github.com>
"""


def apply(tree: Path, mail: Mail) -> None:
    """Commit a patch. git allows no fuzz: the context of each change must match.

    Raises:
        Failed: it does not apply; the tree is as before.
    """
    try:
        git(tree, "am", "--quiet", "--keep-cr", "--committer-date-is-author-date", str(mail.path))
    except Failed as failed:
        git(tree, "am", "--abort")
        raise Failed(f"{mail.path.name} does not apply: {failed}") from failed


def package() -> dict[str, Path]:
    """Return the files that pip installs of this package, by their paths in an environment."""
    listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "deepspeed_ext", "csrc/loco")
    names = [name for name in listed.split() if not name.endswith((".md", ".svg")) and (ROOT / name).is_file()]
    return {f"deepspeed_ext/{name}" if name.startswith("csrc/") else name: ROOT / name for name in names}


def add_package(tree: Path) -> None:
    """Commit this package, unchanged, next to DeepSpeed's."""
    from deepspeed_ext.version import __version__

    for name, source in package().items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, tree / name)
    git(tree, "add", *package())
    git(tree, "commit", "--quiet", "--message", _MESSAGE.format(version=__version__), date=_DATE)


def apply_series(
    folder: Path, with_package: bool, check: Callable[[Path, str], object] = lambda tree, name: None
) -> Path:
    """Make a tree with all patches.

    Args:
        folder: is emptied before.
        with_package: whether the package is committed between the fixes and the hooks.
        check: is called with the tree and the name of the patch after each commit.
    """
    tree = unpack(requirement().version, folder)
    for mail in series():
        if with_package and not mail.tests and not (tree / "deepspeed_ext").exists():
            add_package(tree)
            check(tree, "the patch with the package")
        apply(tree, mail)
        check(tree, mail.path.name)
    return tree


def export(tree: Path, folder: Path) -> list[str]:
    """Write the commits of a tree as mails; return their names."""
    form = ["--zero-commit", "--no-signature", "--no-numbered", "--no-renames", "--full-index"]
    lines = git(tree, "format-patch", *form, "--output-directory", str(folder.resolve()), "base..HEAD").splitlines()
    return [Path(line).name for line in lines]


# Checks ###########################################################################################


def problems(scratch: Path, do_import: bool) -> list[str]:
    """Return the problems of the series.

    Args:
        scratch: an empty folder.
        do_import: whether the tree after each patch is imported, which takes a few seconds for each.
    """
    results = [problem for mail in series() for problem in mail.problems()]

    def check(tree: Path, name: str) -> None:
        results.extend(import_problems(tree, name) if do_import else [])

    tree = scratch / "tree"
    try:
        results += hook_problems(apply_series(tree, False, check))
    except Failed as failed:
        results.append(str(failed))
    for mail in (mail for mail in series() if mail.tests):
        git(tree, "checkout", "--quiet", "--force", "--detach", "base")
        try:
            apply(tree, mail)
        except Failed as failed:
            results.append(f"alone, {failed}")
            continue
        results += [f"{mail.path.name} lacks its {ALONE} {name}" for name in mail.tests if not (tree / name).is_file()]
        check(tree, f"{mail.path.name} alone")
    return results


def import_problems(tree: Path, name: str) -> list[str]:
    """Return why a tree cannot be imported: DeepSpeed, and all modules that differ from BASE."""
    files = git(tree, "diff", "--name-only", "base..HEAD", "--", "deepspeed/*.py").split()
    modules = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files]
    return [f"{name}: the tree cannot be imported: {error}" for error in _in_tree(tree, _import_all, modules)]


def hook_problems(tree: Path) -> list[str]:
    """Return differences between a tree's hooks and the run-time patches, and other unexpected symbols."""
    return _in_tree(tree, _compare)


def _import_all(modules: list[str]) -> list[str]:
    for module in modules:
        importlib.import_module(module)
    return []


def _compare() -> list[str]:
    from deepspeed_ext.__main__ import patch_problems
    from deepspeed_ext.integration import fork

    return patch_problems() if fork.version() is not None else [f"the tree has no deepspeed/{fork.MODULE}.py"]


def _in_tree(tree: Path, function: Callable[..., list[str]], *arguments: object) -> list[str]:
    """Return the problems that a function finds in a process that imports DeepSpeed from a tree.

    The process is forked from this one, which imports torch: that takes most of the time.
    """
    import torch  # noqa: F401

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(_call, str(importable(tree)), function, *arguments).result()
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]


def _call(library: str, function: Callable[..., list[str]], *arguments: object) -> list[str]:
    sys.dont_write_bytecode = True
    sys.path.insert(0, library)
    source = str(importlib.import_module("deepspeed").__file__)
    assert source.startswith(library), f"deepspeed comes from {source}"
    return function(*arguments)
