# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks of overrides against DeepSpeed's methods, and rules of layers that import-linter cannot check."""

import ast
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from deepspeed_ext import overrides
from scripts import ROOT

pytestmark = pytest.mark.quick


class Parent:
    """DeepSpeed's, of some release."""

    def __init__(self) -> None:
        self.public = 1

    def plain(self, a: int, b: int = 2) -> None: ...

    def keyword(self, a: int, *, only: bool) -> None: ...

    @property
    def value(self) -> int:
        return 1

    @staticmethod
    def static(a: int) -> None: ...


# What a class of ours has, and what is said of it; nothing if it fits.
CASES: dict[str, tuple[str, str]] = {
    "the same": ("@override\ndef plain(self, a, b=2): ...", ""),
    "all is passed on": ("@override\ndef plain(self, *args, **kwargs): ...", ""),
    "the rest is passed on": ("@override\ndef plain(self, a, **kwargs): ...", ""),
    "one more without": ("@override\ndef plain(self, a, b=2, *, c=None, d=1): ...", ""),
    "another name": ("@override\ndef plain(self, x, b=2): ...", "ours takes (self, x, b=2)"),
    "another default": ("@override\ndef plain(self, a, b=3): ...", "has signature (self, a, b=2)"),
    "one is missing": ("@override\ndef plain(self, a): ...", "has signature (self, a, b=2)"),
    "gone": ("@override\ndef nowhere(self): ...", "Parent.nowhere no longer exists"),
    "not marked": ("def plain(self, a, b=2): ...", "is new in DeepSpeed, and has the name of one of our methods"),
    "of keywords one is missing": ("@override\ndef keyword(self, a): ...", "has signature (self, a, *, only)"),
    "of keywords all": ("@override\ndef keyword(self, a, *, only): ...", ""),
    "a property": ("@property\n@override\ndef value(self): ...", ""),
    "a method instead of a property": ("@override\ndef value(self): ...", "is a property, expected a method"),
    "a static method": ("@staticmethod\n@override\ndef static(a): ...", ""),
    "a method instead of a static one": ("@override\ndef static(self, a): ...", "is a static method"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_fits_and_what_does_not(case: str) -> None:
    body, expected = CASES[case]
    namespace: dict[str, Any] = {"override": overrides.override}
    exec(body, namespace)
    own = {name: member for name, member in namespace.items() if name in {*vars(Parent), "nowhere"}}
    Parent.__module__ = "deepspeed.somewhere"
    ours = type("Ours", (Parent,), {**own, "__module__": "deepspeed_ext.zero.somewhere"})
    clauses = "; ".join(overrides.override_problems(overrides.check_overrides(ours)))
    assert expected in clauses and bool(expected) == bool(clauses), clauses


@pytest.mark.parametrize("target", [Parent(), Parent, type("Child", (Parent,), {}), sys.modules[__name__]])
def test_replaced_attributes_are_restored(target: Any) -> None:
    names = [name for name in ("plain", "static", "public", "imported") if hasattr(target, name)]
    before = dict(vars(target))
    with pytest.raises(KeyError), overrides.replace_attributes(target, **dict.fromkeys(names, 1)):
        assert [getattr(target, name) for name in names] == [1] * len(names)
        raise KeyError
    with pytest.raises(AttributeError), overrides.replace_attributes(target, **{names[0]: 1, "misspelled": 1}):
        pass
    assert dict(vars(target)) == before


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
