# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How pipelines run with strategies, ZeRO-2 and ZeRO-3.

``require``: see ``keys``; plain ZeRO-2 and 3 have no key of ours, and need us in a pipeline all the same.
"""

import functools
from collections.abc import Callable
from typing import Any


def train_pipelines(init: Callable[..., None], require: Callable[[], None] = lambda: None) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.pipeline import setup

        setup.initialize(init, require, self, *args, **kwargs)

    return __init__


def build_pipelines_whole(partition: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(partition)
    def _partition_layers(self: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.pipeline import setup

        setup.refuse_zero_init()
        partition(self, *args, **kwargs)

    return _partition_layers
