# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Our keys of the ``zero_optimization`` section, and every reason to refuse one.

A section in which ``our_keys`` finds none is not read here: DeepSpeed parses it with its own class.
"""

import copy
import difflib
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.data_parallel import refuse_mesh, sharding_ranks
from deepspeed_ext.config.refused import REFUSED, SECTION
from deepspeed_ext.loco.settings import LocoSettings
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement, Strategy, parse_strategy

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

STRATEGY = "paro_strategy"
GROUP_SIZE = "paro_group_size"
FASTEST = "fastest"  # as a strategy: decide when the model is known
MEMORY = "paro_memory_gb"
DECISION = "paro_decision_file"
KEYS = (STRATEGY, GROUP_SIZE)
OF_FASTEST = (MEMORY, DECISION)
MICS_SIZE = "mics_shard_size"
MICS_HIERARCHICAL = "mics_hierarchical_params_gather"
MICS_KEYS = (MICS_SIZE, MICS_HIERARCHICAL)  # DeepSpeed's own until 0.19.6
LOCO = "zeropp_loco_param"  # as well
LEAF_BYTES = "stage3_leaf_bytes"
THRESHOLD = "stage3_module_granularity_threshold"  # DeepSpeed's
MOST_LIVE = "stage3_max_live_parameters"  # as well
QUANTIZED = "zero_quantized_gradients"  # DeepSpeed's, for stage 3; with a strategy ours
_REMOVED = (*MICS_KEYS, LOCO)
_OF_STAGE = {1: "NNG", 2: "NGG", 3: "GGG"}  # the strategy that is a stage of DeepSpeed's
DECISION_FILE = "paro_decision.json"
_PREFIXES = ("paro", "stage3_leaf")
_OURS = (*KEYS, *OF_FASTEST, LEAF_BYTES)


# By id: sections into which we have written the stage that was left out, and what it was. They are kept, so that no
# other dictionary gets the id. The stage itself is a plain number, for it is saved with checkpoints.
_implied: dict[int, tuple[Mapping[str, Any], int]] = {}


def imply(section: dict[str, Any], stage: int) -> None:
    """Write a stage into a raw section that leaves it out, such that the next reader may imply another one."""
    section["stage"] = stage
    _implied[id(section)] = (section, stage)


def is_implied(section: Mapping[str, Any]) -> bool:
    """Whether the stage of a raw section was written by us."""
    known, stage = _implied.get(id(section), (None, None))
    return known is section and section.get("stage") == stage


def as_written(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a raw section as its user has written it."""
    return {key: value for key, value in section.items() if key != "stage" or not is_implied(section)}


def our_keys(section: Any) -> list[str]:
    """Keys of the section that are meant for us, misspelt ones included."""
    if not isinstance(section, Mapping):
        return []
    return [key for key in section if str(key).lower().startswith(_PREFIXES) or key in _REMOVED]


