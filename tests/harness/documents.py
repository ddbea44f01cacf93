# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The parsed pages of the repository: blocks of code, tables, links, headings."""

import json
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts import ROOT

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Page:
    """A Markdown file; ``name`` is its path in the repository."""

    name: str
    text: str

    def blocks(self, language: str) -> list[str]:
        return [body for kind, body in _BLOCK.findall(self.text) if kind == language]

    def prose(self) -> str:
        return _BLOCK.sub("", self.text)

    def links(self) -> list[str]:
        return _LINK.findall(self.prose())

    def anchors(self) -> set[str]:
        """Return the anchors of the headings of this page, as GitHub generates them."""
        headings = re.findall(r"^#+ (.*)$", self.prose(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def rows(self, first: str) -> list[list[str]]:
        """Return the rows of the table with a header that begins with this cell, without the header."""
        lines = self.text.splitlines()
        at = next(i for i, line in enumerate(lines) if line[:1] == "|" and line.split("|")[1].strip() == first)
        results = []
        for line in lines[at + 2 :]:
            if not line.startswith("|"):
                break
            results.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        return results

    def section(self, heading: str) -> "Page":
        """Return the part below a heading, up to the next one of its level or above."""
        level, rest = heading.split(" ", 1)[0], self.text.split(f"\n{heading}\n", 1)[1]
        return Page(self.name, re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0])


@cache
def pages() -> tuple[Page, ...]:
    """Return all pages of the repository, those that are not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        names = []
    if not names:  # a copy without a repository
        results = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
        names = [path.as_posix() for path in results if not path.parts[0].startswith((".", "build"))]
    return tuple(Page(name, (ROOT / name).read_text(encoding="utf-8")) for name in sorted(set(names)))


def page(name: str) -> Page:
    return next(item for item in pages() if item.name == name)


def sections_in(one: Page) -> list[dict[str, Any]]:
    """Return the configurations that a page shows as JSON, in blocks and between backquotes."""
    results = [json.loads(block) for block in one.blocks("json")]
    for quoted in re.findall(r"`(\{\".*?\})`(?=[\s,.;:|)]|$)", one.prose(), re.MULTILINE):
        section = json.loads(quoted)
        results.append(section if "zero_optimization" in section else {"zero_optimization": section})
    for quoted in re.findall(r"`(\"\w+\": [^`]*)`", one.prose()):
        written = json.loads(f"{{{quoted}}}")
        outside = written.keys() & {"checkpoint", "optimizer", "zero_optimization"}
        results.append(written if outside else {"zero_optimization": written})
    return results


def sources_of(module: Path, seen: set[Path] | None = None) -> str:
    """Return the text of a Python file, and of those of this repository that it imports."""
    seen = set() if seen is None else seen
    if module in seen or not module.is_file():
        return ""
    seen.add(module)
    text = module.read_text(encoding="utf-8")
    for name in re.findall(r"^\s*(?:from|import) ((?:deepspeed_ext|scripts|tests)[\w.]*)", text, re.MULTILINE):
        text += sources_of((ROOT / name.replace(".", "/")).with_suffix(".py"), seen)
    return text
