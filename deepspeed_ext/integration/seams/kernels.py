# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``ds_report`` shows."""

import functools
from collections.abc import Callable
from typing import Any


def report_our_kernels(report: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(report)
    def op_report(*args: Any, **kwargs: Any) -> None:
        from unittest import mock

        from deepspeed import env_report

        from deepspeed_ext.op_builder import LocoBuilder

        builder = LocoBuilder()
        with (
            mock.patch.dict(env_report.ALL_OPS, {builder.NAME: builder}),
            mock.patch.dict(env_report.installed_ops, {builder.NAME: builder.is_built()}),
        ):
            report(*args, **kwargs)

    return op_report
