# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The sub-keys of ``paro_outer_optimizer``, validated. Pure: no torch, no DeepSpeed."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from deepspeed_ext.config.keys import LOCO, OUTER, QUANTIZED, QUANTIZED_UPDATES, SECTION, STRATEGY
from deepspeed_ext.strategy import STRATEGIES, Placement, Strategy
from deepspeed_ext.values import EXACTLY, made, one_of

KEY = f"{SECTION}.{OUTER}"
NEEDS = tuple(name for name, row in STRATEGIES.items() if row.os == Placement.I)
MOST_AT_ONCE = 2**26  # elements that cross in one go: what a transfer holds is bounded


@dataclass(frozen=True, config=EXACTLY)
class OuterSettings:
    """How groups are brought together; the words are those of DiLoCo (arXiv:2311.08105) and Streaming DiLoCo
    (arXiv:2501.18512).

    Attributes:
        steps: inner steps from one outer step to the next.
        lr: of the outer optimizer, SGD with momentum.
        momentum: its momentum, in [0, 1).
        nesterov: whether it is Nesterov's.
        warmup_steps: steps at the beginning that average gradients over all groups, as the strategy alone does.
        bits: of an element that crosses: 32, 16, 8 or 4.
        fragments: parts of the model that cross by turns.
        delay: inner steps from the sending of a fragment to its use, under which it travels.
        offload: "none", or "cpu" to keep anchors and the outer optimizer's states on the host.
    """

    steps: Annotated[int, Field(ge=1, description="an integer of at least 1 (inner steps)")] = 30
    lr: Annotated[float, Field(gt=0, description="a number above 0")] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1, description="a number in [0, 1)")] = 0.9
    nesterov: Annotated[bool, Field(description="true or false")] = True
    warmup_steps: Annotated[int, Field(ge=0, description="an integer of at least 0 (steps)")] = 0
    bits: Annotated[int, one_of(4, 8, 16, 32), Field(description="4, 8, 16 or 32")] = 32
    fragments: Annotated[int, Field(ge=1, description="an integer of at least 1")] = 1
    delay: Annotated[int, Field(ge=0, description="an integer of at least 0 (inner steps)")] = 0
    offload: Annotated[Literal["none", "cpu"], Field(description='"none" or "cpu"')] = "none"

    @classmethod
    def parse(cls, section: object, where: str = KEY, inside: str = "{where}.{key}") -> "OuterSettings":
        """Return the settings of what stands under the key, or elsewhere.

        Args:
            section: the sub-keys.
            where, inside: what errors call this place, and a sub-key there; see ``made``.

        Raises:
            ValueError: see ``made``; or there are more fragments than inner steps, or a fragment would still be on its
                way when the next one leaves.
        """
        found = made(cls, section, where, inside)
        steps, fragments, delay = (inside.format(where=where, key=key) for key in ("steps", "fragments", "delay"))
        if found.fragments > found.steps:
            raise ValueError(
                f"{fragments} must be at most {steps}, since at most one leaves after each inner step; got "
                f"{found.fragments} fragments and {found.steps} steps."
            )
        most = found.steps // found.fragments
        if found.delay >= most and found.delay:
            raise ValueError(
                f"{delay} must be less than steps / fragments, after which the next fragment leaves: with "
                f"{found.steps} steps and {found.fragments} fragments less than {most}, got {found.delay}."
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for checkpoints and logs."""
        return asdict(self)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return after how many inner steps, modulo ``steps``, each fragment leaves; the last one after all."""
        return tuple((i + 1) * self.steps // self.fragments % self.steps for i in range(self.fragments))


def check_outer(section: Mapping[str, Any], strategy: Strategy | None) -> None:
    """Refuse an outer optimizer that is not valid, or cannot be used with the other keys of a raw section.

    Args:
        strategy: None for the fastest.

    Raises:
        ValueError: it is.
    """
    if OUTER not in section:
        return
    OuterSettings.parse(section[OUTER])
    if strategy is None or strategy.name not in NEEDS:
        given = section[STRATEGY]
        raise ValueError(
            f"{KEY} needs optimizer states that are sharded inside a group (os = I): {SECTION}.{STRATEGY} must be one "
            f"of {', '.join(NEEDS)}, got {given!r}. III shards parameters inside a group, NII replicates them."
        )
    for key in (LOCO, QUANTIZED, QUANTIZED_UPDATES):
        if section.get(key) not in (None, False):
            raise ValueError(
                f"{SECTION}.{key} cannot be combined with {KEY}: in inner steps nothing crosses between groups, and "
                f"{KEY}.bits says in how many bits the outer steps do. Remove {key}."
            )
