# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Overrides of DeepSpeed's methods, checked against the methods themselves when a class of ours is made.

What is asked is what is needed, not equality: the parent has the method, our override takes what the parent's callers
pass, and the parent takes what our override passes on. A release of DeepSpeed that adds an optional argument to a
method that we pass on as ``*args, **kwargs`` changes nothing.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from typing_extensions import override

__all__ = ["ParentChanged", "checked", "overridden", "override", "plain_signature"]

_Class = TypeVar("_Class", bound=type)
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ParentChanged(ImportError):
    """A class of DeepSpeed's is not as a subclass of ours knows it.

    Attributes:
        problems: what is wrong, a clause each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def checked(cls: _Class) -> _Class:
    """Check a class with DeepSpeed's among its bases: a decorator.

    Raises:
        ParentChanged: an override does not fit.
        TypeError: a method has the name of one of DeepSpeed's and is not marked with ``override``.
    """
    problems = []
    for parent, name, ours in overridden(cls):
        theirs = inspect.getattr_static(parent, name, None)
        path = f"{parent.__module__}.{parent.__qualname__}.{name}"
        if theirs is None:
            problems.append(f"{path} is gone (used for: {_purpose(ours)})")
        elif callable(theirs) and not _fits(plain_signature(ours), plain_signature(theirs)):
            problems.append(
                f"{path} has signature {plain_signature(theirs)}, expected one for {plain_signature(ours)} "
                f"(used for: {_purpose(ours)})"
            )
    if problems:
        raise ParentChanged(problems)
    return cls


def overridden(cls: type) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Yield DeepSpeed's class, the name and our method, for each override in a class and its bases of ours.

    Raises:
        TypeError: see ``checked``.
    """
    root = __name__.rpartition(".")[0]
    ours = [base for base in cls.__mro__ if base.__module__.startswith(root)]
    parent = next(base for base in cls.__mro__ if base not in ours)
    for base in ours:
        for name, member in vars(base).items():
            function = getattr(member, "fget", member)
            marked = getattr(function, "__override__", False)
            if marked:
                yield parent, name, function
            elif not name.startswith("__") and inspect.isroutine(function) and hasattr(parent, name):
                raise TypeError(f"{base.__qualname__}.{name} overrides {parent.__qualname__}'s: mark it with override")


def plain_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return names, kinds and defaults: annotations print differently from one Python to the next."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    while getattr(function, "__module__", None) == "deepspeed.utils.nvtx":  # a decorator that hides what it wraps
        function = inspect.getclosurevars(function).nonlocals["func"]
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=signature.empty)


def _fits(ours: inspect.Signature, theirs: inspect.Signature) -> bool:
    """Whether our override takes what callers of the parent's pass, and the parent takes what it passes on."""
    kinds = {parameter.kind for parameter in ours.parameters.values()}
    passes_on = inspect.Parameter.VAR_KEYWORD in kinds
    mine = [parameter.name for parameter in ours.parameters.values() if parameter.kind in _NAMED]
    expected = [parameter.name for parameter in theirs.parameters.values() if parameter.kind in _NAMED]
    return mine == expected[: len(mine)] and (len(mine) == len(expected) or passes_on)


def _purpose(ours: Callable[..., Any]) -> str:
    """Return the first line of a docstring, as a clause."""
    first = (ours.__doc__ or "an override of ours").strip().partition("\n")[0].rstrip(".")
    return first[0].lower() + first[1:]
