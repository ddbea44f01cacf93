# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the leaf modules of an engine's model when its optimizer is made, and logs the choice as a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import log_dist, logger
from deepspeed.utils.logging import print_dist
from deepspeed.utils.z3_leaf_module import _fully_qualified_class_name
from torch import nn

from deepspeed_ext.config.keys import LEAF_BYTES, MAX_LIVE, SECTION, THRESHOLD
from deepspeed_ext.console import log_on_rank_0
from deepspeed_ext.deepspeed_types import ZeroConfig
from deepspeed_ext.leaf.modules import (
    HOOKS_PER_MODULE,
    LeafKind,
    ModuleChoice,
    Settings,
    choose,
    default_budget,
    default_settings,
    expert_bytes,
    experts_of,
    has_window_experts,
    is_set_by_choice,
    is_set_by_user,
    numel_of,
    set_leaves,
    unit_bytes,
)

_FETCHED = {
    LeafKind.UNIT.value: "as one",
    LeafKind.CHUNKED.value: "in {}",
    LeafKind.WINDOWED.value: "in {}",
    LeafKind.FINE.value: "one by one: {}",
}


class ClassSummary(NamedTuple):
    """The modules of one class that are fetched in the same way, for the same reason."""

    cls: str
    modules: int
    numel: int  # of the largest module
    granularity: int | None  # of the largest module
    bytes: int  # of the largest module, as a unit
    kind: str
    why: str


@dataclass(frozen=True)
class LiveLimits:
    """ZeRO-3's limits of the parameters that are gathered at a time, all in elements."""

    most_live: int  # stage3_max_live_parameters
    prefetch: int  # stage3_prefetch_bucket_size
    reuse: int  # stage3_max_reuse_distance
    persistence: int  # stage3_param_persistence_threshold


def choose_by_budget(zero_config: ZeroConfig, model: nn.Module) -> list[ModuleChoice] | None:
    """Choose and flag leaf modules by the configured or the default budget, and log them on rank 0.

    Called with p = I or G. Returns None without a budget; see ``settings_and_live``.

    Raises:
        ValueError: the budget is smaller than the parameters that must be fetched at once.
    """
    settings, live = settings_and_live(zero_config, model)
    if settings.budget is None:
        return None
    if settings.is_default:
        return _choose_default(model, settings)
    _drop_defaults(zero_config, model)
    return _choose_and_flag(model, settings, live)


def settings_and_live(zero_config: ZeroConfig, model: nn.Module) -> tuple[Settings, LiveLimits]:
    """Return the settings of a parsed ``zero_optimization``: criteria of the choice, and ZeRO-3's limits.

    There is a budget without a key of ours, too, unless the user has set leaf modules in another way.

    Raises:
        ValueError: the budget is smaller than the parameters that must be fetched at once.
    """
    budget_key, most_live = getattr(zero_config, LEAF_BYTES, 0), int(zero_config.max_live_parameters)
    settings = Settings(None, int(zero_config.module_granularity_threshold), most_live)
    if budget_key is None and not settings.threshold and not _has_user_leaves(zero_config, model):
        settings = default_settings(model, most_live)
    elif budget_key is True:
        settings = replace(settings, budget=default_budget(model, most_live))
    elif budget_key:
        settings = replace(settings, budget=int(budget_key))
        _refuse_too_small(int(budget_key), model, most_live)
    live = LiveLimits(
        most_live,
        int(zero_config.prefetch_bucket_size),
        int(zero_config.max_reuse_distance),
        int(zero_config.param_persistence_threshold),
    )
    return settings, live


def _has_user_leaves(zero_config: ZeroConfig, model: nn.Module) -> bool:
    """Return whether the user has set leaf modules: by ``leaf_module``, or by ``set_z3_leaf_modules``."""
    return "leaf_module" in zero_config.model_fields_set or any(
        is_set_by_user(module) and _fully_qualified_class_name(module) not in DEFAULT_LEAF_MODULE_CLASSES
        for module in model.modules()
    )


def _choose_default(model: nn.Module, settings: Settings) -> list[ModuleChoice]:
    """Choose and flag leaf modules without a key, and log them in one line."""
    choices = choose(model, settings)
    set_leaves(choices)
    flagged = [choice for choice in choices if is_set_by_choice(choice.module)]
    rows = [row for row in summaries(flagged) if row.kind == LeafKind.UNIT.value]
    if rows:
        classes = ", ".join(f"{row.modules} {row.cls} (up to {row.numel:,} parameters each)" for row in rows)
        log_on_rank_0(
            f"fetched as one unit each, of at most {settings.budget:,} bytes: {classes}. "
            f"Set {SECTION}.{LEAF_BYTES} to 0 to turn this off, or to true for larger units and mixtures of experts."
        )
    return choices


