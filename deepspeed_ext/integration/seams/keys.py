# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where our keys arrive, and errors come from.

``require`` raises if this DeepSpeed is not one that we know: the patcher gives it. In a DeepSpeed that has these
features built in there is nothing to ask.
"""

import functools
from collections.abc import Callable
from typing import Any


def parse_our_keys(
    get_zero_config: Callable[..., Any], require: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    @functools.wraps(get_zero_config)
    def parse(param_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        from deepspeed_ext.config.section import parse_if_ours

        ours = parse_if_ours(param_dict, require)
        return get_zero_config(param_dict, *args, **kwargs) if ours is None else ours

    return parse


def leave_removed_keys_to_us(reject: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reject)
    def _reject_removed_config_keys(param_dict: dict[str, Any]) -> Any:
        from deepspeed_ext.config.keys import without_removed

        return reject(without_removed(param_dict))

    return _reject_removed_config_keys


def check_our_keys(init: Callable[..., None], require: Callable[[], None] = lambda: None) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        from deepspeed_ext.config.check import check_config
        from deepspeed_ext.config.keys import SECTION, our_keys

        try:
            init(self, config, mpu, mesh_device)
        except Exception:
            # The reason may be that this DeepSpeed is not the one that we patch: then say that instead.
            if our_keys(getattr(self, "_param_dict", {}).get(SECTION)):
                require()
            raise
        check_config(self, mpu, mesh_device)

    return __init__
