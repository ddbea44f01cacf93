# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training with LoCo: every strategy and stage, bytes on the wire, checkpoints, convergence."""

import math
from typing import Any

import pytest
from training import PARTITIONED, REPLICATED

ALL = (*REPLICATED, *PARTITIONED)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_strategy_and_stage(ranks: Any, dtype: str, accumulation: int) -> None:
    """Gradients of stock, to within quantization: a factor of 2 in any of them would show in the norms."""
    for rows in ranks(4).run(parity_case, dtype, accumulation, timeout=100):
        assert [row.strategy for row in rows] == [*ALL, "1", "2", "3"]
        for row in rows:
            assert row.norms < 0.03 and row.weights < 0.02 and row.losses < 0.01, row
            assert row.weights > 1e-4, row  # something was quantized
            assert row.replicas_equal and row.same_decisions, row


def parity_case(dtype: str, accumulation: int) -> list[Any]:
    """Differences to stock ZeRO-2."""
    import training

    job = training.Job(steps=6, accumulation=accumulation, dtype=dtype, groups=2, empty=False, zero=training.SMALL)
    stock, rows = training.train(job, {"stage": 2}), []
    for name in (*ALL, "1", "2", "3"):
        keys = {**training.placed(name), "paro_group_size": 2, "zeropp_loco_param": {}}
        kind: list[str] = []
        ours = training.train(
            job, keys, look=lambda e, kind=kind: kind.append(type(e.optimizer._moves.inter).__name__)
        )
        rows.append(training.difference(name, ours, stock, kind[0]))
        assert kind == ["LocoHop"]
    return rows


def test_dynamic_graphs_offload_and_other_settings(ranks: Any) -> None:
    for rows in ranks(4).run(options_case, timeout=100):
        for what, norms, weights, equal in rows:
            assert norms < 0.06 and weights < 0.03 and equal, (what, norms, weights)


def test_errors_are_offloaded_with_the_optimizer(ranks: Any) -> None:
    for rows in ranks(4).run(offload_case):
        for name, weights, devices in rows:
            assert weights < 1e-6 and devices == ["cpu"], name


def offload_case() -> list[tuple[str, float, list[str]]]:
    """Largest difference of weights to the same run without offload; where errors are kept."""
    import training

    rows, job = [], training.Job(optimizer="Adam", accumulation=2, empty=False, zero=training.SMALL)
    for name in ("NIG", "NGG", "IIG"):
        keys, devices = training.placed(name, zeropp_loco_param={}), []
        plain = training.train(job, keys)
        ours = training.train(
            job,
            {**keys, "offload_optimizer": {"device": "cpu"}},
            look=lambda engine, devices=devices: devices.append(engine.optimizer.memory.device),
        )
        rows.append((name, (ours.weights - plain.weights).abs().max().item(), devices))
    return rows


def options_case() -> list[tuple[str, float, float, bool]]:
    """What is configured; differences to stock of norms and weights."""
    import training

    rows = []
    skipped = [(1, 1), (4, 0), (4, 2), (7, 1)]
    for what, names, more, loco, job in (
        ("skipped layers", ("NIG", "NGG", "INI", "IIG"), {}, {}, {"skipped": skipped, "accumulation": 2}),
        ("hadamard", ("NIG", "IGG"), {}, {"hadamard": True}, {}),
        ("16 bits kept", ("NIG", "GGG"), {}, {"error_bits": 16, "block_size": 32}, {}),
        ("8 bits", ("NII",), {}, {"bits": 8}, {}),
        ("overlap", ("NIG", "NGG", "IIG"), {"overlap_comm": True}, {}, {}),
        ("frozen", ("NIG", "GNG"), {}, {}, {"frozen": (1,)}),
    ):
        task = training.Job(steps=5, empty=False, zero={**training.SMALL, **more}, **job)
        stock = training.train(task, {"stage": 2})
        for name in names:
            ours = training.train(task, training.placed(name, zeropp_loco_param=loco))
            row = training.difference(name, ours, stock, "")
            rows.append((f"{what} {name}", row.norms, row.weights, row.replicas_equal))
    return rows


