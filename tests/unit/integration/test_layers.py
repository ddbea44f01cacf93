# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rules of layers that import-linter cannot check, since it treats DeepSpeed as a whole."""

import ast
from collections.abc import Iterator

import pytest

from scripts import ROOT

pytestmark = pytest.mark.quick

PACKAGE = ROOT / "deepspeed_ext"
WITHOUT_ZERO = sorted(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "comm").glob("*.py"))


def imported(text: str) -> Iterator[str]:
    """Return the dotted names that a module imports, at its top or later."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", ["strategy.py", *WITHOUT_ZERO])
def test_what_moves_bytes_knows_nothing_of_zero(module: str) -> None:
    names = list(imported((PACKAGE / module).read_text(encoding="utf-8")))
    assert not [name for name in names if name.startswith("deepspeed.runtime")]


def test_strategies_need_neither_torch_nor_deepspeed() -> None:
    names = [name.partition(".")[0] for name in imported((PACKAGE / "strategy.py").read_text(encoding="utf-8"))]
    assert names and not {"torch", "deepspeed", "deepspeed_ext"} & set(names)
