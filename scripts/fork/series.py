# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The patch series that gives a DeepSpeed the features of deepspeed_ext: check, apply, refresh, build and test it.

What is the same in both forms is generated from ``deepspeed_ext/`` and ``csrc/``: the trailers ``Generated-From`` of a
patch say which files it brings. What is written by hand, the seams, are lines in DeepSpeed's own files; they live in
the patches. To change a seam: ``apply``, edit and commit there (``git commit --fixup`` and a rebase, or a new commit
with its trailers), then ``refresh --tree`` that tree. After a change to ``deepspeed_ext/``: ``refresh``.

Exit status: 0; 1 if something does not hold; 2 if it could not run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from deepspeed_ext.integration.patches import PATCHES
from scripts import ROOT
from scripts.fork import drift as drifts
from scripts.fork import patch_mails, patched_tree, standalone
from scripts.fork.deepspeed_source import WORK, Failed, git, importable, requirement, run, unpack
from scripts.fork.drift_report import as_json, as_markdown, as_text
from scripts.fork.source_tree import SourceTree

# What ``test`` runs without arguments: parity, and what a user sees. Not what looks at the patching itself.
TESTS = [
    *("zero/test_parity.py", "leaf/test_units.py", "zero/test_states.py"),
    *("zero/test_partitioned_states.py", "zero/test_bytes.py", "leaf/test_modules.py", "zero/test_gathered.py"),
    *("loco/test_training.py", "loco/test_kernels.py", "loco/test_qgz.py", "loco/test_residuals.py"),
    *("pipeline", "checkpoint", "planner", "config"),
]


def check(args: argparse.Namespace) -> int:
    """Check that the series is complete, applies, is up to date, leaves each tree importable, and that each of the
    fixes at its beginning applies alone."""
    found = patch_mails.series()
    problems = [problem for mail in found for problem in mail.problems()] + patch_mails.unplaced(found)
    with tempfile.TemporaryDirectory() as folder:
        tree = unpack(requirement().version, Path(folder) / "tree")
        for mail in found:
            patched_tree.apply(tree, mail)
            problems += patched_tree.stale(tree, mail, not args.quick) + patched_tree.missing(tree, mail)
            if not args.quick:
                problems += patched_tree.import_problems(importable(tree), mail)
        # Once more, or a patch could change by hand what an earlier one has brought.
        problems += [problem for mail in found for problem in patched_tree.stale(tree, mail, not args.quick)]
        rows = patched_tree.table(tree, found)
        problems += standalone.problems(found, tree, not args.quick)
    problems += patched_tree.twin_problems(rows) + patched_tree.readme_problems(rows)
    for row in rows:
        if row.mail.tests:
            print(f"{row.name}: {row.lines} lines, applies alone")
        else:
            numbers = f"{row.lines} lines of seam, {len(row.symbols)} symbols, {len(row.generated)} generated files"
            print(f"{row.name}: {numbers}")
    features = [row for row in rows if not row.mail.tests]
    print(f"in all {sum(row.lines for row in features)} lines for {sum(len(row.symbols) for row in features)} symbols")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


def apply(args: argparse.Namespace) -> int:
    """Make a tree of DeepSpeed with the series, a commit for each patch."""
    if args.to.exists():
        raise Failed(f"{args.to} exists")
    print(patched_tree.applied(args.to))
    return 0


def _finished(tree: Path) -> Path:
    """Return a tree that has all the commits it will have: seams are nowhere else but there, and in the patches.

    Raises:
        Failed: something is not committed, or commits are being moved.
    """
    if git(tree, "status", "--porcelain").strip():
        raise Failed(f"{tree} has changes that are not committed")
    going_on = [name for name in ("rebase-merge", "rebase-apply") if (tree / ".git" / name).exists()]
    if going_on or not git(tree, "rev-list", "base..HEAD").strip():
        raise Failed(f"{tree} " + ("is in the middle of a rebase" if going_on else "has no commits after base"))
    return tree


