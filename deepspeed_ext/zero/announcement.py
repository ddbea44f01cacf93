# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Log lines on rank 0 about the strategy of an engine: groups, and memory that is too small."""

import logging
from collections.abc import Sequence

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist

from deepspeed_ext.comm.process_groups import ranks_per_node
from deepspeed_ext.config.keys import GROUP_SIZE, MODULES, OVERLAP_UPDATES, SECTION, STRATEGY
from deepspeed_ext.config.model import PLAIN
from deepspeed_ext.config.settings import OuterSettings
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.leaf.modules import numel_of
from deepspeed_ext.model_bytes import states_on_device, whole_bytes
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement, Strategy, hyphenate
from deepspeed_ext.version import __version__
from deepspeed_ext.zero.families import DENSE, Topologies, experts_of, states_of_families
from deepspeed_ext.zero.module_placements import placed_parameters, shorten

_PLACED = {Placement.N: "whole on each rank", Placement.I: "sharded within each group"}


def log_strategy(
    strategy: Strategy,
    topologies: Topologies,
    engine: Engine,
    *,
    changed_defaults: Sequence[str],
    outer: OuterSettings | None,
) -> None:
    """Log one line on rank 0: versions, strategy, groups, and the equivalent plain stage, if any.

    The level is WARNING, because DeepSpeed hides INFO, and on one node, a common first try, most strategies are a
    plain stage. If the planner has chosen the strategy, it logs its own warning, and this line is INFO.

    Args:
        changed_defaults: DeepSpeed's defaults that have been changed.
        outer: settings of the outer optimizer, if there is one.
    """
    topology = topologies[DENSE]
    chosen = getattr(engine._config, "strategy_was_chosen", False)
    n, m, k = topology.sizes.ranks, topology.sizes.group_size, topology.sizes.groups
    compressed = engine._config.zero_config.zeropp_loco_param is not None
    defaults = f" (defaults changed: {', '.join(changed_defaults)})" if changed_defaults else ""
    if engine._config.zero_config.paro_overlap_updates and strategy.p == strategy.os:
        defaults += f"; {SECTION}.{OVERLAP_UPDATES} has no effect: with p = os no parameters are sent after a step"
    hint = getattr(engine, "layout_hint", lambda *placed: "")(strategy, topology)  # pipelines only
    log_dist(
        f"deepspeed_ext {__version__} on DeepSpeed {deepspeed.__version__}: {strategy} "
        f"(p={strategy.p.name}, g={strategy.g.name}, os={strategy.os.name}; stage {strategy.stage}) "
        f"over {n} data-parallel ranks in {k} group(s) of {m}{_equivalent_stage(strategy, topology.sizes, compressed)}"
        f"{''.join(_experts_text(name, topologies[name].sizes) for name in experts_of(topologies))}{hint}"
        f"{_outer_text(outer)}{'' if strategy.p == Placement.N else _modules_text(engine, topology.sizes)}"
        f"{defaults}",
        ranks=[0],
        level=logging.INFO if chosen else logging.WARNING,
    )


def _equivalent_stage(strategy: Strategy, sizes: GroupSizes, compressed: bool) -> str:
    """Describe the equivalent of a strategy if there is one group, or groups are one rank; else nothing."""
    n, m = sizes.ranks, sizes.group_size
    if 1 < m < n:
        return ""
    groups = "one group" if m == n else "groups of one rank"
    size = f"({SECTION}.{GROUP_SIZE} is {m})"
    name = strategy.name.replace(Placement.I.name, (Placement.G if m == n else Placement.N).name)
    plain = PLAIN.get(name, hyphenate(name))
    uncompressed = ", and there are no messages between groups to compress" if compressed and m == n else ""
    equivalent = f", so {strategy} is {plain} here" if plain != str(strategy) else ""
    return f": {groups}{equivalent}{uncompressed} {size}"


def _experts_text(name: str, sizes: GroupSizes) -> str:
    """Describe the groups of a family of experts."""
    small = ", so I is N for them" if sizes.group_size == 1 else ""
    return f"; experts of {name} over {sizes.ranks} in {sizes.groups} group(s) of {sizes.group_size}{small}"


def _outer_text(settings: OuterSettings | None) -> str:
    """Describe an outer optimizer."""
    if settings is None:
        return ""
    values = ", ".join(f"{name} {value}" for name, value in settings.as_dict().items() if name != "steps")
    return f"; groups train independently, with an outer step every {settings.steps} steps ({values})"


def _modules_text(engine: Engine, sizes: GroupSizes) -> str:
    """Describe the parameters with a placement of their own."""
    patterns, text = engine._config.zero_config.paro_modules or {}, ""
    for placement, placed in _PLACED.items():
        if params := placed_parameters(engine.module, placement):
            named = f'"{patterns}"'
            if not isinstance(patterns, str):
                named = shorten([pattern for pattern, letter in patterns.items() if letter == placement.name])
            text += (
                f"; {placed} ({MODULES} {named}): {sum(map(numel_of, params)):,} parameters, "
                f"{whole_bytes(engine, params) / sizes.shards(placement) / 1e9:.3g} GB"
            )
    return text


def warn_if_too_large(strategy: Strategy, topologies: Topologies, engine: Engine) -> None:
    """Warn on rank 0 if the model states of a rank exceed its device's memory by the formula."""
    available = get_accelerator().total_memory()
    if get_accelerator().device_name() == "cpu":
        available /= ranks_per_node() or 1
    topology = topologies[DENSE]
    parts, model, sizes = states_of_families(topologies, engine), engine.module, topology.sizes
    whole = whole_bytes(engine, placed_parameters(model, Placement.N))
    grouped = states_on_device(engine, placed_parameters(model, Placement.I)).parameters

    def total(row: Strategy) -> float:
        states_of_rank = sum(row.memory(sizes, states).total for sizes, states in parts)
        coarser = grouped / sizes.group_size - grouped / sizes.ranks if row.p == Placement.G else 0.0
        return states_of_rank + coarser + (whole if row.p != Placement.N else 0.0)

    needed = total(strategy)
    if needed <= available:
        return
    fits = [str(row) for row in STRATEGIES.values() if total(row) <= available]
    p, g, os = (
        sum(getattr(states, part) for _, states in parts) / 1e9 for part in ("parameters", "gradients", "optimizer")
    )
    warn_on_rank_0(
        f"{SECTION}.{STRATEGY} {strategy} needs {needed / 1e9:.3g} GB of model states on each "
        f"rank, which has {available / 1e9:.3g} GB (the model's parameters {p:.3g} GB, gradients {g:.3g} GB, and "
        f"optimizer states {os:.3g} GB, over {sizes.ranks} ranks in groups of "
        f"{sizes.group_size}). Strategies that fit: {', '.join(fits) or 'none'}."
    )
