# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A tree of DeepSpeed with patches of the series, a commit for each; and checks of it."""

import ast
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from scripts.fork.deepspeed_source import Failed, git, requirement, run, unpack
from scripts.fork.patch_mails import PATCHES, Mail, series, targets
from scripts.fork.translated_sources import MENDED, PACKAGE, UPSTREAM, is_ours, says_the_same, translated

README = PATCHES / "README.md"
_TABLE = re.compile(r"(?<=<!-- table: scripts/patches refresh -->\n).*?(?=<!-- end -->)", re.DOTALL)
# Lines that replace a function of DeepSpeed by ours: a decorator, or an assignment.
_OURS = r'(?P<ours>\w+\.\w+|seams\.lazily\("[\w.]+:\w+"\))'
_DECORATED = re.compile(rf"^\+ *@{_OURS}\n(?:[ +] *@.*\n)*[ +] *def (?P<theirs>\w+)", re.MULTILINE)
_ASSIGNED = re.compile(rf"^\+(?P<theirs>\w+) = {_OURS}\((?P=theirs)\)$", re.MULTILINE)
_LAZILY = re.compile(r'seams\.lazily\("(?:\w+\.)*(\w+):(\w+)"\)')


def apply(tree: Path, mail: Mail, but: Iterable[str] = ()) -> None:
    """Commit a patch, except its changes to some files. git allows no fuzz: the context of each change must match.

    Raises:
        Failed: it does not apply.
    """
    without = [f"--exclude={name}" for name in but]
    git(tree, "am", "--quiet", "--keep-cr", "--committer-date-is-author-date", *without, str(mail.path))


def applied(folder: Path) -> Path:
    """Make a tree with all patches, in a folder that is emptied before."""
    tree = unpack(requirement().version, folder)
    for mail in series():
        apply(tree, mail)
    return tree


def regenerate(tree: Path, mail: Mail) -> None:
    """Amend the last commit, which is this patch's, with our files as they are now."""
    names = targets(mail)
    added = git(tree, "show", "--format=", "--name-only", "--diff-filter=A", "HEAD").split()
    for name in set(filter(is_ours, added)) - set(names):
        git(tree, "rm", "--quiet", name)
    for name, source in names.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(translated(source), encoding="utf-8")
        git(tree, "add", name)
    git(tree, "commit", "--quiet", "--amend", "--no-edit", "--allow-empty", date=mail.date)


def stale(tree: Path, mail: Mail, formatted: bool = True) -> list[str]:
    """Return our files that the patch, which is the last commit, does not bring as they are now.

    Args:
        formatted: whether formats are compared, too.
    """
    found = []
    for name, source in targets(mail).items():
        path = tree / name
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        due = translated(source, formatted)
        if text != due and (formatted or not name.endswith(".py") or not says_the_same(text, due)):
            found.append(f"{mail.path.name}: {name} is not what {source} gives: scripts/patches refresh")
    return found


def missing(tree: Path, mail: Mail) -> list[str]:
    """Return what the files of the patch import of the fork's package, at any time, and is not there yet."""
    found = []
    for name in targets(mail):
        if not name.endswith(".py") or not (tree / name).is_file():  # ``stale`` says which are not there
            continue
        for node in ast.walk(ast.parse((tree / name).read_text(encoding="utf-8"))):
            for module in _imported(tree, node):
                path = tree / module.replace(".", "/")
                if module.startswith(PACKAGE) and not (path.with_suffix(".py").is_file() or path.is_dir()):
                    found.append(f"{mail.path.name}: {name} imports {module}, which is not there")
    return found


def _imported(tree: Path, node: ast.AST) -> list[str]:
    """Return modules; of a package, what is imported from it: none of ours has anything but modules."""
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if not isinstance(node, ast.ImportFrom) or node.level:
        return []
    module = str(node.module)
    folder = tree / module.replace(".", "/")
    return [f"{module}.{one.name}" for one in node.names] if folder.is_dir() else [module]


def export(tree: Path, folder: Path) -> list[str]:
    """Write the commits of a tree as mails; return their names."""
    form = ["--zero-commit", "--no-signature", "--no-numbered", "--no-renames", "--full-index"]
    lines = git(tree, "format-patch", *form, "--output-directory", str(folder), "base..HEAD").splitlines()
    return [Path(line).name for line in lines]


# Whether it can be imported #######################################################################


def _import_all(library: str, names: list[str]) -> None:
    """Import all in a process of its own, forked from one that has torch: that takes most of the time."""
    import importlib

    sys.dont_write_bytecode = True
    sys.path.insert(0, library)
    # As where a fork is alone: what still needs the extension must fail.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("deepspeed_ext")]
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed_ext"]:
        del sys.modules[name]
    sys.modules["deepspeed_ext"] = None  # type: ignore[assignment]
    for name in ["deepspeed", *names]:
        try:
            module = importlib.import_module(name)
            assert str(module.__file__).startswith(library), f"{name} comes from {module.__file__}"
        except Exception:
            traceback.print_exc()
            sys.exit(1)


