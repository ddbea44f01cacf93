# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Our keys of ``zero_optimization`` as one pydantic model with its checks. Pure: no torch, no DeepSpeed.

Errors are one paragraph with the key, the expected value, and the given value. They are the same on all ranks.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen, Predicate
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from deepspeed_ext.config.keys import (
    CACHE_BYTES,
    DECISION,
    FASTEST,
    FASTEST_KEYS,
    FILL,
    GROUP_SIZE,
    LEAF_BYTES,
    LOCO,
    MAX_LIVE,
    MEASURED,
    MEMORY,
    MICRO_BATCHES,
    MICS_HIERARCHICAL,
    MICS_SIZE,
    MODULES,
    OUTER,
    OVERLAP_UPDATES,
    QUANTIZED,
    QUANTIZED_UPDATES,
    REDUCE,
    SECTION,
    STAGE,
    STRATEGY,
    THRESHOLD,
    WEIGHTS,
    our_keys,
)
from deepspeed_ext.config.settings import (
    BACKEND,
    ORDERED_LEVELS,
    LocoSettings,
    OuterSettings,
    ReportSettings,
    Settings,
    UpdateSettings,
    expected_dictionary,
    key_field,
    parse,
    unknown_key_error,
    wrong_value_error,
)
from deepspeed_ext.strategy import STRATEGIES, Placement, Strategy, hyphenate, hyphenated, parse_strategy

STRATEGY_OF_STAGE = {1: "NNG", 2: "NGG", 3: "GGG"}  # DeepSpeed's stage -> the equal strategy
PLAIN = {"NNN": "DDP"} | {name: f"ZeRO-{stage}" for stage, name in STRATEGY_OF_STAGE.items()}  # equal, without groups
# Those that may have an outer optimizer.
OUTER_STRATEGIES = tuple(name for name, row in STRATEGIES.items() if row.os == Placement.I)

# Keys that do nothing without a strategy.
_KEYS_OF_STRATEGIES = (
    *(GROUP_SIZE, OVERLAP_UPDATES, REDUCE, MODULES, OUTER, MICRO_BATCHES, WEIGHTS, CACHE_BYTES),
    *FASTEST_KEYS,
)


def _check_strategy_name(name: str | None) -> str | None:
    return name if name in (None, FASTEST) else parse_strategy(name, f", or {FASTEST}").name


def _are_placements(patterns: Mapping[str, str]) -> bool:
    return set(patterns.values()) <= {Placement.N.name, Placement.I.name}


def _parse_settings(kind: type[Settings]) -> BeforeValidator:
    return BeforeValidator(lambda given: None if given is None else kind.parse(given))


