# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of runs that rank processes keep over cases, since stock DeepSpeed's are the same beside each strategy.

A result is kept if all its inputs have names. Patches are no inputs, so a case that patches DeepSpeed must train by
itself. Results are kept pickled, since live tensors would distort cases that count memory. A new rank has no results,
and one that raised may lack some; so either all ranks of a case use a kept result, or none does.
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
    """An input without a name that identifies its value."""


def key(*inputs: Any) -> str | None:
    """Return a string that only equal inputs on as many ranks have; None if an input has no name."""
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
    """Return what ``make`` returns, or has returned before for these inputs; all ranks call this together."""
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
