# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What one launch measures; the command sends it to its ranks by an environment variable.

Only the command sets the variable. Without it, no engine is changed. Standard library only: every engine asks for it.
"""

import base64
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "DEEPSPEED_EXT_COMPARE"
UNFINISHED = "unfinished"  # key of the report of a script that ended too early: the steps that it has taken
AUTO = "auto"  # a value that a framework replaces


@dataclass(frozen=True)
class Turn:
    """One launch of the script under one configuration.

    Attributes:
        steps: optimizer steps to time, after the warm-up.
        warm_up: optimizer steps before them, at least one.
        report: path of the JSON that the first rank of each node writes, if the folder is there.
        config: what replaces the top-level keys of the script's configuration; None where the script reads the
            file itself.
    """

    steps: int
    warm_up: int
    report: str
    config: dict[str, Any] | None = None

    def encode(self) -> str:
        """Return the value of the variable: base64, of which no launcher and no shell has to quote anything."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, text: str) -> "Turn":
        """Return the turn of a value of the variable.

        Raises:
            ValueError: the command has not set it.
        """
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(text)))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"the environment variable {VARIABLE} is set by python -m deepspeed_ext compare for the ranks that it "
                f"launches, got {text[:40]!r}. Unset it."
            ) from error

    def put_into(self, config: dict[str, Any]) -> None:
        """Replace the top-level keys of a script's configuration, in place, so that the script reads them as well."""
        config.update({key: value for key, value in (self.config or {}).items() if value != AUTO})


def current() -> Turn | None:
    """Return the turn of this process; None if the command has not launched it.

    Raises:
        ValueError: somebody else has set the variable.
    """
    text = os.environ.get(VARIABLE)
    return Turn.decode(text) if text else None