def choose_by_granularity(offload: DeepSpeedZeRoOffload, model: nn.Module, threshold: int) -> list[ModuleChoice]:
    """Choose and flag leaf modules by a threshold, while a ``DeepSpeedZeRoOffload`` is made, as DeepSpeed does."""
    live = LiveLimits(
        offload._max_available_parameters_in_numel,
        offload._prefetch_bucket_sz,
        offload._max_reuse_distance_in_numel,
        offload.param_numel_persistence_threshold,
    )
    # Printed, not logged: DeepSpeed printed its table, too, until it made that depend on a flag that nothing sets.
    return _choose_and_flag(model, Settings(None, int(threshold), live.most_live), live, print_dist)


def _choose_and_flag(
    model: nn.Module, settings: Settings, live: LiveLimits, log: Callable[..., None] = log_dist
) -> list[ModuleChoice]:
    choices = choose(model, settings)
    set_leaves(choices)
    log(f"deepspeed_ext: {choice_table(choices, model, settings, live)}", ranks=[0])
    _warn_about_choices(choices, settings)
    return choices


def _refuse_too_small(budget: int, model: nn.Module, most_live: int) -> None:
    """Refuse a budget below a module's own parameters, which are fetched at once."""
    name, module = max(model.named_modules(), key=lambda item: _least_bytes(item[1]))
    sizes = {f"{name}.{key}".lstrip("."): unit_bytes([param]) for key, param in module.named_parameters(recurse=False)}
    needed = _least_bytes(module)
    if budget >= needed:
        return
    if has_window_experts(module):
        raise ValueError(
            f"{SECTION}.{LEAF_BYTES} must be at least the bytes of one expert, gathered and with its gradient: one of "
            f"the {module.num_experts} packed experts of {name} needs {needed:,}, got {budget:,}. Raise it, or set it "
            f"to true for the budget that {SECTION}.{MAX_LIVE} gives ({default_budget(model, most_live):,})."
        )
    largest = max(sizes, key=lambda key: sizes[key])
    others = f"; with the others of {name or 'the model'} {needed:,}" if len(sizes) > 1 else ""
    raise ValueError(
        f"{SECTION}.{LEAF_BYTES} must be at least the bytes of the largest parameter, gathered and with its gradient: "
        f"{largest} needs {sizes[largest]:,}{others}, got {budget:,}. Raise it, or set it to true for the budget that "
        f"{SECTION}.{MAX_LIVE} gives ({default_budget(model, most_live):,})."
    )


def _least_bytes(module: nn.Module) -> int:
    """Return the bytes that a module must fetch at once: one packed expert, or all its own parameters."""
    return expert_bytes(module) or unit_bytes(module.parameters(recurse=False))


def _drop_defaults(zero_config: ZeroConfig, model: nn.Module) -> None:
    """Unset leaf modules from DeepSpeed's default list, so that the choice is free. A user's list is kept."""
    if zero_config.leaf_module.classes == DEFAULT_LEAF_MODULE_CLASSES:
        for module in model.modules():
            if _fully_qualified_class_name(module) in DEFAULT_LEAF_MODULE_CLASSES:
                module.__dict__.pop("_z3_leaf", None)


def _warn_about_choices(choices: list[ModuleChoice], settings: Settings) -> None:
    """Warn on rank 0 if a threshold has no effect, a module exceeds the budget, or experts are fetched one by one."""
    from deepspeed import comm as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if settings.budget is None and not any(choice.kind == LeafKind.UNIT for choice in choices):
        candidates = [
            choice for choice in choices if choice.granularity is not None and choice.why == "above the threshold"
        ]
        smallest = min(candidates, key=lambda choice: choice.granularity or 0, default=None)
        hint = (
            f"the smallest granularity is {smallest.granularity:,} ({type(smallest.module).__name__} {smallest.name})"
            if smallest
            else "no module of this model can be one"
        )
        logger.warning(
            f"deepspeed_ext: {SECTION}.{THRESHOLD} {settings.threshold:,} makes no module a unit: {hint}. Set "
            f"{SECTION}.{LEAF_BYTES} to true to choose units without a number."
        )
    budget = settings.budget
    fetched_apart = [choice for choice in choices if choice.kind not in (LeafKind.INSIDE, LeafKind.WINDOWED)]
    oversized = [choice for choice in fetched_apart if budget and _own_bytes(choice) > budget]
    if oversized and budget:
        example = max(oversized, key=_own_bytes)
        logger.warning(
            f"deepspeed_ext: the own parameters of {len(oversized)} module(s) are larger than a unit may be, for "
            f"example {type(example.module).__name__} {example.name} ({_own_bytes(example):,} bytes, budget "
            f"{budget:,}): they are fetched at once anyway ({example.why})."
        )
    mixtures = [choice for choice in choices if choice.kind == LeafKind.FINE and experts_of(choice.module)]
    if mixtures:
        example = mixtures[0]
        logger.warning(
            f"deepspeed_ext: {len(mixtures)} module(s) that look like mixtures of experts are not fetched as a unit, "
            f"for example {type(example.module).__name__} {example.name} ({example.why}): ranks that use different "
            f"experts would wait for one another. Raise the budget or the threshold, or set it as a leaf module."
        )


