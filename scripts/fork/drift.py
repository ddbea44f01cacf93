# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares another DeepSpeed with the one that the package is written for, in everything that the package uses.

Each DeepSpeed is imported in a process of its own. A module that cannot be imported is a difference like any other.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata, util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deepspeed_ext.integration.symbols import Patch
from deepspeed_ext.overrides import fits
from scripts import ROOT
from scripts.fork import deepspeed_source
from scripts.fork.deepspeed_source import Failed, git, requirement, run

_SECONDS = 600  # for importing a DeepSpeed and all modules of the package


@dataclass(frozen=True)
class Difference:
    """A difference in a symbol that the package uses.

    Attributes:
        symbol: the dotted name; for an import that fails, the error.
        what: missing, arguments, kind, value, new or import.
        expected: in the DeepSpeed that we know.
        found: in the other one.
        breaks: modules of the package.
        why: the feature that needs the symbol.
        matters: whether something breaks; False if a function accepts the same calls.
    """

    symbol: str
    what: str
    expected: str
    found: str
    breaks: tuple[str, ...]
    why: str
    matters: bool = True


@dataclass(frozen=True)
class Report:
    """The differences of one DeepSpeed, and the number of symbols that were compared."""

    label: str
    used: int
    differences: tuple[Difference, ...]

    @property
    def breaking(self) -> int:
        """The number of differences that matter."""
        return sum(difference.matters for difference in self.differences)


# Finding a DeepSpeed ##############################################################################


def open_deepspeed(what: str, scratch: Path) -> tuple[str, Path]:
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
    expected = [name for name in ("deepspeed", "accelerator", "op_builder", "version.txt") if name in names]
    if "deepspeed" not in expected:
        raise Failed(f"HEAD of {path} has no folder deepspeed")
    git(path, "archive", "--output", str(archive.resolve()), "HEAD", "--", *expected)
    with tarfile.open(archive) as content:
        deepspeed_source.extract_all(content, str(tree))
    return f"DeepSpeed {_version(tree)}{_commit(path)}", tree


def _version(tree: Path) -> str:
    file = tree / "version.txt"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else "of unknown version"


def _commit(repository: Path) -> str:
    return ", commit " + git(repository, "log", "-1", "--format=%h of %cs").strip()


def supported_deepspeed(scratch: Path) -> Path:
    """Return the folder of the DeepSpeed in ``patches/BASE``: the one that is installed, or a fresh one."""
    spec, version = util.find_spec("deepspeed"), requirement().version
    if spec is not None and spec.origin is not None and metadata.version("deepspeed") == version:
        return Path(spec.origin).parents[1]
    return deepspeed_source.extract(version, scratch / "base")


def newest() -> str:
    """Return the newest DeepSpeed on the index that pip uses.

    Raises:
        Failed: pip does not say.
    """
    try:
        run([sys.executable, "-m", "pip", "download", "--no-deps", "deepspeed==0"])
    except Failed as failed:
        match = re.search(r"from versions: .*?([\d.]+)\)", str(failed))
        if match:
            return match[1]
    raise Failed("pip does not say which versions of deepspeed there are")


# Comparing ########################################################################################


def uses(base: Path, ours: Path, rows: Iterable[Patch], scratch: Path) -> list[dict[str, Any]]:
    """Return the symbols of the supported DeepSpeed that the package uses.

    Args:
        base: the folder of that DeepSpeed.
        ours: the folder that has the package.
        rows: the table of patches.
        scratch: a folder.

    Raises:
        Failed: the process did not end as it should.
    """
    listed = [_row(row) for row in rows]
    targets = {use["target"] for use in listed}
    return listed + [use for use in _beside(base, ours, scratch, "uses") if use["target"] not in targets]


