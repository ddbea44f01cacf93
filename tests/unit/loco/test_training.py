# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training with LoCo: every strategy and stage, error feedback, and log lines."""

import csv
import itertools
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.comm.comm import comms_logger

from deepspeed_ext.loco.sampling import Sampling
from deepspeed_ext.zero.stage12 import Stage12Optimizer
from tests.harness import training
from tests.harness.logs import is_ours, logged
from tests.harness.tiers import deep, with_cases

ALL = (*training.REPLICATED, *training.PARTITIONED)

ROWS = [("fp32", 1, ("NNN", "NGG", "III", "GGG", "2", "3")), ("bf16", 3, ("NIG", "IIG")), ("fp16", 2, ("NIG", "IIG"))]


@pytest.mark.quick
@with_cases("dtype, accumulation, names", *ROWS, *deep(("fp32", 1, (*ALL, *"123"))))
def test_every_strategy_and_stage(ranks: Any, dtype: str, accumulation: int, names: Any) -> None:
    """Gradients match stock within quantization: a factor of 2 in any of them would show in the norms."""
    for rows in ranks(4).run(parity_case, dtype, accumulation, names):
        assert [row.strategy for row in rows] == [*names]
        for row in rows:
            assert row.norms < 0.03 and row.weights < 0.02 and row.losses < 0.01, row
            assert row.weights > 1e-4, row  # something was quantized
            assert row.replicas_equal and row.same_decisions, row


def parity_case(dtype: str, accumulation: int, names: tuple[str, ...]) -> list[Any]:
    job = training.Job(steps=4, accumulation=accumulation, dtype=dtype, groups=2, empty=False, zero=training.SMALL)
    stock, rows = training.train(job, {"stage": 2}), []
    for name in names:
        keys = {**training.placed(name), "paro_group_size": 2, "zeropp_loco_param": {}}
        kind: list[str] = []
        ours = training.train(
            job, keys, look=lambda e, kind=kind: kind.append(type(e.optimizer.families["dense"].reduce.inter).__name__)
        )
        rows.append(training.difference(name, ours, stock, kind[0]))
        assert kind == ["LocoHop"]
    return rows


@with_cases("accumulation, names", (2, ("NGG",)), *deep((1, ALL), (2, ("IIG",))))
def test_unsent_gradients_are_sent_in_later_steps(ranks: Any, accumulation: int, names: tuple[str, ...]) -> None:
    """Average the same gradients over 8 steps: without feedback, the error is that of one step, about 0.1."""
    for name, (fed, unfed) in ranks(4).each(feedback_case, names, accumulation):
        assert fed < 0.04 < 0.08 < unfed, (name, fed, unfed)


def feedback_case(name: str, accumulation: int) -> list[float]:
    """Return the mean gradient's relative error, with and without feedback; with accumulation, steps skip layers."""
    steps = 8
    job = training.Job(accumulation=accumulation, clipping=0.0, empty=False, groups=2, zero=training.SMALL)

    def mean_gradient(keys: dict[str, Any]) -> torch.Tensor:
        engine, _ = training.make_engine(job, keys)
        optimizer, total = engine.optimizer, torch.zeros(())
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        data = list(itertools.islice(training.batches(job), accumulation))
        for step in range(steps):
            for number, (x, y) in enumerate(data):
                skipped = [1 + step % 2] if accumulation > 1 else []
                engine.backward(((engine(x, skipped) - y) ** 2).mean())
                if number == accumulation - 1:
                    if isinstance(optimizer, Stage12Optimizer):
                        parts = [optimizer.shard_gradient(group) for group in range(2)]
                    else:
                        parts = [optimizer.gradients["dense"].shard]
                    total = total + torch.cat(parts).float()
                engine.step()
        engine.destroy()
        return total / steps

    keys, errors = training.placed(name), []
    exact = mean_gradient(keys)
    for loco in ({"err_beta": 0.0}, {"error_feedback": False}):
        off = torch.stack([(mean_gradient({**keys, "zeropp_loco_param": loco}) - exact).norm(), exact.norm()])
        squares = off.square()
        dist.all_reduce(squares)
        errors.append((squares[0] / squares[1]).sqrt().item())
    return errors


@pytest.mark.quick
def test_padding_stays_zero(ranks: Any) -> None:
    names, padded = ("NNN", "NIG", "NGG", "III", "GGG"), set()
    for name, (elements, largest) in ranks(4).each(padding_case, names):
        assert largest == 0, name
        padded |= {name} if elements else set()
    assert padded == set(names)  # on some rank


def padding_case(name: str) -> tuple[int, float]:
    """Return the padding elements in this rank's shards, and their largest value at the boundary, rotated."""
    job = training.Job(sizes=(33, 37, 65, 7), empty=False, groups=2)
    engine, _ = training.make_engine(job, training.placed(name, zeropp_loco_param={"hadamard": True}))
    optimizer, data = engine.optimizer, training.batches(job)
    padding = []
    for number in range(2):
        training.micro_step(engine, job, number, *next(data))
        if isinstance(optimizer, Stage12Optimizer):
            paddings = optimizer.groups_padding
            padding = [optimizer.shard_gradient(i)[-count:] for i, count in enumerate(paddings) if count]
        else:
            rank = training.dist.get_rank(optimizer.dp_process_group)
            padding = []
            for param in optimizer.gradients["dense"]._params:
                chunk = param.ds_tensor.ds_numel
                present = min(chunk, max(0, param.ds_numel - rank * chunk))
                padding.append(optimizer.reduction.shards.chunks[param.ds_id][present:])
        padding = [part.clone() for part in padding if part.numel()]
        engine.step()
    return sum(part.numel() for part in padding), max((part.abs().max().item() for part in padding), default=0.0)


