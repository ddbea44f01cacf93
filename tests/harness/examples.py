# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs an example in rank processes, as on nodes of two ranks each."""

import contextlib
import io
import os
import runpy
from unittest import mock

from scripts import ROOT
from tests.harness.logs import is_ours, logged

FOLDER = ROOT / "scripts" / "examples"
RANKS_PER_NODE = 2


def run(example: str, destroys: int = 1) -> tuple[list[str], str]:
    """Run an example, which destroys its groups so often; return the log lines and the output of a rank."""
    import torch

    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    torch._dynamo.config.disable = True  # a compiler takes minutes for Muon's iterations
    with (
        logged() as lines,
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(torch.distributed, "destroy_process_group") as ended,  # the harness does it
    ):
        runpy.run_path(str(FOLDER / example), run_name="__main__")
    assert ended.call_count == destroys
    return [line for _, line in lines if is_ours(line)], printed.getvalue()