def without_removed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration without the keys of MiCS and LoCo, which DeepSpeed would reject as removed."""
    section = config.get(SECTION)
    if not isinstance(section, Mapping) or not set(_REMOVED) & set(section):
        return config
    return {**config, SECTION: {key: value for key, value in section.items() if key not in _REMOVED}}


def with_loco(section: Mapping[str, Any]) -> dict[str, Any]:
    """A raw section in which LoCo's key says all about it, and with a strategy: if none is given that of the stage.

    Raises:
        ValueError: the key's value is wrong, contradicts ``zero_quantized_gradients``, or nothing says what is cut.
    """
    section = dict(section)
    quantized = section.pop(QUANTIZED, None)
    if LOCO not in section:
        return {**section, LOCO: {"error_feedback": False}} if quantized else section
    LocoSettings.parse(section[LOCO])
    if quantized is False:
        raise ValueError(
            f"{SECTION}.{LOCO} implies {SECTION}.{QUANTIZED}, which is set to false. Remove one of the two."
        )
    if STRATEGY in section:
        return section
    stage = section.get("stage")
    if isinstance(stage, bool) or stage not in (0, *_OF_STAGE):
        raise ValueError(
            f"{SECTION}.{LOCO} needs {SECTION}.stage 1, 2 or 3, or {SECTION}.{STRATEGY}, got stage {stage!r}."
        )
    return {**section, STRATEGY: _OF_STAGE.get(stage, "NNG")}


def with_leaf_bytes(section: Mapping[str, Any]) -> dict[str, Any]:
    """A raw section in which the budget of leaf modules, if it says anything, has a strategy: if none is given GGG.

    Raises:
        ValueError: the budget is no number of bytes, parameters are not cut, or the threshold is given as well.
    """
    section = dict(section)
    if LEAF_BYTES not in section:
        return section
    budget = section[LEAF_BYTES]
    if not isinstance(budget, int) or budget < 0:
        raise ValueError(
            f"{SECTION}.{LEAF_BYTES} must be a number of bytes (an integer of at least 0, 0 for off), or true for the "
            f"budget that {MOST_LIVE} gives, got {budget!r} of type {type(budget).__name__}."
        )
    if not budget:
        del section[LEAF_BYTES]
        return section
    threshold = section.get(THRESHOLD, 0)
    if threshold:
        raise ValueError(
            f"{SECTION}.{LEAF_BYTES} ({budget!r}) and {SECTION}.{THRESHOLD} ({threshold!r}) both choose leaf modules. "
            f"Remove one of the two."
        )
    stage = section.get("stage")
    if STRATEGY in section:
        given = section[STRATEGY]
        cut = not (isinstance(given, str) and given[:1].upper() == Placement.N.name)
        if cut:
            return section
        raise ValueError(
            f"{SECTION}.{LEAF_BYTES} needs parameters that are cut, but {STRATEGY} is {given!r}. Use a strategy with "
            f"p = I or G, or remove {LEAF_BYTES}."
        )
    if isinstance(stage, bool) or stage != 3:
        raise ValueError(
            f"{SECTION}.{LEAF_BYTES} needs {SECTION}.stage 3, or a {STRATEGY} with p = I or G, got stage {stage!r}."
        )
    return {**section, STRATEGY: _OF_STAGE[3]}


def leaf_bytes(zero_config: "DeepSpeedZeroConfig") -> int | bool:
    """The budget of leaf modules in a parsed section; false where there is none."""
    return getattr(zero_config, LEAF_BYTES, None) or False


def revive_mics(section: Mapping[str, Any]) -> dict[str, Any]:
    """A raw section with the keys of MiCS replaced by ours: III, with that group size.

    Raises:
        ValueError: no such size, or our own keys beside it.
    """
    revived = {key: value for key, value in section.items() if key not in MICS_KEYS}
    size, hierarchical = section.get(MICS_SIZE, -1), section.get(MICS_HIERARCHICAL, False)
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
        raise ValueError(
            f"{SECTION}.{MICS_SIZE} must be an integer of at least 1 (ranks over which model states are cut), or -1 "
            f"for off, got {size!r} of type {type(size).__name__}."
        )
    if size == -1:
        if hierarchical:
            raise ValueError(f"{SECTION}.{MICS_HIERARCHICAL} needs {SECTION}.{MICS_SIZE}; got only the first.")
        return revived
    given = [key for key in KEYS if key in section]
    if given:
        raise ValueError(
            f"{SECTION}.{MICS_SIZE} {size} means {STRATEGY} III with {GROUP_SIZE} {size}, but {', '.join(given)} is "
            f"set as well ({', '.join(repr(section[key]) for key in given)}). Keep one of the two."
        )
    if section.get("stage", 3) not in (0, 3):
        raise ValueError(f"{SECTION}.{MICS_SIZE} needs {SECTION}.stage 3, got {section['stage']!r}.")
    if hierarchical:
        from deepspeed.utils import log_dist

        log_dist(
            f"deepspeed_ext: {SECTION}.{MICS_HIERARCHICAL} is implied: parameters are gathered inside groups only",
            ranks=[0],
        )
    return {**revived, STRATEGY: "III", GROUP_SIZE: size}


def check_top_level(config: Mapping[str, Any]) -> None:
    """Refuse our keys outside their section, where DeepSpeed would ignore them.

    Raises:
        ValueError: one is there.
    """
    for key in our_keys(config):
        raise ValueError(f"{key!r} is at the top level of the configuration; it belongs into {SECTION}.")


def check_section(section: Mapping[str, Any]) -> Strategy | None:
    """Validate our keys of a raw ``zero_optimization`` section and return the strategy; None if it is the fastest.

    Raises:
        ValueError: unknown, missing, mistyped or contradicting values; one paragraph with what was expected, what
            was given and the key to change.
    """
    for key in our_keys(section):
        if key not in (*_OURS, LOCO):
            close = difflib.get_close_matches(str(key).lower(), _OURS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join((*_OURS, *_REMOVED))
            raise ValueError(f"{SECTION} has no key {key!r}: the keys of deepspeed_ext are {known}.{hint}")
    if STRATEGY not in section:
        alone = next(key for key in (GROUP_SIZE, *OF_FASTEST) if key in section)
        raise ValueError(
            f"{SECTION}.{alone} is set ({section[alone]!r}) without {SECTION}.{STRATEGY}: "
            f"add a strategy, one of {', '.join(STRATEGIES)}, or remove {alone}."
        )
    strategy = _parse_strategy(section)
    size = section.get(GROUP_SIZE)
    if GROUP_SIZE in section and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(
            f"{SECTION}.{GROUP_SIZE} must be an integer of at least 1 (ranks in a group), "
            f"got {size!r} of type {type(size).__name__}. Leave it out for the number of ranks per node."
        )
    stage = section.get("stage")
    if strategy is None:
        if isinstance(stage, bool) or stage not in (None, 0, *_OF_STAGE):
            raise ValueError(f"{SECTION}.stage must be 1, 2 or 3 (or absent) with {STRATEGY} fastest, got {stage!r}.")
        return None
    stage = strategy.stage if stage is None else stage
    if stage not in (0, strategy.stage):
        raise ValueError(
            f"{SECTION}.stage contradicts {SECTION}.{STRATEGY}: {strategy.name} places p = {strategy.p.name}, "
            f"g = {strategy.g.name}, which is stage {strategy.stage}, got stage {stage!r}. "
            f"Set {SECTION}.stage to {strategy.stage}."
        )
    return strategy


def check_config(config: "DeepSpeedConfig", mpu: Any = None, mesh_device: Any = None) -> None:
    """Validate our keys against the rest of a parsed configuration and the ranks.

    Runs when the configuration is parsed: on every rank alike, before any communication of ours.

    Args:
        mpu, mesh_device: what DeepSpeed was given of other kinds of parallelism.

    Raises:
        ValueError: what is configured contradicts the strategy, or the group size does not fit.
    """
    from deepspeed import comm as dist
    from deepspeed.utils import log_dist

    size = getattr(config.zero_config, GROUP_SIZE, None)
    if size is not None and dist.is_initialized():
        GroupSizes(sharding_ranks(config, mpu), size)
    strategy = active_strategy(config)
    if strategy is not None or undecided(config):
        refuse_mesh(our_keys(config._param_dict[SECTION]), mpu, mesh_device)
    if undecided(config):
        possible_strategies(config)
        return
    if strategy is None:
        return
    refuse_beside(config, strategy)
    if strategy.p == Placement.N and not config.zero_config.use_multi_rank_bucket_allreduce:
        log_dist(
            f"deepspeed_ext: {SECTION}.use_multi_rank_bucket_allreduce has no effect with {STRATEGY}: a bucket is "
            f"reduced to the owners of its parts either way",
            ranks=[0],
        )


def refuse_beside(config: "DeepSpeedConfig", strategy: Strategy) -> None:
    """Refuse what a strategy's optimizer does not do.

    Raises:
        ValueError: something of that is configured.
    """
    given = _given(config._param_dict[SECTION])
    names = {STRATEGY: f"{STRATEGY} {strategy.name}", "stage": f"stage {strategy.stage} in a pipeline"}
    given = names.get(given, given)
    for key, find, why, applies in REFUSED:
        if applies(strategy) and find(config):
            raise ValueError(f"{key} cannot be combined with {SECTION}.{given}: {why}. Remove one of the two.")


def active_strategy(config: "DeepSpeedConfig") -> Strategy | None:
    """The strategy that a parsed configuration asks for; None without our keys, with stage 0, or while undecided."""
    name = getattr(config.zero_config, STRATEGY, None)
    return STRATEGIES.get(name) if name is not None and config.zero_config.stage != 0 else None


def offloads(section: Any) -> bool:
    """Whether a parsed ``offload_param`` or ``offload_optimizer`` section moves states off the device."""
    return getattr(section, "device", "none") != "none"


def undecided(config: "DeepSpeedConfig") -> bool:
    """Whether a parsed configuration asks for the fastest strategy."""
    return getattr(config.zero_config, STRATEGY, None) == FASTEST and config.zero_config.stage != 0


def possible_strategies(config: "DeepSpeedConfig") -> list[Strategy]:
    """What a parsed configuration that asks for the fastest leaves to choose from.

    Raises:
        ValueError: nothing; with the reason for each.
    """
    found: list[Strategy] = []
    reasons: dict[str, list[str]] = {}
    for name, strategy in STRATEGIES.items():
        try:
            decided(config, strategy)
            found.append(strategy)
        except (ValueError, AssertionError) as error:
            reasons.setdefault(str(error).replace(name, "it"), []).append(name)
    if not found:
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        raise ValueError(f"{SECTION}.{STRATEGY} {FASTEST} leaves no strategy to choose from. {why}")
    return found


def decided(config: "DeepSpeedConfig", strategy: Strategy) -> "DeepSpeedConfig":
    """A parsed configuration that asks for the fastest, with this strategy instead.

    Raises:
        ValueError: what is configured beside it contradicts it.
        AssertionError: DeepSpeed's own checks find such a thing.
    """
    section = _decided(config._param_dict[SECTION], strategy.name)
    # Not parsed as a whole: batch sizes were settled with the number of ranks that was known then.
    found = copy.copy(config)
    found._param_dict = {**config._param_dict, SECTION: section}
    found.zero_config = parse_section(section)
    found.zero_optimization_stage = found.zero_config.stage
    found.zero_enabled = True
    found.strategy_was_chosen = True
    refuse_beside(found, strategy)
    found._do_error_check()
    return found


def _decided(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**{key: value for key, value in as_written(section).items() if key not in OF_FASTEST}, STRATEGY: name}


def _parse_strategy(section: Mapping[str, Any]) -> Strategy | None:
    """None for the fastest."""
    fastest = section[STRATEGY] == FASTEST
    for key in OF_FASTEST:
        if key in section and not fastest:
            raise ValueError(
                f"{SECTION}.{key} is for {STRATEGY} {FASTEST}, got {STRATEGY} {section[STRATEGY]!r}. Remove {key}."
            )
    if not fastest:
        return parse_strategy(section[STRATEGY], f", or {FASTEST}")
    memory, file = section.get(MEMORY), section.get(DECISION)
    if MEMORY in section and (isinstance(memory, bool) or not isinstance(memory, int | float) or not memory > 0):
        raise ValueError(
            f"{SECTION}.{MEMORY} must be a number above 0 (GB of each rank for model states), got {memory!r} of type "
            f"{type(memory).__name__}. Leave it out for a part of the device's free memory."
        )
    if DECISION in section and not (isinstance(file, str) and file):
        raise ValueError(
            f"{SECTION}.{DECISION} must be the path of a file, got {file!r} of type {type(file).__name__}."
        )
    return None


def use_strategy_of_stage(config: "DeepSpeedConfig", mpu: Any) -> None:
    """Have a parsed configuration of plain ZeRO ask for the strategy that its stage is.

    Args:
        mpu: a pipeline's grid.

    Raises:
        ValueError: what is configured contradicts it.
    """
    from deepspeed_ext.integration.support import require

    require()
    section = config._param_dict[SECTION]
    config.zero_config = parse_section({**section, STRATEGY: _OF_STAGE[int(config.zero_config.stage)]})
    check_config(config, mpu)


@functools.cache
def zero_config_class() -> type["DeepSpeedZeroConfig"]:
    """DeepSpeed's class for the section, with our keys as fields. Made late: DeepSpeed may be just being imported."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    class ParoZeroConfig(DeepSpeedZeroConfig):
        """``zero_optimization`` with PaRO."""

        paro_strategy: str
        """
        Placement of parameters, gradients and optimizer states, a letter each: N not cut, I cut inside a group, G cut
        over all ranks. Sets ``stage`` where that is absent.
        """

        paro_group_size: int | None = None
        """
        Data-parallel ranks in a group; must divide the data-parallel size. By default the ranks per node.
        """

        paro_memory_gb: float | None = None
        """
        GB (10^9 bytes) that each rank has for model states, for the strategy "fastest". By default a part of the
        device's free memory.
        """

        paro_decision_file: str = DECISION_FILE
        """
        Where the strategy "fastest" keeps what it has decided, and finds it again.
        """

        stage3_leaf_bytes: bool | int | None = None
        """
        Bytes of the largest unit of parameters that are fetched as one; true for what ``stage3_max_live_parameters``
        gives.
        """

        zeropp_loco_param: dict[str, Any] | None = None
        """
        Gradients cross between groups in few bits, with error feedback: see ``loco.settings``.
        """

    return ParoZeroConfig


