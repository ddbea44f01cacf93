# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures a turn of ``compare`` in the ranks that it launches; see ``integration/plugins.py``."""

from typing import TYPE_CHECKING, Any

from deepspeed_ext.tools.compare.run_spec import current

if TYPE_CHECKING:
    from deepspeed_ext.deepspeed_types import Engine


def configure(config: dict[str, Any]) -> None:
    """Replace the keys of a configuration by those of the turn."""
    if (turn := current()) is not None:
        turn.put_into(config)


def engine_ready(engine: "Engine") -> None:
    """Measure the steps of an engine."""
    if (turn := current()) is not None:
        from deepspeed_ext.tools.compare.measuring import watch

        watch(engine, turn)
