# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules whose parameters have a placement of their own (``paro_modules``): N, or next to p = G also I."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

from deepspeed.moe.utils import is_moe_param
from torch import nn

from deepspeed_ext.config.keys import MODULES, SECTION
from deepspeed_ext.strategy import Placement

_PLACEMENT = "paro_placement"  # attribute of these parameters
_SHOWN = 20  # names of modules in a message


class Whole(Protocol):
    """Whole parameters of a model; see ``WholeParameters``."""

    @property
    def in_flight(self) -> bool: ...
    def gather(self, params: Sequence[Any] | None = None) -> None: ...
    def wait(self) -> None: ...
    def release(self) -> None: ...


def mark_placements(model: nn.Module, patterns: Mapping[str, str]) -> None:
    """Mark the parameters of modules whose names match a pattern with its placement, and unmark all others.

    ``visual.*`` matches the module ``visual`` and everything in it. The last pattern that matches a parameter counts.

    Raises:
        ValueError: a pattern matches no parameters, or experts of expert parallelism.
    """
    for param in model.parameters():
        param.__dict__.pop(_PLACEMENT, None)
    for pattern, placement in patterns.items():
        params = [p for name, module in model.named_modules() if _matches(name, pattern) for p in module.parameters()]
        if not params:
            raise ValueError(
                f"{SECTION}.{MODULES}: {pattern!r} matches no module with parameters. Modules: {_names(model)}."
            )
        if any(map(is_moe_param, params)):
            raise ValueError(
                f"{SECTION}.{MODULES}: {pattern!r} matches experts of expert parallelism, which only some ranks have. "
                f"Use a pattern without experts."
            )
        for param in params:
            setattr(param, _PLACEMENT, Placement[placement])


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f"{name}.", pattern)


def _names(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    return shorten(sorted(names, key=lambda name: name.count(".")))


def shorten(names: Sequence[str]) -> str:
    """Return names of modules, or patterns, for a message: only the first if there are many."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def placement_of(param: Any) -> Placement | None:
    """Return the placement that a pattern gives a parameter; None for the strategy's."""
    placement: Placement | None = getattr(param, _PLACEMENT, None)
    return placement


def is_whole(param: Any) -> bool:
    """Whether a parameter stays whole on every rank."""
    return placement_of(param) == Placement.N


def placed_parameters(model: nn.Module, placement: Placement) -> list[nn.Parameter]:
    """Return the parameters to which patterns give a placement."""
    return [param for param in model.parameters() if placement_of(param) == placement]


def whole_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of which all parameters are whole, and the modules in them."""
    params = list(model.parameters())
    if params and all(map(is_whole, params)):
        yield from model.modules()
        return
    for child in model.children():
        yield from whole_modules(child)
