# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The examples, started as on two nodes: two torchrun agents with two CPU ranks each."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT
from tests.harness.frameworks.table import needs

NODES, RANKS_PER_NODE = 2, 2
EXAMPLES = ROOT / "scripts" / "examples"


def start(example: str, folder: Path) -> str:
    """Run an example on all nodes, in an empty folder; what it has written."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES)]
    command += ["--nproc-per-node", str(RANKS_PER_NODE), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    agents = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), str(EXAMPLES / example)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(NODES)
    ]
    try:
        written = [agent.communicate(timeout=280)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
    assert [agent.returncode for agent in agents] == [0] * NODES, written
    return "\n".join(written)


def test_ones_own_script_trains_under_nig(tmp_path: Path) -> None:
    written = start("own_script.py", tmp_path)
    assert written.count("NIG (p=N, g=I, os=G; stage 2) over 4 data-parallel ranks in 2 group(s) of 2") == 1
    losses = [float(loss) for loss in re.findall(r"rank \d: last loss (\d\.\d+)", written)]
    assert len(losses) == 4 and all(loss < 0.9 for loss in losses), losses  # 1 is what they begin with


@pytest.mark.frameworks
@needs("transformers", "accelerate")
def test_a_trainer_trains_under_iig(tmp_path: Path) -> None:
    written = start("trainer.py", tmp_path)
    assert written.count("IIG (p=I, g=I, os=G; stage 3) over 4 data-parallel ranks in 2 group(s) of 2") == 1
    assert written.count("'train_loss'") == 4
    (checkpoint,) = (tmp_path / "build" / "trainer").glob("checkpoint-*")
    assert {path.name for path in checkpoint.iterdir()} >= {"latest", "zero_to_fp32.py"}


# Others: what rank 0 logs, what losses begin with, and the packages that they need.
OTHERS = {
    "muon.py": (["NIG (p=N, g=I, os=G; stage 2)"], 1.0, ()),
    "lora.py": (["ING (p=I, g=N, os=G; stage 3)"], 5.5, ("transformers", "peft")),  # 5.5: one of 256 tokens
    "moe_layers.py": (["NIG (p=N, g=I, os=G; stage 2)", "experts of ep_size_2 over 2 in 2 group(s) of 1"], 1.0, ()),
    "autoep.py": (["NIG (p=N,", "experts of ep_size_2 over 2 in 2 group(s) of 1"], 5.5, ("transformers",)),
    "packed_experts.py": (["IIG (p=I, g=I,", "MixtralExperts", "2 windows"], 5.5, ("transformers",)),
}


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=[pytest.mark.frameworks, needs(*packages)] if packages else [])
        for name, (_, _, packages) in OTHERS.items()
    ],
)
def test_an_example_trains_under_its_strategy(ranks: Any, example: str) -> None:
    """In rank processes that have imported torch and DeepSpeed, as on two nodes."""
    logged, first, _ = OTHERS[example]
    (lines, _), *_ = found = ranks(4).run(example_case, str(EXAMPLES / example))
    for words in (*logged, "over 4 data-parallel ranks in 2 group(s) of 2"):
        assert any(words in line for line in lines), (words, lines)
    for number, (_, printed) in enumerate(found):
        (loss,) = re.findall(rf"rank {number}: last loss (\d\.\d+)", printed)
        assert float(loss) < 0.9 * first, printed


def example_case(path: str) -> tuple[list[str], str]:
    """What a rank logs and prints."""
    import contextlib
    import io
    import runpy
    from unittest import mock

    import torch

    from tests.harness.logs import is_ours
    from tests.harness.logs import logged as logged_lines

    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    torch._dynamo.config.disable = True  # a compiler takes minutes for Muon's iterations
    with (
        logged_lines() as lines,
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(torch.distributed, "destroy_process_group") as ended,  # the harness does it
    ):
        runpy.run_path(path, run_name="__main__")
    ended.assert_called_once_with()
    return [line for _, line in lines if is_ours(line)], printed.getvalue()
