# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ranks are asked to run. The process that draws the cases imports this module, and so no torch."""

from collections.abc import Callable
from typing import Any

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
    import contextlib
    import os
    import tempfile
    from unittest import mock

    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch.distributed import ProcessGroup

    from tests.harness.stream_order import _COLLECTIVES

    get_accelerator().is_fp16_supported = lambda: True
    os.chdir(tempfile.gettempdir())
    model = _model_of(given)
    called: list[str] = []

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return method(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for name in filter(lambda name: hasattr(ProcessGroup, name), (*_COLLECTIVES, "barrier")):
            method = noted(name, getattr(ProcessGroup, name))
            patches.enter_context(mock.patch.object(ProcessGroup, name, method))
        new_group = noted("new_group", torch.distributed.new_group)
        patches.enter_context(mock.patch("torch.distributed.new_group", new_group))
        try:
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given.config)
        except Exception as error:
            return type(error).__name__, str(error), ", ".join(called)
    engine.destroy()
    return "", "", ""


def _model_of(given: Contradiction) -> Any:
    """Return a small model of the kind that a contradiction needs."""
    import deepspeed
    import torch
    from torch import nn

    torch.manual_seed(7)
    if given.model == "experts":
        from tests.harness.networks import SQUARE, Routed

        return Routed(SQUARE, None, False)
    with deepspeed.zero.Init(enabled=given.model == "zero.Init"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    if given.model == "compiled":
        model[0] = torch.compile(model[0], backend="eager")
    return model