def _own_bytes(choice: ModuleChoice) -> int:
    """Return the bytes, as a unit, of a module's own parameters."""
    return unit_bytes(choice.module.parameters(recurse=False))


def summaries(choices: Sequence[ModuleChoice]) -> list[ClassSummary]:
    """Return one summary for each class, kind and reason, in the order of the model, without modules inside units."""
    groups: dict[tuple[str, str, str], list[ModuleChoice]] = {}
    for choice in choices:
        if choice.kind != LeafKind.INSIDE:
            why = "" if choice.kind == LeafKind.UNIT else choice.why
            if choice.chunks:
                why = f"{len(choice.chunks)} windows of experts; {choice.why}"
            if choice.windows:
                why = f"{len(choice.windows)} windows of at most {len(choice.windows[0])} experts; {choice.why}"
            groups.setdefault((type(choice.module).__name__, choice.kind.value, _general(why)), []).append(choice)
    table = []
    for (cls, kind, why), members in groups.items():
        largest = max(members, key=lambda choice: choice.numel)
        table.append(
            ClassSummary(cls, len(members), largest.numel, largest.granularity, largest.bytes, kind=kind, why=why)
        )
    return table


def _general(why: str) -> str:
    """Return a reason without names that differ between modules of one class."""
    return why if " " not in why or why.split(" ", 1)[0].count(".") == 0 else f"a module in it {why.split(' ', 1)[1]}"


def hooks(choices: Sequence[ModuleChoice], model: nn.Module) -> tuple[int, int]:
    """Return the number of hooks on modules before and after the choice.

    DeepSpeed has four on each module that is not inside a leaf module.
    """
    modules = sum(1 for _ in model.modules())
    coarse = [choice.module for choice in choices if choice.kind in (LeafKind.UNIT, LeafKind.WINDOWED)]
    coarse += [expert for choice in choices for chunk in choice.chunks for expert in chunk]
    inside = sum(sum(1 for _ in module.modules()) - 1 for module in coarse)
    return HOOKS_PER_MODULE * modules, HOOKS_PER_MODULE * (modules - inside)


def predicted_live(choices: Sequence[ModuleChoice], model: nn.Module, live: LiveLimits) -> int:
    """Return an upper bound of the elements that are gathered at a time.

    These are persistent parameters, parameters in use, prefetched ones (full units that begin within the prefetch
    bucket), and those kept because they are used again within the reuse distance (full units, too).
    """
    total = sum(numel_of(p) for p in model.parameters())
    packed = {id(p) for choice in choices if choice.windows for p in choice.module.parameters()}  # they do not persist
    persistent = sum(
        numel_of(p) for p in model.parameters() if numel_of(p) <= live.persistence and id(p) not in packed
    )
    fetched = [choice.numel for choice in choices if choice.kind == LeafKind.UNIT]
    for choice in choices:
        if choice.kind == LeafKind.FINE:
            fetched.append(sum(map(numel_of, choice.module.parameters(recurse=False))))
        elif choice.kind == LeafKind.CHUNKED:  # a window stays while other parameters are fetched
            chunks = [sum(numel_of(p) for expert in chunk for p in expert.parameters()) for chunk in choice.chunks]
            fetched.append(max(chunks) + choice.numel - sum(chunks))
        elif choice.kind == LeafKind.WINDOWED:  # the window in use, and the next one
            window = choice.numel // sum(map(len, choice.windows)) * len(choice.windows[0])
            fetched.append(min(choice.numel, 2 * window))
    largest = max(fetched, default=0)
    prefetched = min(live.prefetch, live.most_live) + largest if live.prefetch else 0
    reused = live.reuse + largest if live.reuse else 0
    return min(total, persistent + largest + prefetched + reused)


def choice_table(choices: Sequence[ModuleChoice], model: nn.Module, settings: Settings, live: LiveLimits) -> str:
    """Return the choice of leaf modules as text: a row for each class, hooks, and the parameters live at a time."""
    criterion = (
        f"granularity up to {settings.threshold:,}, at most {settings.most_live:,} parameters"
        if settings.budget is None
        else f"at most {settings.budget:,} bytes in a unit"
    )
    lines = [
        f"leaf modules of {type(model).__name__}: {criterion}",
        f"  {'class':<32} {'count':>6} {'parameters':>15} {'granularity':>13} {'bytes as unit':>17}  fetched",
    ]
    for row in summaries(choices):
        granularity = "" if row.granularity is None else f"{row.granularity:,}"
        fetched = _FETCHED[row.kind].format(row.why)
        lines.append(
            f"  {row.cls:<32.32} {row.modules:>6} {row.numel:>15,} {granularity:>13} {row.bytes:>17,}  {fetched}"
        )
    before, after = hooks(choices, model)
    fewer = f" ({1 - after / before:.1%} fewer)" if before else ""
    lines.append(f"  hooks on modules: {before:,} before, {after:,} after{fewer}")
    lines.append(f"  parameters gathered at a time: at most {predicted_live(choices, model, live):,} predicted")
    return "\n".join(lines)
