# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves that go on beside the training have what saves at once have, wherever they are called, whatever comes next."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.tiers import deep
from tests.harness.training import PARTITIONED, REPLICATED

ALL = (*REPLICATED, *PARTITIONED)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FEW_BITS: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
EVERYTHING = {**FEW_BITS, "paro_overlap_updates": True, "overlap_comm": True}
OUTER = {"paro_outer_optimizer": {"steps": 2}}


def job_of_row(dtype: str, zero: dict[str, Any], optimizer: str = "Adam") -> Any:
    """Two micro-steps a step, two parameter groups, a frozen layer, a buffer; in fp16 an overflow."""
    import dataclasses

    from tests.harness import saves, snapshots

    more = {"zero_force_ds_cpu_optimizer": False} if "offload_optimizer" in zero else {}
    job = snapshots.job_of(dtype, zero, optimizer, **saves.ASIDE, **more)
    return dataclasses.replace(job, accumulation=2)


ROWS = [
    ("NIG", "fp32", EVERYTHING, "Adam"),
    ("IIG", "bf16", FEW_BITS, "Adam"),
    ("NIG", "bf16", {}, "Muon"),
    ("III", "bf16", OUTER, "Adam"),
    ("NII", "fp16", OFFLOAD, "Adam"),
]
DEEP = [(name, dtype, zero, "Adam") for name in ALL for dtype in ("fp32", "bf16", "fp16") for zero in ({}, OFFLOAD)]
DEEP += [(name, "bf16", {}, "Muon") for name in ALL]
DEEP += [(name, "bf16", FEW_BITS, "Adam") for name in ("NGG", "NIG", "IIG", "ING", "IGG")]
DEEP += [(name, "fp32", EVERYTHING, "Adam") for name in ("NGG", "NNG")]
DEEP += [(name, dtype, OUTER, "Adam") for name in ("III", "NII", "INI", "NNI") for dtype in ("fp32", "bf16")]


@pytest.mark.parametrize("name, dtype, zero, optimizer", [*ROWS, *deep(*DEEP)])
def test_files_are_those_of_saves_at_once(
    ranks: Any, tmp_path: Path, name: str, dtype: str, zero: dict[str, Any], optimizer: str
) -> None:
    for found in ranks(4).run(twins_case, str(tmp_path), name, dtype, zero, optimizer):
        assert found.different == [] and found.files >= 28 and found.same, tuple(found)


def twins_case(folder: str, name: str, dtype: str, zero: dict[str, Any], optimizer: str) -> Any:
    """See ``saves.py``."""
    from tests.harness import saves

    return saves.twins_case(folder, name, job_of_row(dtype, zero, optimizer))
