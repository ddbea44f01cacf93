# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures a turn of ``compare`` in the ranks that it launches; see ``integration/plugins.py``.

Only the command sets the variable that says what to measure. Without it, no engine is changed. Standard library only,
since every engine calls the plugin.
"""

import base64
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_ext.deepspeed_types import Engine

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


def current() -> Turn | None:
    """Return the turn of this process; None if the command has not launched it.

    Raises:
        ValueError: somebody else has set the variable.
    """
    text = os.environ.get(VARIABLE)
    return Turn.decode(text) if text else None


def configure(config: dict[str, Any]) -> None:
    """Replace the top-level keys of a configuration by the turn's, in place, so that the script reads them as well."""
    if (turn := current()) is not None:
        config.update({key: value for key, value in (turn.config or {}).items() if value != AUTO})


def engine_ready(engine: "Engine") -> None:
    """Measure the steps of an engine."""
    if (turn := current()) is not None:
        from deepspeed_ext.tools.compare.measuring import watch

        watch(engine, turn)