def refresh(args: argparse.Namespace) -> int:
    """Make the patches again: what is generated as ours is now; seams as they are, or as in a tree's commits."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if args.tree is None:
            edited = patch_mails.series()
        else:
            patched_tree.export(_finished(args.tree), scratch / "mails")
            edited = [patch_mails.read(path) for path in sorted((scratch / "mails").iterdir())]
        tree = unpack(requirement().version, scratch / "tree")
        earlier: list[str] = []  # what is there already: a patch that brought it before does so no more
        for mail in edited:
            patched_tree.apply(tree, mail, earlier)
            patched_tree.regenerate(tree, mail)
            earlier += patch_mails.targets(mail)
        names = patched_tree.export(tree, scratch / "made")
        for name in names:
            shutil.copy(scratch / "made" / name, patch_mails.PATCHES)
        for path in patch_mails.PATCHES.glob("*.patch"):  # not before the others are there
            if path.name not in names:
                path.unlink()
        patch_mails.SERIES.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        patched_tree.write_table(patched_tree.table(tree, patch_mails.series()))
    print(f"{len(names)} patches")
    return 0


def build(args: argparse.Namespace) -> int:
    """Build a wheel of the fork."""
    print(_wheel())
    return 0


def _wheel() -> Path:
    from deepspeed_ext.version import __version__

    tree, wheels = patched_tree.applied(WORK / "tree"), WORK / "dist"
    shutil.rmtree(wheels, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    label = {"DS_BUILD_STRING": f"+ext.{__version__}"}
    alone = {"DEEPSPEED_EXT_DISABLE": "1"}  # a build imports torch, and parts of DeepSpeed
    run([*pip, "--no-build-isolation", "--wheel-dir", str(wheels), str(tree)], env=os.environ | label | alone)
    (wheel,) = wheels.glob("*.whl")
    return wheel


def environment() -> Path:
    """Make a virtual environment with the fork, and all else from the active one; return its Python."""
    folder = WORK / "environment"
    if Path(sys.prefix) == folder:
        raise Failed(f"{folder} is in use by this process")
    wheel = _wheel()
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    places = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    # Behind its own packages, so the fork comes first. The extension is there, too, and stands down.
    here = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    lines = "".join(f"import site; site.addsitedir({place!r})\n" for place in here)
    (Path(places) / "beside.pth").write_text(lines, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-compile", "--no-deps", "--ignore-installed", "--no-index", str(wheel)])
    return python


def variables(python: Path) -> dict[str, str]:
    """Return the environment variables of a process in that environment."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    folder = python.parents[1]
    hidden = ("PYTHONPATH", "DEEPSPEED_EXT_DISABLE")  # which lead to another DeepSpeed, or to none of our features
    apart = {"VIRTUAL_ENV": str(folder), "TORCH_EXTENSIONS_DIR": str(WORK / "torch_extensions"), "PATH": path}
    return {key: value for key, value in os.environ.items() if key not in hidden} | apart


def test(args: argparse.Namespace) -> int:
    """Fetch, apply, build, and run tests against the wheel; or run the tests of one fix with it alone and without."""
    if args.only is not None:
        if args.pytest:
            raise Failed(f"--only takes no other arguments, got {' '.join(args.pytest)}")
        return int(not standalone.test(standalone.chosen(patch_mails.series(), args.only), args.checkout))
    python = environment()
    chosen = args.pytest or [f"tests/unit/{name}" for name in TESTS]
    command = [str(python), "-m", "pytest", *chosen]
    return subprocess.run(command, cwd=ROOT, env=variables(python), check=False).returncode


def drift(args: argparse.Namespace) -> int:
    """Print what of DeepSpeed that we use is otherwise in other versions of it, and what of ours breaks by it."""
    reports, missed = [], False
    with tempfile.TemporaryDirectory() as folder:
        known, ours = drifts.known_tree(Path(folder)), SourceTree(ROOT, "deepspeed_ext")
        for number, what in enumerate(args.of or dict.fromkeys([requirement().version, patched_tree.newest()])):
            scratch = Path(folder) / str(number)
            scratch.mkdir()
            try:
                reports.append(drifts.report(what, known, ours, PATCHES, scratch, not args.no_import))
            except Failed as failed:  # the others are told all the same
                print(failed, file=sys.stderr)
                missed = True
    form = as_json if args.json else as_markdown if args.markdown else as_text
    if args.output is None:
        print(form(reports))
    else:  # pip and others print to the terminal
        args.output.write_text(form(reports) + "\n", encoding="utf-8")
    return 2 if missed else int(any(one.breaking for one in reports))


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/patches", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="command")
    added = {}
    for command in (check, apply, refresh, build, test, drift):
        name = {build: "build-fork"}.get(command, command.__name__)
        summary = (command.__doc__ or "").rstrip(".")
        added[command] = commands.add_parser(name, help=summary, description=command.__doc__)
        added[command].set_defaults(run=command)
    quick = "import no tree, and compare no formats, which takes a while"
    added[check].add_argument("--quick", action="store_true", help=quick)
    added[apply].add_argument("--to", type=Path, required=True, metavar="DIR", help="where there is nothing yet")
    added[refresh].add_argument("--tree", type=Path, metavar="DIR", help="take the seams from this tree's commits")
    of = "a version on the index, a folder with its source, or a git directory; default: BASE, and the newest version"
    added[drift].add_argument("of", nargs="*", metavar="VERSION|PATH", help=of)
    forms = added[drift].add_mutually_exclusive_group()
    forms.add_argument("--markdown", action="store_true", help="print tables for a page")
    forms.add_argument("--json", action="store_true", help="print it for a program")
    added[drift].add_argument("--output", type=Path, metavar="FILE", help="write it there instead of printing it")
    added[drift].add_argument(
        "--no-import", action="store_true", help="compare sources only, and import nothing of ours"
    )
    added[test].add_argument(
        "--only", type=int, metavar="N", help="apply fix N alone, and run its own tests with it and without it"
    )
    added[test].add_argument("--checkout", type=Path, metavar="DIR", help="for --only: a checkout of DeepSpeed")
    added[test].epilog = "Other arguments go to pytest; by default all that concerns a fork."
    args, args.pytest = parser.parse_known_args()
    if args.pytest and args.run is not test:
        parser.error(f"unrecognized arguments: {' '.join(args.pytest)}")
    return args


def main() -> int:
    args = parse_arguments()
    try:
        return int(args.run(args))
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