def import_problems(library: Path, mail: Mail) -> list[str]:
    """Return modules that cannot be imported when this patch is the last one."""
    os.environ["DEEPSPEED_EXT_DISABLE"] = "1"  # or the trees would be patched on top of their seams
    import torch  # noqa: F401

    tree = (library / "deepspeed").resolve().parent
    files = git(tree, "diff", "--name-only", "base..HEAD", "--", "deepspeed", ":!*/__main__.py").split()
    names = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files if name.endswith(".py")
    ]
    process = multiprocessing.get_context("fork").Process(target=_import_all, args=(str(library), names))
    process.start()
    process.join()
    return [f"{mail.path.name}: the tree cannot be imported"] if process.exitcode else []


# What is in it ####################################################################################


class PatchRow(NamedTuple):
    """A patch, as the table in the README shows it.

    Attributes:
        name: of its file.
        mail: its header.
        generated: files that come from ours.
        lines: written by hand: added or removed in all other files, those of tests not counted.
        symbols: functions of ours, ``module.name``, each with the name of the function of DeepSpeed that it replaces.
    """

    name: str
    mail: Mail
    generated: list[str]
    lines: int
    symbols: list[tuple[str, str]]


def table(tree: Path, mails: Iterable[Mail]) -> list[PatchRow]:
    """Return a row for all patches that have been applied to a tree."""
    commits = git(tree, "rev-list", "--reverse", "base..HEAD").split()
    rows = []
    for commit, mail in zip(commits, mails, strict=True):
        names = targets(mail)
        lines, symbols = 0, []
        for line in git(tree, "show", "--format=", "--numstat", commit).splitlines():
            added, removed, name = line.split("\t")
            if name not in names and not name.startswith("tests/"):
                lines += int(added) + int(removed)
                changes = git(tree, "show", "--format=", commit, "--", name)
                for form in (_DECORATED, _ASSIGNED):
                    found = form.finditer(changes)
                    symbols += [(_LAZILY.sub(r"\1.\2", one["ours"]), one["theirs"]) for one in found]
        rows.append(PatchRow(mail.path.name, mail, sorted(names), lines, symbols))
    return rows


def twin_problems(rows: list[PatchRow]) -> list[str]:
    """Return where seams and what is patched at run time differ."""
    from deepspeed_ext.integration.patches import PATCHES as TWINS

    made = [(patch.replace, patch.path.rpartition(".")[2]) for patch in TWINS if patch.replace]
    made = [(ours, theirs) for ours, theirs in made if ours.__module__ != MENDED]
    twins = sorted((f"{ours.__module__.rpartition('.')[2]}.{ours.__name__}", theirs) for ours, theirs in made)
    seams = sorted(symbol for row in rows for symbol in row.symbols if symbol not in UPSTREAM)
    found = [f"{ours} replaces {theirs} at run time, and in no seam" for ours, theirs in set(twins) - set(seams)]
    found += [f"{ours} replaces {theirs} in a seam, and not at run time" for ours, theirs in set(seams) - set(twins)]
    if not found and twins != seams:
        found.append(f"the seams have {seams}, replaced at run time are {twins}")
    return sorted(found)


def _markdown(rows: list[PatchRow]) -> str:
    fixes = [row for row in rows if row.mail.tests]
    features = [row for row in rows if not row.mail.tests]
    text = ["| Fix, applies alone | Answers | Status | Lines | Its tests |", "|---|---|---|---|---|"]
    text += [_markdown_row(row, ", ".join(f"`{name}`" for name in row.mail.tests)) for row in fixes]
    text += ["", "| Feature | Answers | Status | Lines by hand | Twin at run time |", "|---|---|---|---|---|"]
    text += [_markdown_row(row, ", ".join(f"`{ours}`" for ours, _ in row.symbols) or "-") for row in features]
    lines, symbols = sum(row.lines for row in features), sum(len(row.symbols) for row in features)
    text.append(f"| in all | | | {lines} | {symbols} symbols, {lines / max(1, symbols):.1f} lines each |")
    return "\n".join(text) + "\n"


def _markdown_row(row: PatchRow, last: str) -> str:
    answers = ", ".join(row.mail.values("Upstream-Issue")) or "-"
    status = ", ".join(row.mail.values("Upstream-Status"))
    return f"| [{row.name[:4]}]({row.name}) {row.mail.subject} | {answers} | {status} | {row.lines} | {last} |"


def write_table(rows: list[PatchRow]) -> None:
    """Put the table into the README."""
    text = README.read_text(encoding="utf-8")
    README.write_text(_TABLE.sub(lambda _: _markdown(rows), text), encoding="utf-8")


def readme_problems(rows: list[PatchRow]) -> list[str]:
    """Whether the README's table is that of the series."""
    found = _TABLE.search(README.read_text(encoding="utf-8"))
    return [] if found and found[0] == _markdown(rows) else [f"{README} has another table: scripts/patches refresh"]


def newest() -> str:
    """Return the newest DeepSpeed on the index that pip uses.

    Raises:
        Failed: pip does not say.
    """
    try:
        run([sys.executable, "-m", "pip", "download", "--no-deps", "deepspeed==0"])
    except Failed as failed:
        found = re.search(r"from versions: .*?([\d.]+)\)", str(failed))
        if found:
            return found[1]
    raise Failed("pip does not say which versions of deepspeed there are")
