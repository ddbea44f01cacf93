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
    from tests.harness import training
    from tests.harness.logs import is_ours, logged

    found = []
    for size in (2, 4):
        with logged() as lines:
            training.train(training.Job(steps=1), training.placed("NIG", size, zeropp_loco_param={}))
        found.append([text for _, text in lines if is_ours(text) and "loco" in text.lower()])
    return found[0], found[1]


def test_monitor_comms_logger_and_timers(ranks: Any, tmp_path: Path) -> None:
    (records, timed, looks), *others = ranks(4).run(monitor_case, str(tmp_path))
    assert looks == 3 and all(looks == 0 for *_, looks in others)  # only rank 0 has writers
    assert "inter_loco_reduce_scatter" in records and "inter_reduce_scatter" not in records
    assert timed == {"loco_compress", "loco_decompress"}
    for name, low, high in (("relative_error", 0.05, 0.25), ("compression", 5.0, 7.8)):
        (file,) = tmp_path.rglob(f"*Train_LoCo_{name}.csv")
        rows = list(csv.reader(file.read_text().splitlines()))[1:]
        assert len(rows) == 3, rows
        assert all(low < float(value) < high for _, value in rows), (name, rows)


def monitor_case(folder: str) -> tuple[list[str], set[str], int]:
    """Train three steps with all of them on; names of records of communication, of timers that have run; looks."""
    from unittest import mock

    from deepspeed.comm.comm import comms_logger

    from deepspeed_ext.loco.hop import LocoHop
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
    with mock.patch.object(LocoHop, "_note", autospec=True, side_effect=LocoHop._note) as note:
        training.train(job, training.placed("NIG", zeropp_loco_param={}), look)
    comms_logger.enabled = False
    return list(comms_logger.comms_dict), timed, note.call_count


def test_what_is_looked_at_is_a_sample_that_the_host_does_not_wait_for(ranks: Any) -> None:
    for waits, numel, errors in ranks(2).run(sample_case)[:1]:
        assert waits == 0 and numel <= 2**12
        for sample, whole in errors:
            assert 0.05 < sample < 0.25 and abs(sample / whole - 1) < 0.1, errors


def sample_case() -> tuple[int, int, list[tuple[float, float]]]:
    """Waits of the host in reductions, elements looked at, relative errors of a sample and of the whole, by step."""
    from unittest import mock

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from deepspeed_ext.comm.hops import Span
    from deepspeed_ext.comm.schedule import Started
    from deepspeed_ext.loco import hop as loco
    from deepspeed_ext.loco.settings import LocoSettings

    waits: list[Any] = []

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """See TorchDispatchMode."""
            waits.extend([func] if "_local_scalar_dense" in str(func) else [])
            return func(*args, **(kwargs or {}))

    hop = loco.LocoHop(None, "hop", LocoSettings())
    width, errors, noted = 2**14, [], []
    contents = tuple((Span(0, row, 0, width),) for row in range(2))
    compensated = hop._compensated
    with (
        mock.patch.object(loco, "LOOK", 2**12),
        mock.patch.object(hop, "_compensated", lambda *given: noted.append(compensated(*given)) or noted[-1]),
    ):
        for step in range(3):
            flat = torch.randn(2 * width, generator=torch.Generator().manual_seed(step))
            given, arrived = flat.clone(), torch.empty(2 * width)
            if step:
                given += hop.errors._decode(hop.errors._errors[contents].kept, [width] * 2)
            hop.look = True
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
