# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What LoCo reports: one line at the start, events for DeepSpeed's monitor, records of its comms logger, timers."""

import csv
import re
from pathlib import Path
from typing import Any


def test_one_line_reports_what_is_compressed(ranks: Any) -> None:
    gradients = "LoCo: gradients cross between 2 groups in 4 bits, blocks of 128, with error feedback in 8 bits"
    updates = (
        "updated parameters cross as differences between 2 groups in 4 bits, blocks of 128; every 1024 steps they"
    )
    sums = "sums of gradients come back between 2 groups in 4 bits, blocks of 32; every 1024 steps what they lack"
    nothing = tuple(f"{key}: there is one group, so nothing crosses" for key in ("loco_param", "quantized_updates"))
    for rank, found in enumerate(ranks(4).run(lines_case)):
        for lines, expected in zip(found, ((gradients, updates), (gradients, sums), nothing), strict=True):
            assert len(lines) == (2 if rank == 0 else 0), lines
            assert [sum(said in line for line in lines) for said in expected] == [rank == 0] * 2, lines


def lines_case() -> list[list[str]]:
    """Lines about LoCo and updates, with two groups and with one."""
    from tests.harness import training
    from tests.harness.logs import is_ours, logged

    found = []
    keys: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
    for name, size in (("IIG", 2), ("III", 2), ("NIG", 4)):
        with logged() as lines:
            training.train(training.Job(steps=1), training.placed(name, size, **keys))
        found.append([text for _, text in lines if is_ours(text) and re.search("LoCo:|loco_param:|updates:", text)])
    return found


def test_monitor_comms_logger_and_timers(ranks: Any, tmp_path: Path) -> None:
    (records, timed, looks), *others = ranks(4).run(monitor_case, str(tmp_path))
    assert looks == 12 and all(looks == 0 for *_, looks in others)  # only rank 0 has writers
    for expected in ({"inter_loco_reduce_scatter", "inter_difference_all_gather"}, {"inter_sums_all_gather"}):
        between = {name for name in records.pop(0) if name.startswith("inter_")}
        assert between == {"inter_loco_reduce_scatter"} | expected
    assert timed == {"loco_compress", "loco_decompress"}
    for name, low, high in (
        ("LoCo_relative_error", 0.05, 0.25),
        ("LoCo_compression", 5.0, 7.8),
        ("Updates_relative_error", 0.05, 0.25),
        ("Updates_compression", 5.0, 7.8),
    ):
        (file,) = tmp_path.rglob(f"*Train_{name}.csv")
        rows = [row for row in csv.reader(file.read_text().splitlines()) if row[0] != "step"]
        assert len(rows) == 6, rows
        assert all(low < float(value) < high for _, value in rows), (name, rows)


def monitor_case(folder: str) -> tuple[list[list[str]], set[str], int]:
    """Train three steps with all of them on; names of records of communication, also where sums come back; of timers
    that have run; looks."""
    from unittest import mock

    from deepspeed.comm.comm import comms_logger

    from deepspeed_ext.loco.sampling import Sampling
    from tests.harness import training

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
    records = []
    with mock.patch.object(Sampling, "note", autospec=True, side_effect=Sampling.note) as note:
        for name in ("NIG", "NII"):
            comms_logger.comms_dict.clear()
            training.train(job, training.placed(name, zeropp_loco_param={}, paro_quantized_updates={}), look)
            records.append(list(comms_logger.comms_dict))
    comms_logger.enabled = False
    return records, timed, note.call_count


def test_errors_are_sampled_without_a_wait_of_the_host(ranks: Any) -> None:
    for waits, numel, errors in ranks(2).run(sample_case)[:1]:
        assert waits == 0 and numel <= 2**12
        for sample, whole in errors:
            assert 0.05 < sample < 0.25 and abs(sample / whole - 1) < 0.1, errors


def sample_case() -> tuple[int, int, list[tuple[float, float]]]:
    """Waits of the host in reductions, elements looked at, relative errors of a sample and of the whole, by step."""
    from unittest import mock

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from deepspeed_ext.comm.spans import ShardSpan
    from deepspeed_ext.comm.transfer_queue import Started
    from deepspeed_ext.loco import hop as loco
    from deepspeed_ext.loco import sampling
    from deepspeed_ext.loco.settings import LocoSettings

    waits: list[Any] = []

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """See TorchDispatchMode."""
            waits.extend([func] if "_local_scalar_dense" in str(func) else [])
            return func(*args, **(kwargs or {}))

    hop = loco.LocoHop(None, "hop", LocoSettings())
    width, errors, noted = 2**14, [], []
    contents = tuple((ShardSpan(0, row, 0, width),) for row in range(2))
    compensated = loco.compensated
    with (
        mock.patch.object(sampling, "LOOK", 2**12),
        mock.patch.object(loco, "compensated", lambda *given: noted.append(compensated(*given)) or noted[-1]),
    ):
        for step in range(3):
            flat = torch.randn(2 * width, generator=torch.Generator().manual_seed(step))
            given, arrived = flat.clone(), torch.empty(2 * width)
            if step:
                given += hop.errors._decode(hop.errors._errors[contents].kept, [width] * 2)
            hop.sent.look = True
            with (
                Waits(),
                mock.patch.object(hop.collectives, "all_to_all", wraps=hop.collectives.all_to_all) as exchange,
            ):
                Started(hop.reduce_scatter(flat, [width] * 2, contents)).finish()
            for row, part in zip(exchange.call_args.args[1].view(2, -1), arrived.split(width), strict=True):
                loco.ops.decompress(row.view(1, -1), part, hop.packing)
            errors.append((hop.sent.relative_error, ((given - arrived).norm() / given.norm()).item()))
            hop.errors.finish_step(True)
    return len(waits), max(numbers.numel() for numbers in noted), errors


def test_one_message_of_a_step_is_looked_at() -> None:
    import torch

    from deepspeed_ext.loco.packing import Packing
    from deepspeed_ext.loco.sampling import Sampling

    sampling, packing = Sampling(), Packing(4, 32)
    for step in range(2):
        sampling.begin(look=True)
        seen = [sampling.given(100, packing, lambda blocks: torch.zeros(len(blocks))) for _ in range(3)]
        assert [given is not None for given in seen] == [True, False, False], step
