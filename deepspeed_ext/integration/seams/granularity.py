# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which parameters ZeRO-3 fetches as one."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from torch import Tensor, nn


def fetch_leaves_as_units(iter_params: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(iter_params)
    def entries(module: Any, recurse: bool = False) -> Any:
        from deepspeed_ext.leaf import units

        return units.entries(iter_params, module, recurse)

    return entries


def call_without_detour(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrapped)
    def zero3_linear_wrap(input: "Tensor", weight: "Tensor", bias: "Tensor | None" = None) -> Any:
        from deepspeed_ext.leaf.linear import linear

        return linear(wrapped, input, weight, bias)

    return zero3_linear_wrap


def choose_leaves(choose: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(choose)
    def _set_z3_leaf_modules_by_threshold(
        self: "DeepSpeedZeRoOffload", module: "nn.Module", zero_module_granularity_threshold: int
    ) -> None:
        from deepspeed_ext.zero.sharded.coordinator import is_coordinating

        if not is_coordinating():
            choose(self, module, zero_module_granularity_threshold)
            return
        from deepspeed_ext.leaf.setup import by_granularity

        by_granularity(self, module, zero_module_granularity_threshold)

    return _set_z3_leaf_modules_by_threshold
