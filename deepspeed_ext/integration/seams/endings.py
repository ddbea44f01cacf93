# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What happens before the connections between ranks are closed."""

import functools
import sys
from collections.abc import Callable
from typing import Any


def complete_transfers_first(destroy: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        from torch.distributed import GroupMember

        if group not in (None, GroupMember.WORLD) or "deepspeed_ext.comm.endings" not in sys.modules:
            destroy(group)
            return
        from deepspeed_ext.comm import endings

        failure = endings.complete(after_an_error=sys.exc_info()[0] is not None)
        destroy(group)
        if failure is not None:
            raise RuntimeError(endings.failed(failure)) from failure

    return destroy_process_group
