# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where our keys arrive, and errors come from."""

import functools
from collections.abc import Callable
from typing import Any


def parse_our_keys(get_zero_config: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_zero_config)
    def parse(param_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        from deepspeed_ext.config import section as config
        from deepspeed_ext.config.implied_stage import forget_stage, imply_stage
        from deepspeed_ext.integration.support import require

        config.check_top_level(param_dict)
        section: Any = param_dict.get(config.SECTION)
        forget_stage(section)
        if not config.our_keys(section):
            return get_zero_config(param_dict, *args, **kwargs)
        require()
        parsed = config.parse_section(section)
        if getattr(parsed, config.STRATEGY, config.FASTEST) != config.FASTEST:
            imply_stage(section, int(parsed.stage))
        return parsed

    return parse


def leave_removed_keys_to_us(reject: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reject)
    def _reject_removed_config_keys(param_dict: dict[str, Any]) -> Any:
        from deepspeed_ext.config.section import without_removed

        return reject(without_removed(param_dict))

    return _reject_removed_config_keys


def check_our_keys(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        from deepspeed_ext.config.implied_stage import refuse_unread_stage
        from deepspeed_ext.config.section import SECTION, check_config, our_keys
        from deepspeed_ext.integration.support import require

        try:
            init(self, config, mpu, mesh_device)
        except Exception:
            # The reason may be that this DeepSpeed is not the one that we patch: then say that instead.
            if our_keys(getattr(self, "_param_dict", {}).get(SECTION)):
                require()
            raise
        check_config(self, mpu, mesh_device)
        if our_keys(self._param_dict.get(SECTION)):
            refuse_unread_stage(self)

    return __init__
