# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Steps that are recorded on a device with streams: nothing loses its order, and waits of streams are seen."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import stream_cases


@pytest.mark.parametrize("name", ["NIG", "IIG"])
def test_recorded_steps_keep_their_order_and_show_waits_of_streams(ranks: Any, tmp_path: Path, name: str) -> None:
    for watched in ranks(4).run(stream_cases.watch_case, name, "reported", str(tmp_path)):
        assert not watched.findings and watched.pairs
    report = json.loads((tmp_path / name / "report.json").read_text())
    assert {row["hop"] for row in report["hops"]} == {"within", "between"}
    training = next(lane for lane in report["timelines"][0]["lanes"] if lane["lane"] == "training")
    kinds = {span[3] for span in training["spans"]}
    assert {"forward", "backward", "update", "wait"} <= kinds
    assert "other" not in kinds  # a device does that beside what the host does
    assert all(row["busy"] > 0 for row in report["operations"])