def test_quantized_gradients_alone_are_quantized_without_feedback(ranks: Any) -> None:
    for settings, remembers in ranks(4).run(alone_case):
        assert settings["error_feedback"] is False and settings["bits"] == 4 and not remembers


def alone_case() -> tuple[dict[str, Any], bool]:
    """Settings of the hop, and whether it remembers anything."""
    import training

    found: list[Any] = []
    keys = training.placed("NIG", zero_quantized_gradients=True)
    training.train(training.Job(empty=False), keys, look=lambda engine: found.append(engine.optimizer._moves.inter))
    return found[0].settings.as_dict(), bool(found[0].memory._errors)


@pytest.mark.parametrize("names", [("NIG", "NII", "IIG")])
def test_05_bytes_between_groups(ranks: Any, names: tuple[str, ...]) -> None:
    for name, parameters, counted in ranks(4).run(bytes_case, names)[0]:
        # Of 4 bytes an element: 1/4 in 4.125 bits from the other group, where os = I twice a half, once of it whole.
        width = parameters / 4
        reduced = width * 4.125 / 8
        gathered = 4 * width  # updated parameters, or sums of gradients
        assert counted == pytest.approx(reduced + gathered, rel=0.01), name


def bytes_case(names: tuple[str, ...]) -> list[tuple[str, int, float]]:
    """Mean bytes a rank received from the other group in a step."""
    import training
    from deepspeed import comm as dist

    from deepspeed_ext.traffic import TrafficMeter

    job = training.Job(sizes=(256, 511, 512, 300), empty=False)
    rows = []
    for name in names:
        engine, model = training.make_engine(job, training.placed(name, zeropp_loco_param={}))
        data = training.batches(job)
        for number in range(2):
            meter = TrafficMeter()
            dist.barrier()
            meter.start()
            training.micro_step(engine, job, number, *next(data))
            engine.step()
            if name[0] != "N":
                engine.optimizer.parameters.drain()
            dist.barrier()
            meter.stop()
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        rows.append((name, numel, meter.split(2).inter_mean))
        engine.destroy()
    return rows


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("names", [("NNN", "NII", "NIG", "NGG"), ("INI", "IIG", "IGG", "GGG")], ids=["p=N", "p-cut"])
def test_15_a_run_that_is_resumed_is_the_run(ranks: Any, names: tuple[str, ...], dtype: str, tmp_path: Any) -> None:
    for rows in ranks(4).run(resume_case, names, dtype, str(tmp_path), timeout=100):
        for name, weights, errors, steps in rows:
            assert weights and errors and steps == 5, name


def resume_case(names: tuple[str, ...], dtype: str, folder: str) -> list[tuple[str, bool, bool, int]]:
    """Whether weights and errors are equal to the bit."""
    import snapshots
    import torch
    import training

    job, rows = snapshots.job_of(dtype), []
    for name in names:
        seen = []
        for resumed in (False, True):
            engine, model = training.make_engine(job, training.placed(name, zeropp_loco_param={}))
            steps = snapshots.steps_of(job, 5)
            if resumed:
                engine.load_checkpoint(folder, name)
            else:
                snapshots.run(engine, job, steps[:3], 0)
                engine.save_checkpoint(folder, name)
            snapshots.run(engine, job, steps[3:], 3)
            memory = engine.optimizer.memory
            errors = [error.kept for error in memory._errors.values()]
            seen.append((training.whole_weights(model), errors, memory.steps))
            engine.destroy()
        (weights, errors, _), (again, same, steps) = seen
        equal = len(errors) == len(same) > 0 and all(torch.equal(a, b) for a, b in zip(errors, same, strict=True))
        rows.append((name, torch.equal(weights, again), equal, steps + (dtype == "fp16")))
    return rows


