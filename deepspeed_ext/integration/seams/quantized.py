# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``zero_quantized_gradients`` reduces to."""

import functools
from collections.abc import Callable
from typing import Any


def reduce_to_the_mean(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def all_to_all_quant_reduce(tensors: Any, groups: Any) -> Any:
        from deepspeed_ext.loco import qgz

        return qgz.all_to_all_quant_reduce(tensors, groups)

    return all_to_all_quant_reduce
