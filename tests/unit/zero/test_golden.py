# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Weights after 20 steps have recorded digests, so no commit changes the order of a sum unnoticed. RECORD_GOLDEN=1 as
an environment variable records them: on another processor, or after a change that is meant to change bits."""

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist

from tests.campaigns.bits import digest
from tests.harness import training
from tests.harness.tiers import deep
from tests.harness.training import DTYPES, PARTITIONED, REPLICATED, SMALL, Job, Network, placed

FILE = Path(__file__).with_name("golden.json")
LOCO, UPDATES = {"zeropp_loco_param": {}}, {"paro_quantized_updates": {"resync_T": 7}}
SETS: dict[str, Any] = {"exact": {}, "LoCo": LOCO, "updates": UPDATES, "LoCo, updates": LOCO | UPDATES}
SETS["4 groups"] = {"group_size": 1}  # with 2 groups of 2, a sum has 2 parts, whose order does not matter


def numbers(number: int, *shape: int) -> torch.Tensor:
    """Return multiples of 1/256, exact in bf16; random ones may differ between versions of PyTorch."""
    mixed = (torch.arange(torch.Size(shape).numel()).view(shape) + 10007 * number) * 40503 % 65521 * 30011 % 65521
    return (mixed % 129 - 64) / 256


def network(*arguments: Any) -> Network:
    model = Network(*arguments)
    for number, parameter in enumerate(model.parameters()):
        parameter.data = numbers(number, *parameter.shape)
    return model


def batches(job: Job) -> Any:
    for number in itertools.count(1000 * (dist.get_rank() + 1)):
        yield tuple(4 * numbers(number, 2, job.sizes[end]).to(DTYPES[job.dtype]) for end in (0, -1))


@mock.patch.object(training, "batches", batches)
def trained(dtype: str, options: str, names: list[str]) -> dict[str, dict[str, str]]:
    job, results = Job(steps=20, accumulation=2, dtype=dtype, network=network, zero=SMALL), {}
    sizes = {key: parameter.numel() for key, parameter in network(job.sizes).named_parameters()}
    for name in names:
        run = training.train(job, placed(name, **SETS[options]))
        tensors = zip(["norms", *sizes], [torch.tensor(run.norms), *run.weights.split([*sizes.values()])], strict=True)
        results[name] = {key: digest([tensor])[:8] for key, tensor in tensors if tensor.numel()}
    return results


@pytest.mark.parametrize("dtype, options", deep(*itertools.product(("fp32", "bf16"), SETS)))
def test_bits_are_those_of_earlier_commits(ranks: Any, dtype: str, options: str) -> None:
    cpu = {*re.findall("GenuineIntel|AuthenticAMD|avx512_bf16|amx_bf16", Path("/proc/cpuinfo").read_text())}
    versions = (f"torch {torch.__version__}", f"DeepSpeed {deepspeed.__version__}")
    environment = ", ".join((*versions, torch.backends.cpu.get_cpu_capability(), *sorted(cpu)))
    golden, record = json.loads(FILE.read_text(encoding="utf-8")), "RECORD_GOLDEN" in os.environ
    if environment not in golden and not record:
        pytest.skip(f"{FILE.name} has no digests for {environment}: run this with RECORD_GOLDEN=1 to record them")
    names = [name for name in (*REPLICATED, *PARTITIONED) if "updates" not in options or name[0] != "G"]
    found, *others = ranks(4).run(trained, dtype, options, names)
    assert all(other == found for other in others), "replicas differ"
    rows = {f"{dtype}, {options}, {name}": tensors for name, tensors in found.items()}
    if record:
        golden.setdefault(environment, {}).update({row: " ".join(rows[row].values()) for row in rows})
        FILE.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    for row, tensors in rows.items():
        before = dict(zip(tensors, golden[environment][row].split(), strict=True))
        assert [row, *(key for key in tensors if tensors[key] != before[key])] == [row]
