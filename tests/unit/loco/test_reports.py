# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What LoCo tells: one line at the start, events for DeepSpeed's monitor, records of its comms logger, timers."""

import csv
from pathlib import Path
from typing import Any


def test_one_line_says_what_runs_and_where_there_is_nothing_to_compress(ranks: Any) -> None:
    for rank, (several, one) in enumerate(ranks(4).run(lines_case)):
        expected = "LoCo: gradients cross between 2 groups in 4 bits, blocks of 128, with error feedback in 8 bits"
        assert [expected in line for line in several] == ([True] if rank == 0 else [])
        assert ["nothing is compressed" in line for line in one] == ([True] if rank == 0 else [])


def lines_case() -> tuple[list[str], list[str]]:
    """Lines about LoCo with two groups and with one."""
    import training
    from logs import is_ours, logged

    found = []
    for size in (2, 4):
        with logged() as lines:
            training.train(training.Job(steps=1), training.placed("NIG", size, zeropp_loco_param={}))
        found.append([text for _, text in lines if is_ours(text) and "loco" in text.lower()])
    return found[0], found[1]


def test_monitor_comms_logger_and_timers(ranks: Any, tmp_path: Path) -> None:
    records, timed = ranks(4).run(monitor_case, str(tmp_path))[0]
    assert "inter_loco_reduce_scatter" in records and "inter_reduce_scatter" not in records
    assert timed == {"loco_compress", "loco_decompress"}
    for name, low, high in (("relative_error", 0.05, 0.25), ("compression", 5.0, 7.8)):
        (file,) = tmp_path.rglob(f"*Train_LoCo_{name}.csv")
        rows = list(csv.reader(file.read_text().splitlines()))[1:]
        assert len(rows) == 3, rows
        assert all(low < float(value) < high for _, value in rows), (name, rows)


def monitor_case(folder: str) -> tuple[list[str], set[str]]:
    """Train three steps with all of them on; names of records of communication, and of timers that have run."""
    import training
    from deepspeed.comm.comm import comms_logger

    config = {
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        "comms_logger": {"enabled": True, "prof_all": True},
        "wall_clock_breakdown": True,
        "steps_per_print": 100,
    }
    timed: set[str] = set()

    def look(engine: Any) -> None:
        timed.update(name for name in engine.timers.get_timers() if name.startswith("loco_"))

    job = training.Job(sizes=(64, 128, 128, 7), steps=3, empty=False, config=config)
    training.train(job, training.placed("NIG", zeropp_loco_param={}), look)
    comms_logger.enabled = False
    return list(comms_logger.comms_dict), timed