def test_dynamic_graphs_offload_and_settings(ranks: Any) -> None:
    for case, norms, weights, equal in ranks(4).rows(options_case):
        assert norms < 0.06 and weights < 0.03 and equal, (case, norms, weights)


def test_errors_are_offloaded_with_the_optimizer(ranks: Any) -> None:
    for name, (weights, devices) in ranks(4).each(offload_case, ("NIG", "IIG")):
        assert weights < 1e-6 and devices == [("cpu", name != "NIG")], name


def offload_case(name: str) -> tuple[float, list[tuple[str, bool]]]:
    """Return the largest difference of weights to the run without offload; where errors are, and whether pinned."""
    job, devices = training.Job(optimizer="Adam", accumulation=2, empty=False, zero=training.SMALL), []

    def look(engine: Any) -> None:
        devices.append((engine.optimizer.error_state.device, engine.optimizer.error_state.pinned))

    keys = training.placed(name, zeropp_loco_param={})
    plain = training.train(job, keys)
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": name != "NIG"}}
    ours = training.train(job, keys | offload, look)
    return (ours.weights - plain.weights).abs().max().item(), devices


def options_case() -> list[tuple[str, float, float, bool]]:
    rows, stocks = [], dict[str, Any]()
    skipped = [(1, 1), (4, 0), (4, 2), (7, 1)]
    for case, names, more, loco, job in (
        ("skipped layers", ("NGG", "IIG"), {}, {}, {"skipped": skipped, "accumulation": 2}),
        ("hadamard", ("IGG",), {}, {"hadamard": True}, {}),
        ("16 bits kept", ("NIG",), {}, {"error_bits": 16, "block_size": 32}, {}),
        ("8 bits", ("NII",), {}, {"bits": 8}, {}),
        ("overlap", ("NGG", "IIG"), {"overlap_comm": True}, {}, {}),
        ("frozen", ("NIG", "GNG"), {}, {}, {"frozen": (1,)}),
    ):
        task = training.Job(steps=4, empty=False, zero={**training.SMALL, **more}, **job)
        stock = stocks[str(task)] = stocks.get(str(task)) or training.train(task, {"stage": 2})
        for name in names:
            ours = training.train(task, training.placed(name, zeropp_loco_param=loco))
            row = training.difference(name, ours, stock, "")
            rows.append((f"{case} {name}", row.norms, row.weights, row.replicas_equal))
    return rows


def test_quantized_gradients_without_loco_have_no_feedback(ranks: Any) -> None:
    for settings, remembers in ranks(4).run(alone_case):
        assert settings["error_feedback"] is False and settings["bits"] == 4 and not remembers


def alone_case() -> tuple[dict[str, Any], bool]:
    """Return the settings of the hop, and whether it has errors."""
    observed: list[Any] = []

    def look(engine: Any) -> None:
        hop = engine.optimizer.families["dense"].reduce.inter
        observed.append((hop.settings.as_dict(), bool(hop.errors._errors)))

    training.train(training.Job(empty=False), training.placed("NIG", zero_quantized_gradients=True), look)
    return observed[0]


def test_one_line_reports_what_is_compressed(ranks: Any) -> None:
    gradients = "loco_param: gradients are reduced between 2 groups in 4 bits, blocks of 128, with error feedback in 8"
    updates = "updated parameters are sent as differences between 2 groups in 4 bits, blocks of 128; every 1024 steps"
    sums = "gradient sums are gathered between 2 groups in 4 bits, blocks of 32; every 1024 steps their quantization"
    nothing = tuple(f"{key}: there is one group, so nothing is sent" for key in ("loco_param", "quantized_updates"))
    for rank, lines_by_run in enumerate(ranks(4).run(lines_case)):
        for lines, expected in zip(lines_by_run, ((gradients, updates), (gradients, sums), nothing), strict=True):
            assert len(lines) == (2 if rank == 0 else 0), lines
            assert [sum(text in line for line in lines) for text in expected] == [rank == 0] * 2, lines


def lines_case() -> list[list[str]]:
    said = []
    keys: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
    for name, size in (("IIG", 2), ("III", 2), ("NIG", 4)):
        with logged() as lines:
            training.train(training.Job(steps=1), training.placed(name, size, **keys))
        said.append([text for _, text in lines if is_ours(text) and re.search("loco_param:|updates:", text)])
    return said


def test_monitor_comms_logger_and_timers(ranks: Any, tmp_path: Path) -> None:
    (records, timed, looks), *other_ranks = ranks(4).run(monitor_case, str(tmp_path))
    assert looks == 12 and all(looks == 0 for *_, looks in other_ranks)  # only rank 0 has writers
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
    """Train three steps with all of them enabled; return the names of communication records, including gathers of
    sums, the timers that have run, and the number of samples."""
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
    with mock.patch.object(Sampling, "record_error", autospec=True, side_effect=Sampling.record_error) as note:
        for name in ("NIG", "NII"):
            comms_logger.comms_dict.clear()
            training.train(job, training.placed(name, zeropp_loco_param={}, paro_quantized_updates={}), look)
            records.append(list(comms_logger.comms_dict))
    comms_logger.enabled = False
    return records, timed, note.call_count
