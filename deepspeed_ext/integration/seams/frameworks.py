# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What frameworks read of the configuration."""

import functools
from collections.abc import Callable
from typing import Any


def read_the_stage_that_is_implied(read: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(read)
    def set_stage_and_offload(self: Any) -> None:
        from deepspeed_ext.config.implied_stage import imply_stage_of_raw
        from deepspeed_ext.config.keys import SECTION

        imply_stage_of_raw(self.config.get(SECTION))
        read(self)

    return set_stage_and_offload