class ParoConfig(BaseModel):
    """Our keys of ``zero_optimization``."""

    model_config = ConfigDict(strict=True)

    paro_strategy: Annotated[
        str | None,
        AfterValidator(_check_strategy_name),
        key_field(f'one of {hyphenated(STRATEGIES)} (placements of p, g, os), or "{FASTEST}"'),
    ] = None
    """[Placement](../zero/README.md) of parameters, gradients, and optimizer states, one letter each: N replicated, I
    sharded within a group, G sharded across all ranks. Sets `stage` if it is absent."""
    paro_group_size: Annotated[
        int | None, key_field("an integer of at least 1 (ranks in a group), or absent", "ranks per node", ge=1)
    ] = None
    """Data-parallel ranks per group; a divisor of the data-parallel size. If nodes have different numbers of ranks,
    the default is their greatest common divisor."""
    paro_overlap_updates: Annotated[bool, key_field("true or false")] = False
    """With p = N: gathers updated parameters [during the next forward](../zero/overlap.md#updated-parameters). With
    p = I this is always done."""
    paro_reduce: Annotated[
        str, Predicate(ORDERED_LEVELS.__contains__), key_field('"backend", "ordered" or "ordered_everywhere"')
    ] = BACKEND
    """Order of gradient sums. "ordered": [between groups in rank order](../zero/README.md#ordered-sums), in fp32, on
    every backend. "ordered_everywhere": also within groups. "backend": as the backend sums."""
    paro_modules: Annotated[
        dict[str, str] | str | None,
        Predicate(lambda given: given in (None, FILL) if not isinstance(given, dict) else _are_placements(given)),
        key_field(
            f'a dictionary of patterns of module names with the value "N" or, with p = G, "I", as '
            f'{{"visual.*": "N"}}, or "{FILL}"'
        ),
    ] = None
    """With p = I or G: modules whose parameters [stay whole on every rank](../zero/modules.md) ("N"). With p = G also:
    modules whose parameters are [sharded within groups](../zero/modules.md#i-next-to-p--g) ("I"). "fill": as many
    whole modules as `paro_memory_gb` allows."""
    paro_quantized_updates: Annotated[
        UpdateSettings | None, _parse_settings(UpdateSettings), key_field(expected_dictionary(UpdateSettings))
    ] = None
    """Sends updated parameters between groups as differences
    [in 4 bits](../loco/README.md#updates-between-groups-in-4-bits); with os = I and N, sums of gradients. With p = N
    or I, with `stage` 1 or 2, or with `mics_shard_size`."""
    paro_outer_optimizer: Annotated[
        OuterSettings | None, _parse_settings(OuterSettings), key_field(expected_dictionary(OuterSettings))
    ] = None
    """Trains groups separately; [an outer optimizer](../zero/outer_optimizer.md) combines them every 30 steps. With
    os = I: I-I-I, N-I-I, I-N-I, N-N-I."""
    paro_micro_batches: Annotated[
        list[Annotated[int, Ge(1)]] | Literal["measured"] | None,
        MinLen(1),
        key_field(
            f'a list of integers of at least 1 (micro-batches of a step, for each group), "{MEASURED}", or absent'
        ),
    ] = None
    """With p and g = N or I: groups run [different numbers of micro-batches](../zero/micro_batches.md) per step, as
    [4, 4, 2]. Replaces `gradient_accumulation_steps`. "measured": numbers that [balance the
    measured pace](../zero/micro_batches.md#measured-numbers) of groups."""
    paro_weights: Annotated[str | None, Predicate((None, "tokens").__contains__), key_field('"tokens", or absent')] = (
        None
    )
    """Mean of gradients: over micro-batches, or [over tokens](../zero/micro_batches.md#tokens)."""
    paro_parameter_cache_bytes: Annotated[int, key_field("an integer of at least 0 (bytes on each device)", ge=0)] = 0
    """With `offload_param` and I-N-G, I-I-G or I-G-G: bytes of parameter shards that are
    [also on the device](../zero/host_memory.md)."""
    paro_memory_gb: Annotated[
        float | None,
        key_field(
            "a number above 0 (GB, 10^9 bytes, for model states of a rank), or absent",
            "70 % of the device's free memory",
            gt=0,
        ),
    ] = None
    """With `"fastest"`, and with `paro_modules` "fill": memory for model states; the rest is for activations and
    buffers."""
    paro_decision_file: Annotated[str, key_field("the path of a file", min_length=1)] = "paro_decision.json"
    """With `"fastest"`, and with `paro_micro_batches` "measured": file that stores the decision for later runs."""
    paro_micro_step_seconds: Annotated[
        float | None,
        key_field("a number of at least 0 (seconds of forward and backward), or absent", "an estimate", ge=0),
    ] = None
    """With `"fastest"`: seconds of a micro-batch's forward and backward without communication; see
    [the planner](../planner/README.md)."""
    paro_report: Annotated[
        ReportSettings | None, _parse_settings(ReportSettings), key_field(expected_dictionary(ReportSettings))
    ] = None
    """Records some steps and [reports their time](../tools/report/README.md), also with a plain stage."""
    stage3_leaf_bytes: Annotated[
        bool | Annotated[int, Ge(0)] | None,
        key_field(
            f"a number of bytes (an integer of at least 0, 0 for off), or true for the budget that {MAX_LIVE} gives",
            "a quarter of true's budget, without mixtures of experts",
        ),
    ] = None
    """With p = I or G, or stage 3 and this key: modules of at most this size are
    [fetched as one unit](../leaf/README.md)."""
    mics_shard_size: Annotated[
        int,
        Predicate(lambda size: size >= 1 or size == -1),
        key_field("an integer of at least 1 (ranks over which model states are sharded), or -1 for off"),
    ] = -1
    """MiCS, which DeepSpeed has removed: the same as `paro_strategy` I-I-I with this `paro_group_size`. Refused with
    either."""
    mics_hierarchical_params_gather: Annotated[Any, key_field("true or false")] = False
    """Accepted with `mics_shard_size`, and implied by it, since I-I-I gathers only within groups."""
    zeropp_loco_param: Annotated[
        LocoSettings | None, _parse_settings(LocoSettings), key_field(expected_dictionary(LocoSettings))
    ] = None
    """[LoCo](../loco/README.md), which DeepSpeed has removed: sends gradients between groups in 4 bits. With a
    strategy, or with `stage` 1, 2, or 3 alone; groups are then nodes."""

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> "ParoConfig":
        """Return our keys of a raw section. A strategy replaces keys that imply one.

        Args:
            section: the user's section, without a stage of ours.

        Raises:
            ValueError: unknown, missing, mistyped, or contradicting values.
        """
        values = {key: section[key] for key in our_keys(section)}
        for key, value in values.items():
            if key not in cls.model_fields:
                raise unknown_key_error(SECTION, key, cls.model_fields, "the keys of deepspeed_ext")
            if value is None and cls.model_fields[key].default is None:  # None as default means that the key is absent
                raise wrong_value_error(f"{SECTION}.{key}", cls.model_fields[key].description or "", value)
        model = parse(cls, values, SECTION)
        # In this order: MiCS sets a strategy, and other keys imply one only if there is none.
        model._translate_mics(section)
        model._imply_strategy(section)
        if model.paro_strategy is None:
            model._refuse_without_strategy(section)
        else:
            model._check_strategy(section)
        return model

    @property
    def named_strategy(self) -> Strategy | None:
        """The strategy; None without a strategy, or if the fastest is requested."""
        return STRATEGIES.get(self.paro_strategy or "")

    def _translate_mics(self, section: Mapping[str, Any]) -> None:
        """Replace the keys of MiCS by ours: I-I-I, with its shard size as group size."""
        size = self.mics_shard_size
        if size == -1:
            if self.mics_hierarchical_params_gather:
                raise ValueError(f"{SECTION}.{MICS_HIERARCHICAL} needs {SECTION}.{MICS_SIZE}; got only the first.")
            return
        # I-I-I also supports quantized sums and an outer optimizer, so their keys are not refused here.
        keys = [key for key in (STRATEGY, GROUP_SIZE, OVERLAP_UPDATES, CACHE_BYTES) if key in section]
        if keys:
            raise ValueError(
                f"{SECTION}.{MICS_SIZE} {size} means {STRATEGY} I-I-I with {GROUP_SIZE} {size}, but {', '.join(keys)} "
                f"is set as well ({', '.join(repr(section[key]) for key in keys)}). Keep one of the two."
            )
        if section.get(STAGE, 3) not in (0, 3):
            raise ValueError(f"{SECTION}.{MICS_SIZE} needs {SECTION}.stage 3, got {section[STAGE]!r}.")
        self.paro_strategy, self.paro_group_size = "III", size
        self.mics_shard_size, self.mics_hierarchical_params_gather = -1, False

    def _imply_strategy(self, section: Mapping[str, Any]) -> None:
        """Set the strategy that equals the stage if one of our keys implies it, and LoCo's settings if implied."""
        budget, threshold, quantized = self.stage3_leaf_bytes, section.get(THRESHOLD), section.get(QUANTIZED)
        if budget and threshold:
            raise ValueError(
                f"{SECTION}.{LEAF_BYTES} ({budget!r}) and {SECTION}.{THRESHOLD} ({threshold!r}) both choose leaf "
                f"modules. Remove one of the two."
            )
        if budget and self.named_strategy is not None and self.named_strategy.p == Placement.N:
            raise ValueError(
                f"{SECTION}.{LEAF_BYTES} needs sharded parameters, but {STRATEGY} is {self.named_strategy}. Use a "
                f"strategy with p = I or G, or remove {LEAF_BYTES}."
            )
        if self.zeropp_loco_param is not None and quantized is False:
            raise ValueError(
                f"{SECTION}.{LOCO} implies {SECTION}.{QUANTIZED}, which is set to false. Remove one of the two."
            )
        for key, stages, alternative in (
            (LEAF_BYTES, (3,), f"stage 3, or a {STRATEGY} with p = I or G"),
            (LOCO, (0, 1, 2, 3), f"stage 1, 2 or 3, or {SECTION}.{STRATEGY}"),
            (QUANTIZED_UPDATES, (0, 1, 2), f"stage 1 or 2, or a {SECTION}.{STRATEGY} with p = N or I"),
        ):
            is_set = getattr(self, key) not in (None, False)
            if is_set and self.paro_strategy is None:
                stage: Any = section.get(STAGE)
                # True equals 1 in Python, but is not a stage.
                if isinstance(stage, bool) or stage not in stages:
                    raise ValueError(f"{SECTION}.{key} needs {SECTION}.{alternative}, got stage {stage!r}.")
                self.paro_strategy = STRATEGY_OF_STAGE.get(stage, "NNG")
        if quantized and self.zeropp_loco_param is None and self.paro_strategy is not None:
            self.zeropp_loco_param = LocoSettings(error_feedback=False)

    def _refuse_without_strategy(self, section: Mapping[str, Any]) -> None:
        """Refuse keys that do nothing without a strategy."""
        for key in section:
            if key in _KEYS_OF_STRATEGIES:
                raise ValueError(
                    f"{SECTION}.{key} is set ({section[key]!r}) without {SECTION}.{STRATEGY}: "
                    f"add a strategy, one of {hyphenated(STRATEGIES)}, or remove {key}."
                )

    def _check_strategy(self, section: Mapping[str, Any]) -> None:
        """Refuse keys that contradict the strategy."""
        strategy, stage = self.named_strategy, section.get(STAGE)
        if self.paro_outer_optimizer is not None:
            self._check_outer(section)
        if strategy is None:
            if isinstance(stage, bool) or stage not in (None, 0, *STRATEGY_OF_STAGE):
                raise ValueError(
                    f"{SECTION}.stage must be 1, 2 or 3 (or absent) with {STRATEGY} {FASTEST}, got {stage!r}."
                )
            for key, placements in ((MODULES, "p = I or G"), (MICRO_BATCHES, "p and g = N or I")):
                if getattr(self, key):
                    raise ValueError(
                        f"{SECTION}.{key} cannot be combined with {STRATEGY} {FASTEST}. Name a strategy with "
                        f"{placements}, or remove {key}."
                    )
            return
        if self.paro_modules and strategy.p == Placement.N:
            raise ValueError(
                f"{SECTION}.{MODULES} keeps parameters whole that a strategy shards, but {STRATEGY} {strategy} shards "
                f"none. Use a strategy with p = I or G, or remove {MODULES}."
            )
        finer = [name for name, letter in self._placements.items() if Placement[letter] >= strategy.p]
        if finer:
            raise ValueError(
                f'{SECTION}.{MODULES} takes only "N" with p = I ({STRATEGY} {strategy}), got {finer[0]!r}: '
                f"{self._placements[finer[0]]!r}. Use a strategy with p = G, or remove this pattern."
            )
        fills, of_fill = self.paro_modules == FILL, f' and {MODULES} "{FILL}"'
        if fills and self.paro_memory_gb is None:
            raise ValueError(
                f'{SECTION}.{MODULES} "{FILL}" needs to know how much memory to fill: add {SECTION}.{MEMORY}, the GB '
                f"(10^9 bytes) that model states may take on each rank."
            )
        also = {MEMORY: of_fill, DECISION: f' and {MICRO_BATCHES} "{MEASURED}"'}
        for key in FASTEST_KEYS:
            used = fills if key == MEMORY else key == DECISION and self.paro_micro_batches == MEASURED
            if key in section and not used:
                raise ValueError(
                    f"{SECTION}.{key} is for {STRATEGY} {FASTEST}{also.get(key, '')}, got {STRATEGY} {strategy}. "
                    f"Remove {key}."
                )
        if stage not in (None, 0, strategy.stage):
            raise ValueError(
                f"{SECTION}.stage contradicts {SECTION}.{STRATEGY}: {strategy} places p = {strategy.p.name}, "
                f"g = {strategy.g.name}, which is stage {strategy.stage}, got stage {stage!r}. "
                f"Set {SECTION}.stage to {strategy.stage}."
            )

    @property
    def _placements(self) -> dict[str, str]:
        return self.paro_modules if isinstance(self.paro_modules, dict) else {}

    def _check_outer(self, section: Mapping[str, Any]) -> None:
        """Refuse an outer optimizer with states that are not the group's own, or with quantized inner steps."""
        outer = OuterSettings.key
        if self.paro_strategy not in OUTER_STRATEGIES:
            raise ValueError(
                f"{outer} needs optimizer states that are sharded inside a group (os = I): {SECTION}.{STRATEGY} must "
                f"be one of {hyphenated(OUTER_STRATEGIES)}, got {hyphenate(self.paro_strategy or '')}. I-I-I shards "
                f"parameters inside a group, N-I-I replicates them."
            )
        for key in (LOCO, QUANTIZED, QUANTIZED_UPDATES, REDUCE):
            if key in section and section[key] not in (False, BACKEND):
                raise ValueError(
                    f"{SECTION}.{key} cannot be combined with {outer}: inner steps send nothing between groups, and "
                    f"{outer}.bits sets the bits of outer steps. Remove {key}."
                )
