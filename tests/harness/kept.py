# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of runs that rank processes keep over cases: what stock DeepSpeed does is the same beside each strategy.

A result is kept if all its inputs have names: what a case patches is none of them, so a case that patches DeepSpeed
itself trains by hand. It is kept pickled: live tensors would count where a case counts memory. A rank that is started
anew has none, and one that raised may lack what others have; so all ranks of a case use a kept result, or none does.
"""

import dataclasses
import json
import pickle
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist

T = TypeVar("T")
_KEPT: dict[str, bytes] = {}


class _Unnamed(Exception):
    """An input that is not its own name's only value."""


def key(*inputs: Any) -> str | None:
    """Return a string that only equal inputs have, on as many ranks; None if one of them has no name."""
    try:
        return json.dumps([dist.get_world_size(), *inputs], sort_keys=True, default=_named)
    except _Unnamed:
        return None


def _named(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, type):
        path = f"{value.__module__}:{value.__qualname__}"
        try:
            if pkgutil.resolve_name(path) is value:
                return path
        except (AttributeError, ImportError, ValueError):
            pass
    raise _Unnamed


def kept(inputs: tuple[Any, ...], make: Callable[[], T]) -> T:
    """Return what ``make`` returns, or has returned for these inputs; all ranks call this together."""
    name = key(*inputs)
    have = torch.tensor(float(name in _KEPT))
    dist.all_reduce(have, op=dist.ReduceOp.MIN)
    if have.item():
        found: T = pickle.loads(_KEPT[str(name)])
        return found
    made = make()
    if name is not None:
        _KEPT[name] = pickle.dumps(made)
    return made
