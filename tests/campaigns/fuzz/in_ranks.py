# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ranks are asked to run. The process that draws the cases imports this module, and so no torch."""

from tests.campaigns.fuzz.cases import Case, PipeCase
from tests.campaigns.fuzz.contradictions import Contradiction


def build_kernels() -> bool:
    """Build those of LoCo, for which no case should have to wait; whether there are any."""
    from deepspeed_ext.loco import ops

    return bool(ops.load_kernels())


def judged(case: Case | PipeCase) -> tuple[list[str], list[str]]:
    """Problems of a case, and what happened; see ``judging``."""
    from tests.campaigns.fuzz.judging import judge

    problems, happened = judge(case)
    return problems, happened


def refused(given: Contradiction) -> tuple[str, str, str]:
    """Type and message of what refuses a configuration, empty if nothing does; what was communicated until then."""
    import os
    import tempfile
    from unittest import mock

    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from torch.distributed import ProcessGroup

    from tests.campaigns.fuzz import refusals

    get_accelerator().is_fp16_supported = lambda: True
    os.chdir(tempfile.gettempdir())
    model = refusals.model_of(given)
    called: list[str] = []
    with (
        refusals.noting(ProcessGroup, called),
        mock.patch("torch.distributed.new_group", refusals.noted_groups(called)),
    ):
        try:
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given.config)
        except Exception as error:
            return type(error).__name__, str(error), ", ".join(called)
    engine.destroy()
    return "", "", ""
