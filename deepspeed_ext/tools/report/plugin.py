# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Reports on engines whose configuration has ``paro_report``; see ``integration/plugins.py``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.deepspeed_types import Engine


def engine_ready(engine: "Engine") -> None:
    """Record steps of an engine whose settings request a report."""
    from deepspeed_ext.config.settings import ReportSettings

    if (settings := ReportSettings.from_environment_or_config(engine._config.zero_config)) is not None:
        from deepspeed_ext.tools.report.reporter import report_on

        report_on(engine, settings)
