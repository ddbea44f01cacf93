# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The patch series for DeepSpeed: check it, write it in full, build the fork that it makes, and test that.

patches/ has fixes of DeepSpeed's bugs and hooks for this package, both written by hand. The package itself is added
when the whole series is written.

Exit status: 0; 1 if a check or a test fails; 2 if it could not run.
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
from scripts.fork import patched_tree
from scripts.fork.deepspeed_source import WORK, Failed, requirement, run


def check(args: argparse.Namespace) -> int:
    """Check the patches: the series applies, each fix applies alone, each commit can be imported, and the hooks are
    those of the patches at run time."""
    with tempfile.TemporaryDirectory() as folder:
        problems = patched_tree.problems(Path(folder), not args.quick)
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


def series(args: argparse.Namespace) -> int:
    """Write the whole series for git am: the fixes, a patch that adds the package, and the hooks."""
    if args.to.exists():
        raise Failed(f"{args.to} exists")
    with tempfile.TemporaryDirectory() as folder:
        names = patched_tree.export(patched_tree.apply_series(Path(folder) / "tree", True), args.to)
    print(f"{len(names)} patches for DeepSpeed {requirement().version} in {args.to}")
    return 0


def apply(args: argparse.Namespace) -> int:
    """Make a git repository of DeepSpeed with a commit for each patch of patches/, to read them or to edit them."""
    if args.to.exists():
        raise Failed(f"{args.to} exists")
    print(patched_tree.apply_series(args.to, False))
    return 0


def build(args: argparse.Namespace) -> int:
    """Build a wheel of the fork: DeepSpeed with fixes and hooks, and the package."""
    print(wheel(WORK))
    return 0


def wheel(work: Path) -> Path:
    """Build the wheel in a folder, and return it."""
    from deepspeed_ext.version import __version__

    tree, wheels = patched_tree.apply_series(work / "tree", True), work / "dist"
    shutil.rmtree(wheels, ignore_errors=True)
    # Without pip, which runs setup.py three times. It imports torch, and with torch the installed package.
    backend = f"from setuptools.build_meta import __legacy__; __legacy__.build_wheel({str(wheels.resolve())!r})"
    added = {"DS_BUILD_STRING": f"+ext.{__version__}", "DEEPSPEED_EXT_DISABLE": "1"}
    run([sys.executable, "-c", backend], cwd=tree, env=os.environ | added)
    (built,) = wheels.glob("*.whl")
    return built


def environment(work: Path) -> Path:
    """Make a virtual environment with the fork, and everything else from the active one; return its Python."""
    folder, built = work / "environment", wheel(work)
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    packages = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    # Behind its own packages, so that the fork's two come first.
    directory = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in directory)
    (Path(packages) / "active.pth").write_text(lines, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-compile", "--no-deps", "--ignore-installed", "--no-index", str(built)])
    return python


def test(args: argparse.Namespace) -> int:
    """Build the fork, and run the quick tests in a new environment; or run the tests of the fixes."""
    if args.checkout is not None:
        command = ["tests.campaigns.upstream.fixes", str(args.checkout), *map(str, args.fixes)]
    elif args.fixes:
        raise Failed("the tests of fixes need --checkout DIR, a git clone of DeepSpeed")
    else:
        command = ["tests.campaigns.wheel", str(wheel(WORK))]
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode


def drift(args: argparse.Namespace) -> int:
    """Print the used symbols that differ in other versions of DeepSpeed, and the modules that break."""
    return drifts.main(args.of, args.markdown, args.output, PATCHES)


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/patches", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="command")
    added = {}
    for command in (check, series, apply, build, test, drift):
        name = {build: "build-fork"}.get(command, command.__name__)
        summary = " ".join((command.__doc__ or "").rstrip(".").split())
        added[command] = commands.add_parser(name, help=summary, description=command.__doc__)
        added[command].set_defaults(run=command)
    added[check].add_argument("--quick", action="store_true", help="do not import each commit")
    for command in (series, apply):
        added[command].add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new folder")
    added[test].add_argument("fixes", nargs="*", type=int, metavar="N", help="numbers of fixes; default: all of them")
    added[test].add_argument("--checkout", type=Path, metavar="DIR", help="a git clone of DeepSpeed: test the fixes")
    of = "a version on the index, a folder with its source, or a git directory; default: the newest version"
    added[drift].add_argument("of", nargs="*", metavar="VERSION|PATH", help=of)
    added[drift].add_argument("--markdown", action="store_true", help="print tables for a page")
    added[drift].add_argument("--output", type=Path, metavar="FILE", help="write it there instead of printing it")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    try:
        return int(args.run(args))
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
