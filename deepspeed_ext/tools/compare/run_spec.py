# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of one launch, which the command passes to its ranks in an environment variable.

Only the command sets the variable. Without it, no engine is changed. This module only uses the standard library,
because every engine imports it.
"""

import base64
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "DEEPSPEED_EXT_COMPARE"
UNFINISHED = "unfinished"  # key of the report if a script ends too early: the number of its steps
AUTO = "auto"  # a value that a framework replaces


@dataclass(frozen=True)
class RunSpec:
    """One launch of the script under one configuration.

    Attributes:
        steps: optimizer steps to time, after the warm-up.
        warm_up: optimizer steps before them, at least one.
        report: path of the JSON that the first rank of each node writes, if its folder exists.
        config: values that replace top-level keys of the script's configuration; None if the script reads the file
            itself.
    """

    steps: int
    warm_up: int
    report: str
    config: dict[str, Any] | None = None

    def encode(self) -> str:
        """Return the value of the variable: base64, which needs no quoting in launchers and shells."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, text: str) -> "RunSpec":
        """Return the turn for a value of the variable.

        Raises:
            ValueError: the value was not set by the command.
        """
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(text)))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"the environment variable {VARIABLE} is set by python -m deepspeed_ext compare for the ranks that it "
                f"launches, got {text[:40]!r}. Unset it."
            ) from error

    def replace_keys(self, config: dict[str, Any]) -> None:
        """Replace the top-level keys of a script's configuration in place, so that the script also sees them."""
        config.update({key: value for key, value in (self.config or {}).items() if value != AUTO})


def current_run_spec() -> RunSpec | None:
    """Return the turn of this process; None if the command has not launched it.

    Raises:
        ValueError: the variable was not set by the command.
    """
    text = os.environ.get(VARIABLE)
    return RunSpec.decode(text) if text else None
