# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The parsed section: DeepSpeed's class with our keys as fields, and the strategy that they ask for, parsed once.

A section in which ``our_keys`` finds none is not read here: DeepSpeed parses it with its own class.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import PrivateAttr

from deepspeed_ext.config.implied_stage import as_written, imply_stage
from deepspeed_ext.config.keys import (
    DECISION_FILE,
    FASTEST,
    REPORT,
    SECTION,
    STRATEGY,
    asked_by,
    keys_of_strategies,
)
from deepspeed_ext.config.normalize import normalized
from deepspeed_ext.config.report import ReportSettings
from deepspeed_ext.config.validate import check_section
from deepspeed_ext.strategy import Strategy

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


class ReportedZeroConfig(DeepSpeedZeroConfig):
    """``zero_optimization`` of any engine whose steps may be recorded."""

    paro_report: dict[str, Any] | None = None
    """
    Some steps are recorded, and a report of where their time goes is written: see ``config.report``.
    """


class ParoZeroConfig(ReportedZeroConfig):
    """``zero_optimization`` with PaRO."""

    paro_strategy: str
    """
    Placement of parameters, gradients and optimizer states, a letter each: N replicated, I sharded inside a group, G
    sharded over all ranks. Sets ``stage`` where that is absent.
    """

    paro_group_size: int | None = None
    """
    Data-parallel ranks in a group; must divide the data-parallel size. By default the ranks per node.
    """

    paro_overlap_updates: bool = False
    """
    With p = N: a step ends before the parameters that it has changed are back. See ``zero/flat/arrivals.py``.
    """

    paro_quantized_updates: dict[str, Any] | None = None
    """
    Updated parameters cross between groups as differences in few bits: see ``loco.settings``.
    """

    paro_outer_optimizer: dict[str, Any] | None = None
    """
    Groups train apart, and every so many steps an outer optimizer brings them together: see ``config.outer``.
    """

    paro_parameter_cache_bytes: int = 0
    """
    With ``offload_param``: bytes of slices of parameters that are on the device as well as on the host. See
    ``zero/sharded/rows.py``.
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

    paro_micro_step_seconds: float | None = None
    """
    Seconds of forward and backward of a micro-step without communication, for the strategy "fastest". By default an
    estimate.
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

    _strategy: Strategy | None = PrivateAttr(default=None)
    _has_optimizer: bool = PrivateAttr(default=False)

    @classmethod
    def of(cls, section: Mapping[str, Any], strategy: Strategy | None) -> "ParoZeroConfig":
        """Parse a normalized section.

        Args:
            section: valid.
            strategy: what it asks for; None for the fastest, whose stage is not known: any but 0 stands for it.
        """
        parsed = cls(**{"stage": strategy.stage if strategy else 1, **section})
        parsed._strategy = strategy
        return parsed

    @property
    def strategy(self) -> Strategy | None:
        """The strategy to run: None at stage 0, and while it is undecided."""
        return self._strategy if self.stage != 0 else None

    @property
    def undecided(self) -> bool:
        """Whether the fastest strategy is asked for."""
        return self.paro_strategy == FASTEST and self.stage != 0


def parse_and_imply(section: dict[str, Any]) -> DeepSpeedZeroConfig:
    """Parse a raw section that has one of our keys, and write the stage that is implied into it.

    Frameworks look it up there.

    Args:
        section: as the caller keeps it.

    Raises:
        ValueError: see ``parse_section``.
    """
    parsed = parse_section(section)
    if isinstance(parsed, ParoZeroConfig) and parsed.strategy:
        imply_stage(section, parsed.strategy.stage)
    return parsed


def parse_section(section: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Validate and parse a raw ``zero_optimization`` section that has one of our keys.

    Raises:
        ValueError: see ``check_section``; pydantic's for DeepSpeed's own keys.
    """
    ours = normalized(as_written(section))
    if REPORT in ours:
        ReportSettings.parse(ours[REPORT])
    if not keys_of_strategies(ours):
        return (ReportedZeroConfig if REPORT in ours else DeepSpeedZeroConfig)(**ours)
    strategy = check_section(ours)
    if ours.get("stage") == 0:
        from deepspeed.utils import log_dist

        log_dist(f"deepspeed_ext: {SECTION}.{asked_by(section)} does nothing at stage 0", ranks=[0])
    return ParoZeroConfig.of(ours, strategy)


def active_strategy(config: "DeepSpeedConfig") -> Strategy | None:
    """Return the strategy of a parsed configuration; None without our keys, with stage 0, or while undecided."""
    zero = config.zero_config
    return zero.strategy if isinstance(zero, ParoZeroConfig) else None


def record_optimizer(config: "DeepSpeedConfig") -> None:
    """Record that the engine of a parsed configuration has an optimizer for its strategy."""
    config.zero_config._has_optimizer = True


def require_optimizer(config: "DeepSpeedConfig") -> None:
    """Check that an engine has an optimizer for its strategy.

    Raises:
        RuntimeError: it has DeepSpeed's own, since other code has replaced the function that would make ours.
    """
    zero = config.zero_config
    if active_strategy(config) and not zero._has_optimizer:
        raise RuntimeError(
            f"{SECTION}.{STRATEGY} {zero.strategy.name} has no effect: the engine's optimizer is DeepSpeed's own, "
            f"because DeepSpeedEngine._configure_zero_optimizer is not the function that deepspeed_ext has put there. "
            f"Other code has replaced or overridden it: remove that code, or let its function call the one that it "
            f"replaces."
        )


def undecided(config: "DeepSpeedConfig") -> bool:
    """Whether a parsed configuration asks for the fastest strategy."""
    zero = config.zero_config
    return isinstance(zero, ParoZeroConfig) and zero.undecided


def leaf_bytes(zero_config: DeepSpeedZeroConfig) -> int | bool:
    """Return the budget of leaf modules in a parsed section; false where there is none."""
    return isinstance(zero_config, ParoZeroConfig) and (zero_config.stage3_leaf_bytes or False)


def offloads(section: Any) -> bool:
    """Whether a parsed ``offload_param`` or ``offload_optimizer`` section moves states off the device."""
    return getattr(section, "device", "none") != "none"
