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


@pytest.mark.parametrize(
    ("accumulation", "how"), [(1, "plain"), (3, "zero_grad"), (2, "skipped layers"), (2, "overflow")]
)
def test_what_one_step_does_not_send_the_next_ones_do(ranks: Any, accumulation: int, how: str) -> None:
    """The mean of the same gradients over 8 steps: without feedback its error is that of one step, about 0.1."""
    for rows in ranks(4).run(feedback_case, accumulation, how, timeout=100):
        for name, fed, unfed in rows:
            assert fed < 0.03 < 0.06 < unfed, (name, fed, unfed)


def feedback_case(accumulation: int, how: str) -> list[tuple[str, float, float]]:
    """For each strategy the relative error of the mean gradient, with feedback and without it."""
    import itertools

    import torch
    import training
    from deepspeed import comm as dist

    steps = 8
    job = training.Job(
        accumulation=accumulation,
        clipping=0.0,
        empty=False,
        groups=2,
        zero=training.SMALL,
        dtype="fp16" if how == "overflow" else "fp32",
    )

    def mean_gradient(keys: dict[str, Any]) -> torch.Tensor:
        engine, _ = training.make_engine(job, keys)
        optimizer, total, applied = engine.optimizer, torch.zeros(()), 0
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        data = list(itertools.islice(training.batches(job), accumulation))
        for step in range(steps):
            # A step of the same gradients that is not applied: its errors must not count.
            bad = how == "overflow" and step in (3, 7)
            for number, (x, y) in enumerate(data):
                if how == "zero_grad" and (keys["paro_strategy"][0] == "N" or number == 0):
                    optimizer.zero_grad()
                skipped = [1 + step % 2] if how == "skipped layers" else []
                loss = ((engine(x, skipped) - y) ** 2).float().mean()
                engine.backward(loss * torch.inf if bad and dist.get_rank() == 1 else loss)
                if number == accumulation - 1 and not bad:
                    if hasattr(optimizer, "_shard"):
                        parts = [optimizer._shard(group) for group in range(2)]
                    else:
                        parts = [optimizer.gradients.shard]
                    total = total + torch.cat(parts).float() / optimizer.loss_scale
                    applied += 1
                engine.step()
        engine.destroy()
        return total / applied

    rows = []
    for name in (*REPLICATED, *PARTITIONED):
        keys = training.placed(name)
        exact = mean_gradient(keys)
        errors = []
        for loco in ({"err_beta": 0.0}, {"error_feedback": False}):
            off = torch.stack([(mean_gradient({**keys, "zeropp_loco_param": loco}) - exact).norm(), exact.norm()])
            squares = off.square()
            dist.all_reduce(squares)
            errors.append((squares[0] / squares[1]).sqrt().item())
        rows.append((name, *errors))
    return rows


def test_padding_stays_zero(ranks: Any) -> None:
    answers = ranks(4).run(padding_case)
    for name, _, largest in (row for rows in answers for row in rows):
        assert largest == 0, name
    for which in range(len(answers[0])):
        assert any(rows[which][1] for rows in answers), answers[0][which]  # some rank has padding


def padding_case() -> list[tuple[str, int, float]]:
    """Elements of padding in this rank's shards, and the largest of them at the boundary, rotated."""
    import training

    job, rows = training.Job(sizes=(33, 37, 65, 7), empty=False, groups=2), []
    for name in ("NNN", "NII", "NIG", "NGG", "III", "IIG", "GGG"):
        engine, _ = training.make_engine(job, training.placed(name, zeropp_loco_param={"hadamard": True}))
        optimizer, data = engine.optimizer, training.batches(job)
        padding = []
        for number in range(2):
            training.micro_step(engine, job, number, *next(data))
            if hasattr(optimizer, "_shard"):
                paddings = optimizer.groups_padding
                padding = [optimizer._shard(i)[-count:] for i, count in enumerate(paddings) if count]
            else:
                rank = training.dist.get_rank(optimizer.dp_process_group)
                padding = []
                for param in optimizer.gradients._params:
                    chunk = param.ds_tensor.ds_numel
                    present = min(chunk, max(0, param.ds_numel - rank * chunk))
                    padding.append(optimizer._gradient_shards[param.ds_id][present:])
            padding = [part.clone() for part in padding if part.numel()]
            engine.step()
        largest = max((part.abs().max().item() for part in padding), default=0.0)
        rows.append((name, sum(part.numel() for part in padding), largest))
        engine.destroy()
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

    def look(engine: Any) -> None:
        hop = engine.optimizer._moves.inter
        found.append((hop.settings.as_dict(), bool(hop.memory._errors)))

    training.train(training.Job(empty=False), training.placed("NIG", zero_quantized_gradients=True), look)
    return found[0]


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
    for rank, (forgotten, warnings) in enumerate(ranks(2).run(plain_case, str(tmp_path))):
        assert forgotten
        assert len(warnings) == (1 if rank == 0 else 0), warnings


