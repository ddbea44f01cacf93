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
from tests.harness import examples
from tests.harness.frameworks.comparison import needs
from tests.harness.installed import since

NODES = 2
# As ranks of other tests: DeepSpeed has an all-reduce for hosts that takes minutes to compile.
WITHOUT_ITS_ALL_REDUCE = """
import runpy, sys
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def start(example: str, folder: Path) -> str:
    """Run an example on all nodes, in an empty folder; what it has written."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES)]
    command += ["--nproc-per-node", str(examples.RANKS_PER_NODE)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    script = folder / "without_its_all_reduce.py"
    script.write_text(WITHOUT_ITS_ALL_REDUCE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    agents = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), str(script), str(examples.FOLDER / example)],
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


# Others: what rank 0 logs, what losses begin with, and the packages that they need.
OTHERS = {
    "muon.py": (["NIG (p=N, g=I, os=G; stage 2)"], 1.0, ()),
    "lora.py": (["ING (p=I, g=N, os=G; stage 3)"], 5.5, ("transformers", "peft")),  # 5.5: one of 256 tokens
    "moe_layers.py": (["NIG (p=N, g=I, os=G; stage 2)", "experts of ep_size_2 over 2 in 2 group(s) of 1"], 1.0, ()),
    "autoep.py": (["NIG (p=N,", "experts of ep_size_2 over 2 in 2 group(s) of 1"], 5.5, ("transformers",)),
    "packed_experts.py": (["IIG (p=I, g=I,", "MixtralExperts", "2 windows"], 5.5, ("transformers",)),
}
SINCE = {"autoep.py": [since(transformers="5.23")], "packed_experts.py": [since(transformers="5.0")]}


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=[pytest.mark.frameworks, needs(*packages), *SINCE.get(name, ())] if packages else [])
        for name, (_, _, packages) in OTHERS.items()
    ],
)
def test_an_example_trains_under_its_strategy(ranks: Any, example: str) -> None:
    """In rank processes that have imported torch and DeepSpeed, as on two nodes."""
    logged, first, _ = OTHERS[example]
    (lines, _), *_ = found = ranks(4).run(examples.run, example)
    for words in (*logged, "over 4 data-parallel ranks in 2 group(s) of 2"):
        assert any(words in line for line in lines), (words, lines)
    for number, (_, printed) in enumerate(found):
        (loss,) = re.findall(rf"rank {number}: last loss (\d\.\d+)", printed)
        assert float(loss) < 0.9 * first, printed
