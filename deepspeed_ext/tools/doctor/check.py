# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a check is: something that each rank does, and what the first rank makes of all answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.tools.doctor.findings import Finding
from deepspeed_ext.tools.doctor.place import Place

Answers = Mapping[int, Any]  # of each rank that answered


@dataclass(frozen=True)
class Check:
    """One kind of check.

    Attributes:
        title: its name.
        examine: runs on every rank, and returns plain values that JSON can hold; may raise.
        judge: runs on the first rank, with the answers of all ranks whose ``examine`` returned; communicates nothing.
        together: whether ``examine`` communicates over process groups. Then it is left out if a rank is lost, or if
            another one of these checks has failed, since ranks would wait for one another.
        least_seconds: that ``examine`` gets even if ``--timeout`` is less.
    """

    title: str
    examine: Callable[[Place], Any]
    judge: Callable[[Answers, Place], list[Finding]]
    together: bool = False
    least_seconds: float = 0.0

    def seconds(self, place: Place) -> float:
        """Return how long ``examine`` may take."""
        return max(place.options.timeout, self.least_seconds)
