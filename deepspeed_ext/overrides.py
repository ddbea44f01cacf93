# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Overrides of DeepSpeed's methods, checked against the methods themselves when a class of ours is made.

What is asked is what is needed, not equality: the parent has the method, our override takes what the parent's callers
pass, and the parent takes what our override passes on. A release of DeepSpeed that adds an optional argument to a
method that we pass on as ``*args, **kwargs`` changes nothing.

What does not fit is noted and not raised: classes are imported by engines without a key of ours, too. Where one of our
keys is used ``patcher.require`` asks for ``problems``.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from typing_extensions import override

__all__ = [
    "bypassed",
    "checked",
    "fits",
    "overridden",
    "override",
    "plain_signature",
    "problems",
    "purpose",
    "replaced",
]

_Class = TypeVar("_Class", bound=type)
_NOTED = "_deepspeed_problems"
_KNOWN = ("deepspeed", "deepspeed_ext", "torch")  # packages whose methods are expected
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@contextlib.contextmanager
def replaced(target: Any, /, **attributes: Any) -> Iterator[None]:
    """Set attributes of an instance, a class, or a module within a context, and restore them afterwards.

    Raises:
        AttributeError: the target has no attribute of one of these names.
    """
    for name in attributes:
        getattr(target, name)
    before = {name: vars(target)[name] for name in attributes if name in vars(target)}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(target, name, before[name])
            elif name in vars(target):  # not its own before: its class has it
                delattr(target, name)


def checked(cls: _Class) -> _Class:
    """Check a class with DeepSpeed's among its bases, and note what is wrong: a decorator."""
    setattr(cls, _NOTED, tuple(_find_problems(cls)))
    return cls


def problems(cls: type) -> tuple[str, ...]:
    """Return what of DeepSpeed's class is not as a checked class of ours knows it, a clause each."""
    found: tuple[str, ...] = getattr(cls, _NOTED)
    return found


def overridden(cls: type) -> Iterator[tuple[type, str, Any]]:
    """Yield DeepSpeed's class, the name and our member, for each override in a class and its bases of ours."""
    for parent, name, member in _members(cls):
        if _is_marked(member):
            yield parent, name, member


def bypassed(cls: type) -> list[str]:
    """Return methods of DeepSpeed that other code has replaced, and that overrides of a class of ours do not call."""
    found = []
    for parent, name, member in overridden(cls):
        theirs = _function(inspect.getattr_static(parent, name, None))
        module = str(getattr(theirs, "__module__", ""))
        calls_parent = "__class__" in _function(member).__code__.co_freevars  # of ``super()``
        if module.partition(".")[0] not in _KNOWN and not calls_parent:
            found.append(f"{parent.__qualname__}.{name}, which {module} has replaced")
    return found


def _members(cls: type) -> Iterator[tuple[type, str, Any]]:
    """Yield DeepSpeed's class, and methods and properties of a class and its bases of ours."""
    root = __name__.rpartition(".")[0] + "."
    ours = [base for base in cls.__mro__ if f"{base.__module__}.".startswith(root)]
    parent = next(base for base in cls.__mro__ if base not in ours)
    for base in ours:
        for name, member in vars(base).items():
            if not name.startswith("__") and _kind(member) != "an attribute":
                yield parent, name, member


def _is_marked(member: Any) -> bool:
    return any(getattr(one, "__override__", False) for one in (member, _function(member)))


def _function(member: Any) -> Any:
    """Return what a property or a static or class method is made of; a function as it is."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _kind(member: Any) -> str:
    kinds = {property: "a property", staticmethod: "a static method", classmethod: "a class method"}
    return kinds.get(type(member)) or ("a method" if inspect.isroutine(member) else "an attribute")


def _find_problems(cls: type) -> Iterator[str]:
    for parent, name, ours in _members(cls):
        theirs = inspect.getattr_static(parent, name, None)
        path, why = f"{parent.__module__}.{parent.__qualname__}.{name}", purpose(_function(ours).__doc__)
        if not _is_marked(ours):
            if theirs is not None:
                yield f"{path} is new to us, and a method of ours has its name"
        elif theirs is None:
            yield f"{path} is gone (used to {why})"
        elif _kind(ours) != _kind(theirs):
            yield f"{path} is {_kind(theirs)}, expected {_kind(ours)} (used to {why})"
        elif not fits(plain_signature(_function(ours)), plain_signature(_function(theirs))):
            signatures = plain_signature(_function(theirs)), plain_signature(_function(ours))
            yield f"{path} has signature {signatures[0]}, ours takes {signatures[1]} (used to {why})"


def plain_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return names, kinds and defaults: annotations print differently from one Python to the next."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    while getattr(function, "__module__", None) == "deepspeed.utils.nvtx":  # a decorator that hides what it wraps
        function = inspect.getclosurevars(function).nonlocals["func"]
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=signature.empty)


def fits(ours: inspect.Signature, theirs: inspect.Signature) -> bool:
    """Whether our override takes what callers of the parent's pass, and the parent takes what it passes on."""
    mine, expected = list(ours.parameters.values()), list(theirs.parameters.values())
    kinds = {parameter.kind for parameter in mine}
    any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
    named = [parameter for parameter in mine if parameter.kind in _POSITIONAL]
    common = [parameter for parameter in expected if parameter.kind in _POSITIONAL]
    for own, other in zip(named, common, strict=False):
        if own.name != other.name or repr(own.default) != repr(other.default):
            return False
    if any(parameter.default is parameter.empty for parameter in named[len(common) :]):
        return False  # the parent's callers do not pass it
    left = {parameter.name for parameter in common[len(named) :]}
    left |= {parameter.name for parameter in expected if parameter.kind == inspect.Parameter.KEYWORD_ONLY}
    if left - {parameter.name for parameter in mine} and not any_keyword:
        return False
    spread = {parameter.kind for parameter in expected} - {*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY}
    return spread <= kinds


def purpose(docstring: str | None) -> str:
    """Return the first line of an override's docstring, as a clause."""
    first = (docstring or "override it").strip().partition("\n")[0].partition(";")[0].rstrip(".")
    first = first.replace("``", "")
    return first[0].lower() + first[1:]
