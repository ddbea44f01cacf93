# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures a turn of ``compare`` in the ranks that it launches; see ``integration/plugins.py``."""

from typing import TYPE_CHECKING, Any

from deepspeed_ext.tools.compare.run_spec import current_run_spec

if TYPE_CHECKING:
    from deepspeed_ext.deepspeed_types import Engine


def configure(config: dict[str, Any]) -> None:
    """Replace the keys of a configuration by those of the turn."""
    if (spec := current_run_spec()) is not None:
        spec.replace_keys(config)


def engine_ready(engine: "Engine") -> None:
    """Measure the steps of an engine."""
    if (spec := current_run_spec()) is not None:
        from deepspeed_ext.tools.compare.measuring import watch

        watch(engine, spec)
