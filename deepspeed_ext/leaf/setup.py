# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the leaf modules of an engine's model when its optimizer is made, and reports them."""

from collections.abc import Callable

from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import log_dist, logger
from deepspeed.utils.logging import print_dist
from deepspeed.utils.z3_leaf_module import _fully_qualified_class_name
from torch import nn

from deepspeed_ext.config.keys import LEAF_BYTES, MOST_LIVE, SECTION, THRESHOLD
from deepspeed_ext.deepspeed_types import ZeroConfig
from deepspeed_ext.leaf import report as leaf_report
from deepspeed_ext.leaf.modules import (
    LeafKind,
    ModuleChoice,
    Settings,
    can_have_windows,
    choose,
    default_budget,
    expert_bytes,
    experts_of,
    set_leaves,
    unit_bytes,
)


def by_budget(zero_config: ZeroConfig, model: nn.Module) -> list[ModuleChoice] | None:
    """Choose and flag leaf modules by the configured budget, and log them on rank 0.

    Returns None if the parsed ``zero_optimization`` has no budget.

    Raises:
        ValueError: the budget is smaller than what must be fetched at once.
    """
    if not getattr(zero_config, LEAF_BYTES, 0):
        return None
    settings, live = settings_and_live(zero_config, model)
    _drop_defaults(zero_config, model)
    return _set_up(model, settings, live)


def settings_and_live(zero_config: ZeroConfig, model: nn.Module) -> tuple[Settings, leaf_report.LiveLimits]:
    """Return the settings of a parsed ``zero_optimization``: how to choose, and ZeRO-3's other bounds.

    Raises:
        ValueError: the budget is smaller than what must be fetched at once.
    """
    asked, most_live = getattr(zero_config, LEAF_BYTES, 0), int(zero_config.max_live_parameters)
    budget: int | None = None
    if asked is True:
        budget = default_budget(model, most_live)
    elif asked:
        budget = int(asked)
        _refuse_too_small(budget, model, most_live)
    live = leaf_report.LiveLimits(
        most_live,
        int(zero_config.prefetch_bucket_size),
        int(zero_config.max_reuse_distance),
        int(zero_config.param_persistence_threshold),
    )
    return Settings(budget, int(zero_config.module_granularity_threshold), most_live), live


def by_granularity(offload: DeepSpeedZeRoOffload, model: nn.Module, threshold: int) -> list[ModuleChoice]:
    """Choose and flag leaf modules by a threshold, when DeepSpeed would: as a ``DeepSpeedZeRoOffload`` is made."""
    live = leaf_report.LiveLimits(
        offload._max_available_parameters_in_numel,
        offload._prefetch_bucket_sz,
        offload._max_reuse_distance_in_numel,
        offload.param_numel_persistence_threshold,
    )
    # Printed, not logged: DeepSpeed printed its table, too, until that came to depend on a flag that nothing sets.
    return _set_up(model, Settings(None, int(threshold), live.most), live, print_dist)


def _set_up(
    model: nn.Module, settings: Settings, live: leaf_report.LiveLimits, show: Callable[..., None] = log_dist
) -> list[ModuleChoice]:
    found = choose(model, settings)
    set_leaves(found)
    show(f"deepspeed_ext: {leaf_report.text(found, model, settings, live)}", ranks=[0])
    _warn(found, settings)
    return found


def _refuse_too_small(budget: int, model: nn.Module, most_live: int) -> None:
    """Refuse a budget below what one module holds itself, since that is fetched at once."""
    name, module = max(model.named_modules(), key=lambda item: _least_bytes(item[1]))
    own = {f"{name}.{key}".lstrip("."): unit_bytes([param]) for key, param in module.named_parameters(recurse=False)}
    needed = _least_bytes(module)
    if budget >= needed:
        return
    if can_have_windows(module):
        raise ValueError(
            f"{SECTION}.{LEAF_BYTES} must be at least the bytes of one expert, gathered and with its gradient: one of "
            f"the {module.num_experts} packed experts of {name} needs {needed:,}, got {budget:,}. Raise it, or set it "
            f"to true for the budget that {SECTION}.{MOST_LIVE} gives ({default_budget(model, most_live):,})."
        )
    largest = max(own, key=lambda key: own[key])
    others = f"; with the others of {name or 'the model'} {needed:,}" if len(own) > 1 else ""
    raise ValueError(
        f"{SECTION}.{LEAF_BYTES} must be at least the bytes of the largest parameter, gathered and with its gradient: "
        f"{largest} needs {own[largest]:,}{others}, got {budget:,}. Raise it, or set it to true for the budget that "
        f"{SECTION}.{MOST_LIVE} gives ({default_budget(model, most_live):,})."
    )


def _least_bytes(module: nn.Module) -> int:
    """Return the bytes that a module must fetch at once: of one packed expert, or of all parameters that it holds."""
    return expert_bytes(module) or unit_bytes(module.parameters(recurse=False))


def _drop_defaults(zero_config: ZeroConfig, model: nn.Module) -> None:
    """Unset leaf modules from DeepSpeed's default list, so that the choice is free. A list of the user's stays."""
    if zero_config.leaf_module.classes == DEFAULT_LEAF_MODULE_CLASSES:
        for module in model.modules():
            if _fully_qualified_class_name(module) in DEFAULT_LEAF_MODULE_CLASSES:
                module.__dict__.pop("_z3_leaf", None)


def _warn(found: list[ModuleChoice], settings: Settings) -> None:
    """Warn on rank 0 if a threshold has no effect, a module exceeds the budget, or experts are fetched one by one."""
    from deepspeed import comm as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if settings.budget is None and not any(one.kind == LeafKind.UNIT for one in found):
        able = [one for one in found if one.granularity is not None and one.why == "above the threshold"]
        least = min(able, key=lambda one: one.granularity or 0, default=None)
        hint = (
            f"the smallest granularity is {least.granularity:,} ({type(least.module).__name__} {least.name})"
            if least
            else "no module of this model can be one"
        )
        logger.warning(
            f"deepspeed_ext: {SECTION}.{THRESHOLD} {settings.threshold:,} makes no module a unit: {hint}. "
            f"{SECTION}.{LEAF_BYTES} true chooses without a number."
        )
    budget = settings.budget
    alone = [one for one in found if one.kind not in (LeafKind.INSIDE, LeafKind.WINDOWED)]
    own = [one for one in alone if budget and _own_bytes(one) > budget]
    if own and budget:
        first = max(own, key=_own_bytes)
        logger.warning(
            f"deepspeed_ext: {len(own)} module(s) hold more parameters themselves than a unit may, for example "
            f"{type(first.module).__name__} {first.name} ({_own_bytes(first):,} bytes, budget {budget:,}): "
            f"they are fetched at once anyway ({first.why})."
        )
    split = [one for one in found if one.kind == LeafKind.FINE and experts_of(one.module)]
    if split:
        first = split[0]
        logger.warning(
            f"deepspeed_ext: {len(split)} module(s) that look like mixtures of experts are not fetched as one, for "
            f"example {type(first.module).__name__} {first.name} ({first.why}): ranks that use different experts "
            f"would wait for one another. Raise the budget or the threshold, or set it as a leaf module."
        )


def _own_bytes(one: ModuleChoice) -> int:
    """Return the bytes, as a unit, of the parameters that a module holds itself."""
    return unit_bytes(one.module.parameters(recurse=False))