def test_15_at_another_number_of_ranks_the_sum_of_what_was_not_sent_stays(ranks: Any, tmp_path: Any) -> None:
    saved = ranks(4).run(save_case, ("NIG", "IIG", "NNN"), str(tmp_path))[0]
    for world, group in ((2, 1), (6, 2), (4, 1)):
        for name, others in {"NIG": ("IIG", "NGG"), "IIG": ("GGG", "NNG"), "NNN": ("NIG",)}.items():
            for other in others:
                found = ranks(world).run(load_case, name, other, group, str(tmp_path))[0]
                whole = math.sqrt(sum(value**2 for value in saved[name]))
                off = math.sqrt(sum((a - b) ** 2 for a, b in zip(saved[name], found, strict=True)))
                assert whole > 0 and off < 0.02 * whole, (name, other, world, off / whole)


def not_sent(engine: Any) -> list[float]:
    """The sum over all ranks of what they have not sent, by parameter and element."""
    import torch
    from deepspeed import comm as dist

    totals = {
        name: torch.zeros(getattr(parameter, "ds_numel", parameter.numel()))
        for name, parameter in engine.module.named_parameters()
    }
    memory = engine.optimizer.memory
    for run, values in memory.numbers_of(memory.states()):
        for name, start, place in engine.optimizer.whereabouts():
            first, end = max(run.start, place.start), min(run.start + run.numel, place.start + place.numel)
            if (run.buffer, run.row) == (place.buffer, place.row) and first < end:
                at = start + first - place.start
                totals[name][at : at + end - first] += values[first - run.start : end - run.start]
    flat = torch.cat([totals[name] for name in sorted(totals)])
    dist.all_reduce(flat)
    return flat.tolist()


def save_case(names: tuple[str, ...], folder: str) -> dict[str, list[float]]:
    """Save after three steps, and convert; what was not sent then."""
    from pathlib import Path

    import snapshots
    import training
    from deepspeed import comm as dist

    job, left = snapshots.job_of(), {}
    for name in names:
        engine, _ = training.make_engine(job, training.placed(name, zeropp_loco_param={}))
        snapshots.run(engine, job, snapshots.steps_of(job, 3), 0)
        engine.save_checkpoint(folder, name)
        left[name] = not_sent(engine)
        engine.destroy()
        dist.barrier()
        snapshots.convert(folder)
        assert Path(folder, name, "residuals_rank_00000_mp_rank_00.pt").exists()
    return left


def load_case(name: str, other: str, group: int, folder: str) -> list[float]:
    """What is not sent after a load of the converted checkpoint."""
    import snapshots
    import training

    job = snapshots.job_of(checkpoint={"load_universal": True})
    engine, _ = training.make_engine(job, training.placed(other, group, zeropp_loco_param={}))
    engine.load_checkpoint(folder, f"{name}_universal")
    left = not_sent(engine)
    assert engine.optimizer.memory.steps == 3
    snapshots.run(engine, job, snapshots.steps_of(job, 1), 10)
    engine.destroy()
    return left


def test_15_without_residuals_one_warning_and_a_start_at_zero(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2).run(plain_case, str(tmp_path)) == [(True, [])] * 2


def plain_case(folder: str) -> tuple[bool, list[str]]:
    """Load what was saved without LoCo, and the other way round."""
    import snapshots
    import training

    job = snapshots.job_of()
    engine, _ = training.make_engine(job, training.placed("NIG", 1))
    snapshots.run(engine, job, snapshots.steps_of(job, 2), 0)
    engine.save_checkpoint(folder, "plain")
    engine.destroy()
    engine, _ = training.make_engine(job, training.placed("NIG", 1, zeropp_loco_param={}))
    snapshots.run(engine, job, snapshots.steps_of(job, 2), 0)
    engine.save_checkpoint(folder, "loco")
    engine.load_checkpoint(folder, "plain")
    forgotten = not engine.optimizer.memory._errors and engine.optimizer.memory.steps == 0
    engine.destroy()
    engine, _ = training.make_engine(job, training.placed("NIG", 1))
    engine.load_checkpoint(folder, "loco")
    engine.destroy()
    return forgotten, []