def report(label: str, root: Path, ours: Path, used: Sequence[dict[str, Any]], scratch: Path) -> Report:
    """Compare a DeepSpeed with the one that we know.

    Args:
        label: its description.
        root: its folder.
        ours: the folder that has the package.
        used: the symbols that the package uses.
        scratch: an empty folder.

    Raises:
        Failed: the process did not end as it should.
    """
    targets = scratch / "targets.json"
    targets.write_text(json.dumps([use["target"] for use in used]), encoding="utf-8")
    now = _beside(root, ours, scratch, "look-up", str(targets))
    results = [one for use in used for one in _differences(use, use["was"], now["symbols"][use["target"]])]
    by_error: dict[str, list[str]] = {}
    for name, error in now["failures"].items():
        by_error.setdefault(error, []).append(name)
    imports = [
        Difference(error, "import", "", "", tuple(names), "cannot be imported") for error, names in by_error.items()
    ]
    return Report(label, len(used), (*imports, *sorted(results, key=lambda one: (not one.matters, one.symbol))))


def _row(row: Patch) -> dict[str, Any]:
    location = row.replace.__module__ if row.replace else "deepspeed_ext.integration.patches"
    return {"target": row.target, "why": row.purpose, "places": [location], "was": row.signature}


def _beside(root: Path, ours: Path, scratch: Path, *arguments: str) -> Any:
    """Run ``usage`` in a process that imports the DeepSpeed of a folder, and return its answer."""
    library, out = scratch / f"lib{abs(hash(root))}", scratch / "answer.json"
    library.mkdir(exist_ok=True)  # with nothing but the package: other packages beside it would hide ours
    if not (library / "deepspeed").is_symlink():
        (library / "deepspeed").symlink_to(root / "deepspeed")
    path = os.pathsep.join(map(str, (library, ours, ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "DEEPSPEED_EXT_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "scripts.fork.usage", *arguments, str(out)]
    try:
        run(command, env=environment, cwd=scratch, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"DeepSpeed and the package were not imported within {_SECONDS} s") from error
    return json.loads(out.read_text(encoding="utf-8"))


def _differences(use: dict[str, Any], was: Any, now: dict[str, Any] | None) -> Iterator[Difference]:
    """Yield the differences of a symbol; of one in the table of patches, ``was`` is the signature."""
    rule, symbol = use.get("rule"), use["target"].replace(":", ".").rstrip(".")
    created = Difference(symbol, "", "", "", tuple(use["places"]), use["why"])
    if rule == "new":
        if now is not None and was is None:
            yield replace(created, what="new", expected="nothing of that name", found=_shown(now))
    elif now is None or "error" in now:
        yield replace(created, what="missing", expected=_shown(was), found=now["error"] if now else "gone")
    elif isinstance(was, str):
        if _shown(now) != was:
            yield replace(created, what="arguments", expected=was, found=_shown(now))
    elif was is not None and was["kind"] != now["kind"]:
        yield replace(created, what="kind", expected=was["kind"], found=now["kind"])
    elif rule == "override":
        if use.get("arguments") and now.get("arguments") and not fits(*map(_signature, (use, now))):
            expected = f"{_shown(was)}, ours takes {_shown(use)}"
            yield replace(created, what="arguments", expected=expected, found=_shown(now))
    elif was is not None and use["called"] and was.get("arguments") != now.get("arguments"):
        matters = not (now.get("arguments") and was.get("arguments") and takes(_signature(now), _signature(was)))
        yield replace(created, what="arguments", expected=_shown(was), found=_shown(now), matters=matters)
    elif was is not None and was.get("value") != now.get("value") and "version" not in symbol.rpartition(".")[2]:
        yield replace(created, what="value", expected=str(was["value"]), found=str(now["value"]))


class _Default:
    """A default value, of which only the text is known."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(symbol: dict[str, Any]) -> inspect.Signature:
    empty, kinds = inspect.Parameter.empty, list(inspect._ParameterKind)
    return inspect.Signature(
        [
            inspect.Parameter(name, kinds[kind], default=empty if default is None else _Default(default))
            for name, kind, default in symbol["arguments"]
        ]
    )


def _shown(symbol: Any) -> str:
    if isinstance(symbol, str):
        return symbol
    if symbol is None or symbol.get("arguments") is None or symbol["kind"] == "a class":
        return str((symbol or {"kind": "nothing"}).get("kind"))
    return str(_signature(symbol))


def takes(now: inspect.Signature, was: inspect.Signature) -> bool:
    """Return whether a function accepts all calls that another one accepts, with the same meaning."""
    provided = [
        item for item in was.parameters.values() if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
    ]
    names = {item.name: item for item in was.parameters.values() if item.kind == item.KEYWORD_ONLY}
    needed = {name: name for name, item in names.items() if item.default is item.empty}
    try:
        by_position = now.bind(*(item.name for item in provided), **{name: name for name in names}).arguments
        now.bind(*(item.name for item in provided if item.default is item.empty), **needed)
        now.bind(**{item.name: item.name for item in provided if item.kind != item.POSITIONAL_ONLY}, **needed)
    except TypeError:
        return False
    is_same = all(name == value for name, value in by_position.items() if isinstance(value, str))
    remaining = {item.kind for item in was.parameters.values()} - {item.kind for item in now.parameters.values()}
    pairs = [(item, now.parameters[item.name]) for item in (*provided, *names.values()) if item.name in now.parameters]
    defaults = all(repr(item.default) == repr(other.default) for item, other in pairs)
    return is_same and defaults and not remaining & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


# Printing #########################################################################################


def _head(one: Report) -> str:
    rest = len(one.differences) - one.breaking
    more = f", {rest} break nothing" if rest else ""
    return f"{one.label}: {one.breaking} differences break something{more}; {one.used} symbols are used"


def _places(difference: Difference, most: int = 3) -> str:
    printed = ", ".join(location.removeprefix("deepspeed_ext.") for location in difference.breaks[:most])
    remaining = len(difference.breaks) - most
    return printed + (f" and {remaining} more" if remaining > 0 else "")


def as_text(one: Report) -> str:
    """Return a report for people."""
    lines = [_head(one)]
    for each in one.differences:
        change = f": {each.expected} -> {each.found}" if each.expected else ""
        lines.append(f"  {each.what:<9} {each.symbol}{change}")
        lines.append(f"            {'breaks' if each.matters else 'fits'} {_places(each)}: {each.why}")
    return "\n".join(lines)


def as_markdown(one: Report) -> str:
    """Return a report as a part of a page."""
    lines = [f"## {one.label}", "", _head(one).partition(": ")[2] + ".", ""]
    lines += ["| What | Symbol | Known | There | Breaks | For |", "|---|---|---|---|---|---|"]
    for each in one.differences:
        breaks = _places(each) if each.matters else "nothing"
        cells = each.what, f"`{each.symbol}`", each.expected, each.found, breaks, each.why
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def main(of: Sequence[str], markdown: bool, output: Path | None, rows: Sequence[Patch], ours: Path = ROOT) -> int:
    """Report on each DeepSpeed; the status is 0 if nothing breaks, 1 if something does, 2 if one could not be read."""
    reports, missed = [], False
    with TemporaryDirectory() as folder:
        used = uses(supported_deepspeed(Path(folder)), ours, rows, Path(folder))
        for number, case in enumerate(of or [newest()]):
            scratch = Path(folder) / str(number)
            scratch.mkdir()
            try:
                reports.append(report(*open_deepspeed(case, scratch), ours, used, scratch))
            except Failed as failed:  # the others are reported all the same
                print(failed, file=sys.stderr)
                missed = True
    text = "\n".join((as_markdown if markdown else as_text)(item) for item in reports)
    if output is None:
        print(text)
    else:  # pip and others print to the terminal
        output.write_text(text + "\n", encoding="utf-8")
    return 2 if missed else int(any(item.breaking for item in reports))
