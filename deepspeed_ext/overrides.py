# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks overrides of DeepSpeed's methods against these methods when one of our classes is defined.

Signatures must be compatible, not equal: the parent has the method, our override accepts its callers' arguments, and
the parent accepts those that our override forwards. A release of DeepSpeed that adds an optional argument to a method
that we forward to as ``*args, **kwargs`` changes nothing.

Mismatches are recorded and not raised, because engines without our keys import these classes, too. If one of our keys
is used, ``patcher.require`` reads ``override_problems``.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from typing_extensions import override

__all__ = [
    "bypassed_methods",
    "check_overrides",
    "fits",
    "list_overrides",
    "override",
    "override_problems",
    "plain_signature",
    "purpose",
    "replace_attributes",
]

_Class = TypeVar("_Class", bound=type)
_PROBLEMS_ATTRIBUTE = "_deepspeed_problems"
_KNOWN = ("deepspeed", "deepspeed_ext", "torch")  # packages whose methods are expected
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@contextlib.contextmanager
def replace_attributes(target: Any, /, **attributes: Any) -> Iterator[None]:
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
            elif name in vars(target):  # it was an attribute of the class
                delattr(target, name)


def check_overrides(cls: _Class) -> _Class:
    """Class decorator: check a class with one of DeepSpeed's among its bases, and record mismatches."""
    setattr(cls, _PROBLEMS_ATTRIBUTE, tuple(_find_problems(cls)))
    return cls


def override_problems(cls: type) -> tuple[str, ...]:
    """Return the mismatches of a checked class with DeepSpeed's class, one clause each."""
    clauses: tuple[str, ...] = getattr(cls, _PROBLEMS_ATTRIBUTE)
    return clauses


def list_overrides(cls: type) -> Iterator[tuple[type, str, Any]]:
    """Yield (DeepSpeed's class, name, our member) for each override in a class and its bases that are ours."""
    for parent, name, member in _members(cls):
        if _is_marked(member):
            yield parent, name, member


def bypassed_methods(cls: type) -> list[str]:
    """Return DeepSpeed's methods that other code has replaced, and that the overrides of a class do not call."""
    replaced_methods = []
    for parent, name, member in list_overrides(cls):
        parent_member = _function(inspect.getattr_static(parent, name, None))
        module = str(getattr(parent_member, "__module__", ""))
        calls_parent = "__class__" in _function(member).__code__.co_freevars  # of ``super()``
        if module.partition(".")[0] not in _KNOWN and not calls_parent:
            replaced_methods.append(f"{parent.__qualname__}.{name}, which {module} has replaced")
    return replaced_methods


def _members(cls: type) -> Iterator[tuple[type, str, Any]]:
    """Yield (DeepSpeed's class, name, member) for methods and properties of a class and those bases that are ours."""
    root = __name__.rpartition(".")[0] + "."
    ours = [base for base in cls.__mro__ if f"{base.__module__}.".startswith(root)]
    parent = next(base for base in cls.__mro__ if base not in ours)
    for base in ours:
        for name, member in vars(base).items():
            if not name.startswith("__") and _kind(member) != "an attribute":
                yield parent, name, member


def _is_marked(member: Any) -> bool:
    return any(getattr(candidate, "__override__", False) for candidate in (member, _function(member)))


def _function(member: Any) -> Any:
    """Return the function of a property, or of a static or class method; a function unchanged."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _kind(member: Any) -> str:
    kinds = {property: "a property", staticmethod: "a static method", classmethod: "a class method"}
    return kinds.get(type(member)) or ("a method" if inspect.isroutine(member) else "an attribute")


def _find_problems(cls: type) -> Iterator[str]:
    for parent, name, ours in _members(cls):
        parent_member = inspect.getattr_static(parent, name, None)
        path, why = f"{parent.__module__}.{parent.__qualname__}.{name}", purpose(_function(ours).__doc__)
        if not _is_marked(ours):
            if parent_member is not None:
                yield f"{path} is new in DeepSpeed, and has the name of one of our methods"
        elif parent_member is None:
            yield f"{path} no longer exists (used to {why})"
        elif _kind(ours) != _kind(parent_member):
            yield f"{path} is {_kind(parent_member)}, expected {_kind(ours)} (used to {why})"
        elif not fits(plain_signature(_function(ours)), plain_signature(_function(parent_member))):
            signatures = plain_signature(_function(parent_member)), plain_signature(_function(ours))
            yield f"{path} has signature {signatures[0]}, ours takes {signatures[1]} (used to {why})"


def plain_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a signature without annotations, which print differently in different Python versions."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    while getattr(function, "__module__", None) == "deepspeed.utils.nvtx":  # a decorator without ``__wrapped__``
        function = inspect.getclosurevars(function).nonlocals["func"]
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=signature.empty)


def fits(ours: inspect.Signature, theirs: inspect.Signature) -> bool:
    """Return whether our override accepts arguments of the parent's callers, and the parent those that it forwards."""
    parameters, expected = list(ours.parameters.values()), list(theirs.parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
    named = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    common = [parameter for parameter in expected if parameter.kind in _POSITIONAL]
    for param, base_param in zip(named, common, strict=False):
        if param.name != base_param.name or repr(param.default) != repr(base_param.default):
            return False
    if any(parameter.default is parameter.empty for parameter in named[len(common) :]):
        return False  # the parent's callers do not pass it
    remaining = {parameter.name for parameter in common[len(named) :]}
    remaining |= {parameter.name for parameter in expected if parameter.kind == inspect.Parameter.KEYWORD_ONLY}
    if remaining - {parameter.name for parameter in parameters} and not any_keyword:
        return False
    spread = {parameter.kind for parameter in expected} - {*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY}
    return spread <= kinds


def purpose(docstring: str | None) -> str:
    """Return the first line of an override's docstring, as a clause."""
    first = (docstring or "override it").strip().partition("\n")[0].partition(";")[0].rstrip(".")
    first = first.replace("``", "")
    return first[0].lower() + first[1:]