@pytest.mark.parametrize("damage", ["missing", "truncated", "other save"])
def test_15_damaged_residuals_are_refused_before_anything_changes(ranks: Any, damage: str, tmp_path: Any) -> None:
    for message, unchanged in ranks(2).run(damage_case, damage, str(tmp_path)):
        assert unchanged
        assert {"missing": "has 1 files", "truncated": "cannot be read", "other save": "another save"}[
            damage
        ] in message


def damage_case(damage: str, folder: str) -> tuple[str, bool]:
    """The error of a load, and whether what was there is there."""
    import shutil
    from pathlib import Path

    import snapshots
    import training
    from deepspeed import comm as dist

    job = snapshots.job_of()
    engine, model = training.make_engine(job, training.placed("NIG", 1, zeropp_loco_param={}))
    for tag in ("first", "second"):
        snapshots.run(engine, job, snapshots.steps_of(job, 1), 0)
        engine.save_checkpoint(folder, tag)
    path = Path(folder, "second", "residuals_rank_00001_mp_rank_00.pt")
    if dist.get_rank() == 0:
        if damage == "missing":
            path.unlink()
        elif damage == "truncated":
            path.write_bytes(path.read_bytes()[:100])
        else:
            shutil.copy(Path(folder, "first", path.name), path)
    dist.barrier()
    before, errors = snapshots.snapshot(engine, model, job), engine.optimizer.memory.states()["messages"]
    message = snapshots.error_of(engine.load_checkpoint, folder, "second")
    found = snapshots.difference(before, snapshots.snapshot(engine, model, job))
    kept = engine.optimizer.memory.states()["messages"]
    unchanged = not any(found.values()) and all((a[2] == b[2]).all() for a, b in zip(errors, kept, strict=True))
    engine.destroy()
    return message, unchanged


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_16_convergence(ranks: Any, optimizer: str) -> None:
    """A small regression; the table over a language model is tests/perf/loco_convergence.py."""
    losses = ranks(2).run(converge_case, optimizer, timeout=110)[0]
    for plain, loco, norms, coarse in losses:
        assert loco == pytest.approx(plain, rel=0.005) and 0.97 < norms < 1.03, losses
        assert plain < 0.8, losses  # of the first loss
        del coarse
    excess = [(coarse / plain - 1, loco / plain - 1) for plain, loco, _, coarse in losses]
    # The test has power: without feedback, and with large blocks, it is worse.
    assert sum(abs(a) for a, _ in excess) > 2 * sum(abs(b) for _, b in excess), excess


def converge_case(optimizer: str) -> list[tuple[float, float, float, float]]:
    """Of each seed: final loss without and with LoCo, ratio of norms, loss with blocks of 4096 without feedback."""
    import statistics

    import torch
    import training
    from deepspeed import comm as dist

    steps, rows = 120, []
    job = training.Job(sizes=(32, 96, 96, 8), optimizer=optimizer, empty=False, clipping=1.0)
    coarse = {"error_feedback": False, "block_size": 4096}
    for seed in range(3):
        found = []
        for loco in (None, {}, coarse):
            keys = training.placed("NIG", 1, **({} if loco is None else {"zeropp_loco_param": loco}))
            engine, _ = training.make_engine(job, keys)
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.1 if optimizer == "SGD" else 3e-3
            teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed)) / 6
            generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
            losses, norms = [], []
            for number in range(steps):
                x = torch.randn(16, 32, generator=generator)
                losses.append(training.micro_step(engine, job, number, x, torch.tanh(x @ teacher)))
                engine.step()
                norms.append(float(engine.get_global_grad_norm()))
            found.append((statistics.fmean(losses[-30:]) / losses[0], norms))
            engine.destroy()
        (plain, plain_norms), (ours, our_norms), (worse, _) = found
        ratio = statistics.fmean(a / b for a, b in zip(our_norms, plain_norms, strict=True))
        rows.append((plain, ours, ratio, worse))
    return rows