def plain_case(folder: str) -> tuple[bool, list[str]]:
    """Load what was saved without LoCo, and the other way round."""
    import snapshots
    import training
    from logs import logged

    job = snapshots.job_of()
    engine, _ = training.make_engine(job, training.placed("NIG", 1))
    snapshots.run(engine, job, snapshots.steps_of(job, 2), 0)
    engine.save_checkpoint(folder, "plain")
    engine.destroy()
    engine, _ = training.make_engine(job, training.placed("NIG", 1, zeropp_loco_param={}))
    snapshots.run(engine, job, snapshots.steps_of(job, 2), 0)
    engine.save_checkpoint(folder, "loco")
    with logged() as lines:
        engine.load_checkpoint(folder, "plain")
    warnings = [text for level, text in lines if level == "WARNING" and "residuals" in text]
    forgotten = not engine.optimizer.memory._errors and engine.optimizer.memory.steps == 0
    engine.destroy()
    engine, _ = training.make_engine(job, training.placed("NIG", 1))
    engine.load_checkpoint(folder, "loco")
    engine.destroy()
    return forgotten, warnings


def test_15_a_tag_that_is_saved_again(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2).run(again_case, str(tmp_path)) == [(0, 1, True)] * 2


def again_case(folder: str) -> tuple[int, int, bool]:
    """Files with residuals when LoCo was off in the second save; steps of a conversion whose source is replaced."""
    from pathlib import Path

    import snapshots
    import training
    from deepspeed import comm as dist

    job, loco = snapshots.job_of(), training.placed("NIG", 1, zeropp_loco_param={})
    engine, _ = training.make_engine(job, loco)
    snapshots.run(engine, job, snapshots.steps_of(job, 1), 0)
    engine.save_checkpoint(folder, "tag")
    dist.barrier()
    snapshots.convert(folder)
    snapshots.run(engine, job, snapshots.steps_of(job, 1), 0)
    engine.save_checkpoint(folder, "tag")
    engine.destroy()
    universal = snapshots.job_of(checkpoint={"load_universal": True})
    engine, _ = training.make_engine(universal, loco)
    engine.load_checkpoint(folder, "tag_universal")
    zero = not engine.optimizer.memory._errors  # they are of another save, which is no reason to refuse the rest
    steps = engine.global_steps
    engine.destroy()
    engine, _ = training.make_engine(job, training.placed("NIG", 1))
    engine.save_checkpoint(folder, "tag")
    engine.destroy()
    left = len(list(Path(folder, "tag").glob("residuals*")))
    engine, _ = training.make_engine(job, loco)
    engine.load_checkpoint(folder, "tag")
    engine.destroy()
    return left, steps, zero


def test_15_disks_of_nodes(ranks: Any, tmp_path: Any) -> None:
    assert ranks(4).run(disks_case, str(tmp_path)) == [True] * 4


def disks_case(folder: str) -> bool:
    """Whether each rank finds its residuals where only its node's files are."""
    import os
    from pathlib import Path
    from unittest import mock

    import snapshots
    import torch
    import training
    from deepspeed import comm as dist

    node, local = divmod(dist.get_rank(), 2)
    disk = str(Path(folder, str(node)))
    job = snapshots.job_of(checkpoint={"use_node_local_storage": True})
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(local)}):
        engine, _ = training.make_engine(job, training.placed("NGG", zeropp_loco_param={}))
        snapshots.run(engine, job, snapshots.steps_of(job, 2), 0)
        engine.save_checkpoint(disk, "tag")
        before = [error.kept for error in engine.optimizer.memory._errors.values()]
        snapshots.run(engine, job, snapshots.steps_of(job, 1), 0)
        engine.load_checkpoint(disk, "tag")
        after = [error.kept for error in engine.optimizer.memory._errors.values()]
        engine.destroy()
    return len(before) > 0 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


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
    for plain, loco, norms, _ in losses:
        assert loco == pytest.approx(plain, rel=0.005) and 0.97 < norms < 1.03, losses
        assert plain < 0.8, losses  # of the first loss
    excess = [(coarse / plain - 1, loco / plain - 1) for plain, loco, _, coarse in losses]
    # The test has power: without feedback, and with large blocks, it is worse.
    assert sum(a for a, _ in excess) > 2 * sum(abs(b) for _, b in excess), excess


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
