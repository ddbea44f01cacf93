# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What of DeepSpeed that we use is otherwise in another DeepSpeed, and what of ours breaks by it.

Both are compared as source, so nothing that fails there ends the report. Beside that, our modules are imported with
it, in a process of their own: each one that fails is a difference, too.
"""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path

from deepspeed_ext.integration.symbols import Patch
from deepspeed_ext.overrides import fits
from scripts.fork import deepspeed_source
from scripts.fork.deepspeed_source import Failed, git, requirement
from scripts.fork.drift_report import Difference, Report
from scripts.fork.source_tree import Default, Found, Function, SourceTree, kind, literal, signature
from scripts.fork.usage import OVERRIDE, ROW, Use, described, uses

_SECONDS = 600  # for importing all of ours
# Runs beside another DeepSpeed: imports each module, and prints why some cannot be.
_TRIAL = """
import importlib, json, sys, traceback
failed = {}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
        for folder in sys.argv[1].split(","):
            said = said.replace(folder + "/", "")
        failed[name] = said.replace("\\n", " ")
print(json.dumps(failed))
"""


# Where a DeepSpeed comes from #####################################################################


def opened(what: str, scratch: Path) -> tuple[str, Path]:
    """Return a description and the folder of a DeepSpeed.

    Args:
        what: a version on pip's index, a folder with its source, or a git directory, of which HEAD is taken.
        scratch: an empty folder.

    Raises:
        Failed: there is none.
    """
    path = Path(what).expanduser()
    if not path.exists():
        if not re.fullmatch(r"\d+(\.\w+)+", what):
            raise Failed(f"expected a version of DeepSpeed, a folder with its source or a git directory, got {what}")
        return f"DeepSpeed {what}", deepspeed_source.extract(what, scratch / "tree")
    if (path / "deepspeed" / "__init__.py").is_file():
        return f"DeepSpeed {_version(path)}{_commit(path) if (path / '.git').exists() else ''}", path.resolve()
    if not (path / "objects").is_dir() and not (path / ".git").exists():
        raise Failed(f"{path} has no deepspeed/__init__.py, and is no git directory")
    tree, archive = scratch / "tree", scratch / "tree.tar"
    tree.mkdir(parents=True)
    names = git(path, "ls-tree", "--name-only", "HEAD").split()
    wanted = [name for name in ("deepspeed", "accelerator", "op_builder", "version.txt") if name in names]
    if "deepspeed" not in wanted:
        raise Failed(f"HEAD of {path} has no folder deepspeed")
    git(path, "archive", "--output", str(archive.resolve()), "HEAD", "--", *wanted)
    with tarfile.open(archive) as content:
        deepspeed_source.extract_all(content, str(tree))
    return f"DeepSpeed {_version(tree)}{_commit(path)}", tree


def _version(tree: Path) -> str:
    file = tree / "version.txt"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else "of unknown version"


def _commit(repository: Path) -> str:
    return ", commit " + git(repository, "log", "-1", "--format=%h of %cs").strip()


def known_tree(scratch: Path) -> SourceTree:
    """Return the DeepSpeed that we know: the one installed, if it is of that version; otherwise fetched."""
    version = requirement().version
    spec = util.find_spec("deepspeed")
    try:
        known = spec is not None and spec.origin is not None and metadata.version("deepspeed") == version
    except metadata.PackageNotFoundError:
        known = False
    if known and spec is not None and spec.origin is not None:
        return SourceTree(Path(spec.origin).parents[1], "deepspeed")
    return SourceTree(deepspeed_source.extract(version, scratch / "base"), "deepspeed")


# Comparing ########################################################################################


def compare(
    ours: SourceTree, base: SourceTree, other: SourceTree, rows: Iterable[Patch]
) -> tuple[int, list[Difference]]:
    """Return how many symbols we use, and what is otherwise in ``other``: what breaks something first."""
    used = uses(ours, base, rows)
    found = [difference for use in used for difference in _differences(use, base, other)]
    return len(used), sorted(found, key=lambda one: (not one.matters, one.symbol))


def _differences(use: Use, base: SourceTree, other: SourceTree) -> Iterator[Difference]:
    symbol = use.target.replace(":", ".").rstrip(".")
    made = Difference(symbol, "", "", "", use.places, use.why)
    there, known = other.look_up(use.target), base.look_up(use.target)
    if use.is_new:
        if there is not None and known is None:
            yield replace(made, what="new", expected="nothing of that name", found=described(there.node))
    elif there is None:
        yield replace(made, what="missing", expected=_shown(known), found=_absence(use.target, other))
    elif use.how == ROW:
        shown = _shown(there)
        if shown != use.expected:
            yield replace(made, what="arguments", expected=str(use.expected), found=shown)
    elif use.how == OVERRIDE:
        yield from _of_override(use, made, known, there)
    elif known is not None:
        yield from _of_name(use, made, known, there, base, other)


def _absence(target: str, other: SourceTree) -> str:
    """Return why a symbol is not there."""
    module, _, name = target.partition(":")
    if module in other.broken:
        return f"{module} cannot be read: {other.broken[module]}"
    if other.path(module) is None:
        return f"no module {module}"
    cls, _, member = name.partition(".")
    return f"no class {cls}" if member and cls != "*" and other.look_up(f"{module}:{cls}") is None else "gone"


def _of_override(use: Use, made: Difference, known: Found | None, there: Found) -> Iterator[Difference]:
    assert isinstance(use.expected, inspect.Signature)
    was = known.node if known is not None else None
    if was is not None and there.node is not None and kind(was) != kind(there.node):
        yield replace(made, what="kind", expected=kind(was), found=kind(there.node))
    elif isinstance(there.node, Function) and not fits(use.expected, signature(there.node)):
        yield replace(
            made, what="arguments", expected=f"{_shown(known)}, ours takes {use.expected}", found=_shown(there)
        )


def _of_name(
    use: Use, made: Difference, known: Found, there: Found, base: SourceTree, other: SourceTree
) -> Iterator[Difference]:
    """Compare what has no row: by what it is, the value of a constant, the arguments of what we call."""
    if described(known.node) != described(there.node):
        yield replace(made, what="kind", expected=described(known.node), found=described(there.node))
        return
    if use.called:
        was, now = _callable(known, base), _callable(there, other)
        if was is not None and now is not None and str(signature(was)) != str(signature(now)):
            taken = takes(signature(now), signature(was))
            shown = str(signature(was)), str(signature(now))
            yield replace(made, what="arguments", expected=shown[0], found=shown[1], matters=not taken)
    if isinstance(known.node, ast.Assign) and isinstance(there.node, ast.Assign):
        values = literal(known.node.value), literal(there.node.value)
        if not any(isinstance(value, Default) for value in values) and values[0] != values[1]:
            yield replace(made, what="value", expected=repr(values[0]), found=repr(values[1]))


def takes(now: inspect.Signature, was: inspect.Signature) -> bool:
    """Return whether a function takes what another takes, by position and by name, and means the same by it."""
    given = [one for one in was.parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    names = {one.name: one for one in was.parameters.values() if one.kind == one.KEYWORD_ONLY}
    least = [one.name for one in given if one.default is one.empty]
    needed = {name: name for name, one in names.items() if one.default is one.empty}
    try:
        by_position = now.bind(*(one.name for one in given), **{name: name for name in names}).arguments
        now.bind(*least, **needed)
        now.bind(**{one.name: one.name for one in given if one.kind != one.POSITIONAL_ONLY}, **needed)
    except TypeError:
        return False
    same = all(name == value for name, value in by_position.items() if isinstance(value, str))
    left = {one.kind for one in was.parameters.values()} - {one.kind for one in now.parameters.values()}
    known = [(one, now.parameters[one.name]) for one in (*given, *names.values()) if one.name in now.parameters]
    defaults = all(repr(one.default) == repr(other.default) for one, other in known)
    return same and defaults and not left & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _callable(found: Found, tree: SourceTree) -> Function | None:
    """Return the function that a call runs: of a class, its constructor."""
    if isinstance(found.node, ast.ClassDef):
        member = (tree.members(found.module, found.node.name) or {}).get("__init__")
        found = Found(member.module, member.node) if member is not None else Found(found.module, None)
    return found.node if isinstance(found.node, Function) else None


def _shown(found: Found | None) -> str:
    if found is None or not isinstance(found.node, Function):
        return described(found.node) if found is not None else "a method"
    return str(signature(found.node))


# Importing ########################################################################################


def import_failures(library: Path, ours: SourceTree) -> tuple[list[Difference], list[str]]:
    """Import all modules of ours beside the DeepSpeed of a folder, in a process of their own.

    Returns:
        Errors, each with the modules that fail by it; and notes, if nothing could be tried.
    """
    names = [name for name in ours.modules() if not name.endswith("__main__")]
    there = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(library), str(ours.root)]),
        "DS_ACCELERATOR": "cpu",
        "DEEPSPEED_EXT_DISABLE": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", _TRIAL, f"{library},{ours.root}", *names]
    try:
        done = subprocess.run(command, env=there, cwd=library, capture_output=True, text=True, timeout=_SECONDS)
        failed = json.loads((done.stdout.splitlines() or [""])[-1])
    except subprocess.TimeoutExpired:
        return [], [f"our modules were not imported within {_SECONDS} s"]
    except json.JSONDecodeError:
        last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        return [], [f"our modules could not be imported, status {done.returncode}: {last}"]
    by_error: dict[str, list[str]] = {}
    for name, error in failed.items():
        by_error.setdefault(error, []).append(name)
    return [Difference(error, "import", "", "", tuple(by), "cannot be imported") for error, by in by_error.items()], []


# All of it ########################################################################################


def report(
    what: str, base: SourceTree, ours: SourceTree, rows: Iterable[Patch], scratch: Path, do_import: bool
) -> Report:
    """Compare one DeepSpeed with BASE.

    Raises:
        Failed: it could not be had.
    """
    label, root = opened(what, scratch)
    used, found = compare(ours, base, SourceTree(root, "deepspeed"), rows)
    failed: list[Difference] = []
    notes: list[str] = []
    if do_import:
        library = scratch / "lib"  # with nothing but the package: what is beside it would hide ours
        library.mkdir()
        (library / "deepspeed").symlink_to(root / "deepspeed")
        failed, notes = import_failures(library, ours)
    return Report(label, used, (*failed, *found), tuple(notes))
