# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Overrides are checked against what they override."""

from typing import Any

import pytest

from deepspeed_ext import overrides

pytestmark = pytest.mark.quick


class Parent:
    """DeepSpeed's, of some release."""

    def __init__(self) -> None:
        self.__private = self.public = 1

    def plain(self, a: int, b: int = 2) -> None: ...

    def keyword(self, a: int, *, only: bool) -> None: ...

    @property
    def value(self) -> int:
        return 1

    @staticmethod
    def static(a: int) -> None: ...


# What a class of ours has, and what is said of it; nothing if it fits.
CASES: dict[str, tuple[str, str]] = {
    "a private attribute": ("__annotations__ = {'_Parent__private': int}", ""),
    "one that is gone": ("__annotations__ = {'_Parent__other': int}", "somewhere.Parent.__other is gone (we read it)"),
    "the same": ("@override\ndef plain(self, a, b=2): ...", ""),
    "all is passed on": ("@override\ndef plain(self, *args, **kwargs): ...", ""),
    "the rest is passed on": ("@override\ndef plain(self, a, **kwargs): ...", ""),
    "one more without": ("@override\ndef plain(self, a, b=2, *, c=None, d=1): ...", ""),
    "another name": (
        "@override\ndef plain(self, x, b=2): ...",
        "ours takes (self, x, b=2)",
    ),
    "another default": ("@override\ndef plain(self, a, b=3): ...", "has signature (self, a, b=2)"),
    "one is missing": ("@override\ndef plain(self, a): ...", "has signature (self, a, b=2)"),
    "gone": ("@override\ndef nowhere(self): ...", "Parent.nowhere is gone"),
    "not marked": ("def plain(self, a, b=2): ...", "is new to us, and a method of ours has its name"),
    "of keywords one is missing": ("@override\ndef keyword(self, a): ...", "has signature (self, a, *, only)"),
    "of keywords all": ("@override\ndef keyword(self, a, *, only): ...", ""),
    "a property": ("@property\n@override\ndef value(self): ...", ""),
    "a method instead of a property": ("@override\ndef value(self): ...", "is a property, expected a method"),
    "a static method": ("@staticmethod\n@override\ndef static(a): ...", ""),
    "a method instead of a static one": (
        "@override\ndef static(self, a): ...",
        "is a static method",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_fits_and_what_does_not(case: str) -> None:
    body, expected = CASES[case]
    namespace: dict[str, Any] = {"override": overrides.override}
    exec(body, namespace)
    own = {name: one for name, one in namespace.items() if name in {*vars(Parent), "nowhere", "__annotations__"}}
    Parent.__module__ = "deepspeed.somewhere"
    ours = type("Ours", (Parent,), {**own, "__module__": "deepspeed_ext.zero.somewhere"})
    found = "; ".join(overrides.problems(overrides.checked(ours)))
    assert expected in found and bool(expected) == bool(found), found