def _given(section: Mapping[str, Any]) -> str:
    """The key through which a user has asked for a strategy."""
    if {STRATEGY, MICS_SIZE} & set(section):
        return STRATEGY
    return next((key for key in (LOCO, LEAF_BYTES) if key in section), "stage")


def _stock_class() -> type["DeepSpeedZeroConfig"]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return DeepSpeedZeroConfig


def parse_section(section: Mapping[str, Any]) -> "DeepSpeedZeroConfig":
    """Validate and parse a raw ``zero_optimization`` section that has one of our keys.

    Raises:
        ValueError: see ``check_section``; pydantic's for DeepSpeed's own keys.
    """
    given = _given(section)
    section = resolved(section)
    if not our_keys(section):
        return _stock_class()(**section)
    strategy = check_section(section)
    if section.get("stage") == 0:
        from deepspeed.utils import log_dist

        log_dist(f"deepspeed_ext: {SECTION}.{given} does nothing at stage 0", ranks=[0])
    # An undecided stage: any that is not 0, for it is parsed again.
    return zero_config_class()(**{"stage": strategy.stage if strategy else 1, **section})


def resolved(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a raw section as its user wrote it, with a strategy in the place of keys that imply one.

    Raises:
        ValueError: a key of MiCS, LoCo or leaf modules is not valid.
    """
    section = revive_mics(as_written(section))
    return with_loco(with_leaf_bytes(section)) if our_keys(section) else section
