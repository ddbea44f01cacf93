# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gives every configuration of ZeRO that has none of our keys the strategy that corresponds to its stage. ``autoload``
is an entry point of ``torch.backends``, as the package's own: it runs in every process that imports torch, be it
started by pytest, a fork server, ``spawn`` or a launcher, on both sides. Forcing wraps rows of the package's patch
list, before the package applies them."""

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

FORCED = "UPSTREAM_FORCED"  # as JSON: strategies by stage, the group size, and where optimizers are noted
_CONFIG = "deepspeed.runtime.config:get_zero_config"
_OPTIMIZER = "deepspeed.runtime.engine:DeepSpeedEngine._configure_zero_optimizer"


def autoload() -> None:
    """Let tests that compare with DistributedDataParallel run on a CPU, and force our classes where that is asked."""
    from torch.nn.parallel import DistributedDataParallel

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


def force() -> None:
    """Wrap the two patches through which a strategy is asked for and made; RuntimeError without them, or too late."""
    from deepspeed_ext.integration import patcher, patches

    wrap = {_CONFIG: _forcing, _OPTIMIZER: _noting}
    due = {patch.target: patch for patch in patches.PATCHES if patch.target in wrap and patch.replace}
    if set(due) != set(wrap) or any(patch.path in patcher._applied for patch in due.values()):
        raise RuntimeError(f"expected patches of {', '.join(wrap)} that are not applied yet, got {list(due)}")
    patches.PATCHES = tuple(
        replace(patch, replace=wrap[patch.target](patch.replace)) if patch.target in due else patch
        for patch in patches.PATCHES
    )


def with_strategy(section: Any, strategies: Mapping[str, str], group_size: int | None, ranks: int | None) -> Any:
    """Return a raw ``zero_optimization`` section with the strategy of its stage, unless it is not plain ZeRO of one of
    them; with one group if ``group_size`` does not divide the ranks, which are None if nobody knows them yet."""
    from deepspeed_ext.config.keys import GROUP_SIZE, STRATEGY, our_keys
    from deepspeed_ext.strategy import STRATEGIES

    if not isinstance(section, Mapping) or our_keys(section) or str(section.get("stage")) not in strategies:
        return section
    strategy = strategies[str(section["stage"])]
    forced = {**section, STRATEGY: strategy, "stage": STRATEGIES[strategy].stage}
    if group_size is not None and ranks is not None:
        forced[GROUP_SIZE] = group_size if ranks % group_size == 0 else ranks
    return forced


def _forcing(make: Callable[..., Any]) -> Callable[..., Any]:
    forced = json.loads(os.environ[FORCED])

    def replacement(get_zero_config: Callable[..., Any], require: Callable[[], None]) -> Callable[..., Any]:
        parse = make(get_zero_config, require)

        @functools.wraps(get_zero_config)
        def get(param_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            from deepspeed import comm as dist

            ranks = dist.get_world_size() if dist.is_initialized() else None
            section = param_dict.get("zero_optimization")
            chosen = with_strategy(section, forced["strategies"], forced["group_size"], ranks)
            return parse(param_dict if chosen is section else {**param_dict, "zero_optimization": chosen})

        return get

    return replacement


def _noting(make: Callable[..., Any]) -> Callable[..., Any]:
    notes = json.loads(os.environ[FORCED])["notes"]

    def replacement(configure: Callable[..., Any]) -> Callable[..., Any]:
        created = make(configure)

        @functools.wraps(configure)
        def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
            from deepspeed_ext.config.section import active_strategy

            configured = created(self, optimizer)
            strategy = active_strategy(self._config)
            if strategy is not None:
                with open(notes, "a", encoding="utf-8") as file:
                    file.write(f"{strategy.name}\n")
            return configured

        return _configure_zero_optimizer

    return replacement
