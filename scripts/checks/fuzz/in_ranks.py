# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ranks are asked to run. The process that draws the cases imports this module, and so no torch."""

from scripts.checks.fuzz.cases import Case, PipeCase


def judged(case: Case | PipeCase) -> tuple[list[str], list[str]]:
    """Problems of a case, and what happened; see ``judging``."""
    from scripts.checks.fuzz.judging import judge

    problems, happened = judge(case)
    return problems, happened
