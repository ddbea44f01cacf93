# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What every process of upstream's tests does when it has imported torch, on both sides.

An entry point of ``torch.backends``, as the package's own: so it is there in every process that imports torch, be it
started by pytest, a fork server, ``spawn`` or a launcher.
"""

import functools
import os
from collections.abc import Callable
from typing import Any


def autoload() -> None:
    """Let tests that compare with DistributedDataParallel run on a CPU, and force our classes where that is asked."""
    from torch.nn.parallel import DistributedDataParallel
    from upstream_forced import FORCED, force

    DistributedDataParallel.__init__ = _without_devices_on_a_cpu(DistributedDataParallel.__init__)
    if FORCED in os.environ:
        force()


def _without_devices_on_a_cpu(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        init(self, module, device_ids, output_device, **kwargs)

    return __init__
