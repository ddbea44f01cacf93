# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where our keys arrive, and errors come from.

``require`` raises if this DeepSpeed is not one that we know; the patcher and the hooks of a fork pass it.
"""

import functools
import os
from collections.abc import Callable
from typing import Any


def parse_our_keys(
    get_zero_config: Callable[..., Any], require: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    @functools.wraps(get_zero_config)
    def parse(param_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        from deepspeed_ext.config.implied_stage import forget_stage
        from deepspeed_ext.config.keys import SECTION, our_keys
        from deepspeed_ext.config.validate import check_top_level

        check_top_level(param_dict)
        section: Any = param_dict.get(SECTION)
        forget_stage(section)
        if not our_keys(section):  # nothing until here knows DeepSpeed
            return get_zero_config(param_dict, *args, **kwargs)
        require()
        from deepspeed_ext.config.section import parse_and_imply

        return parse_and_imply(section)

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
        from deepspeed_ext.config.keys import REPORT, SECTION, our_keys
        from deepspeed_ext.config.report import VARIABLE
        from deepspeed_ext.integration import plugins

        if isinstance(config, dict):
            plugins.configure(config)
        try:
            init(self, config, mpu, mesh_device)
        except Exception:
            # The reason may be that this DeepSpeed is not the one that we patch: then say that instead.
            if our_keys(getattr(self, "_param_dict", {}).get(SECTION)):
                require()
            raise
        if our_keys(self._param_dict.get(SECTION)):
            from deepspeed_ext.config.check import check_config

            check_config(self, mpu, mesh_device)
            if getattr(self.zero_config, REPORT, None) is not None:
                plugins.require("report", f"{SECTION}.{REPORT}")
        if VARIABLE in os.environ:
            plugins.require("report", VARIABLE)

    return __init__
