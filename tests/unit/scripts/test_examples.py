# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The README's two examples, started as on two nodes: two torchrun agents with two CPU ranks each."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

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
