# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``zero_quantized_gradients`` reduces to, in a DeepSpeed that has these features built in.

The extension leaves it alone: no key of ours asks for it, and it changes numbers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


def reduce_to_the_mean(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def all_to_all_quant_reduce(tensors: "Sequence[Tensor]", groups: "Mapping[str, ProcessGroup]") -> Any:
        from deepspeed_ext.loco import qgz

        return qgz.all_to_all_quant_reduce(tensors, groups)

    return all_to_all_quant_reduce
