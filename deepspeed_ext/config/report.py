# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The sub-keys of ``paro_report``, and the variable that takes its place. Pure: no torch, no DeepSpeed."""

import json
import os
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from deepspeed_ext.config.keys import REPORT, SECTION
from deepspeed_ext.values import EXACTLY, made, must_be

KEY = f"{SECTION}.{REPORT}"
VARIABLE = "DEEPSPEED_EXT_REPORT"
AROUND = 3  # undisturbed steps before, and as many after, with which the recorded ones are compared


@dataclass(frozen=True, config=EXACTLY)
class ReportSettings:
    """Which steps are recorded, and where the report goes.

    Attributes:
        folder: where rank 0 writes it.
        after: optimizer steps of warm-up, before the first one that is timed.
        steps: optimizer steps that are recorded.
        probe: whether the links are measured afterwards, which takes some seconds, for the planner's predictions.
    """

    folder: Annotated[str, Field(min_length=1, description="the path of a folder")] = "paro_report"
    after: Annotated[int, Field(ge=2, description="an integer of at least 2 (optimizer steps)")] = 10
    steps: Annotated[int, Field(ge=1, description="an integer of at least 1 (optimizer steps)")] = 3
    probe: Annotated[bool, Field(description="true or false")] = True

    @property
    def first(self) -> int:
        """Return the number of the first recorded step, counted from 0."""
        return self.after + AROUND

    @property
    def last(self) -> int:
        """Return the number of the step after which the report is made."""
        return self.first + self.steps + AROUND - 1

    @classmethod
    def parse(cls, given: object, key: str = KEY) -> "ReportSettings":
        """Return the settings of what stands under the key, or elsewhere.

        Raises:
            ValueError: see ``made``.
        """
        return made(cls, given, key)

    @classmethod
    def asked_for(cls, zero_config: Any) -> "ReportSettings | None":
        """Return the settings of the variable, or else those of a parsed section; None without both.

        Raises:
            ValueError: what the variable holds is not valid.
        """
        text = os.environ.get(VARIABLE)
        if text is None:
            given = getattr(zero_config, REPORT, None)
            return None if given is None else cls.parse(given)
        try:
            found = json.loads(text)
        except ValueError as error:
            raise must_be(VARIABLE, "a dictionary in JSON, {} for the defaults", text) from error
        return cls.parse(found, VARIABLE)

    def as_variable(self) -> str:
        """Return what the variable must be for these settings."""
        return json.dumps(asdict(self))
