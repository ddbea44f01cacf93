# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions that ranks run. The process that starts ranks imports this module, but not torch."""

from tests.campaigns.fuzz.cases import Case, PipeCase


def build_kernels() -> bool:
    """Build those of LoCo, for which no case should have to wait; whether there are any."""
    from deepspeed_ext.loco import ops

    return bool(ops.load_kernels())


def judge_case(case: Case | PipeCase) -> tuple[list[str], list[str]]:
    """Return the problems of a case, and its events; see ``judging``."""
    from tests.campaigns.fuzz.judging import judge

    problems, happened = judge(case)
    return problems, happened
