# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pipelines with strategies, ZeRO-2 and ZeRO-3."""

import functools
from collections.abc import Callable
from typing import Any


def train_pipelines(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.pipeline import setup

        setup.initialize(init, self, *args, **kwargs)

    return __init__


def build_pipelines_whole(partition: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(partition)
    def _partition_layers(self: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.pipeline import setup

        setup.refuse_zero_init()
        partition(self, *args, **kwargs)

    return _partition_layers
