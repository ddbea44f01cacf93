# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""An outer optimizer between groups: parity with a model copy for each group, bytes, checkpoints, and waits."""

import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_set_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from deepspeed_ext.checkpoint.files import HEADER
from deepspeed_ext.checkpoint.folder import RECORD
from deepspeed_ext.comm.spans import ShardSpan, Span
from deepspeed_ext.config.unsupported import UNSUPPORTED, refuse_unsupported
from deepspeed_ext.strategy import STRATEGIES
from deepspeed_ext.zero.outer import Fragment, OuterOptimizer
from scripts.emulation.traffic import TrafficMeter
from tests.harness import outer_oracle, snapshots, training
from tests.harness.logs import logged
from tests.harness.outer_oracle import KEY
from tests.harness.tiers import deep, with_cases
from tests.harness.training import SMALL, Job

ALL = ("NNI", "NII", "INI", "III")
JOB = Job(steps=5, zero=SMALL, empty=False)
ADAM = replace(JOB, optimizer="Adam")
ODD = replace(ADAM, steps=6, accumulation=3, groups=2, frozen=(1,), skipped=((4, 0), (10, 2)), empty=True)
ALONE = {"steps": 1, "lr": 1.0, "momentum": 0.0, "nesterov": False}  # in each step: the strategy without it
OUTER = {"steps": 2, "fragments": 2}
SUMS = replace(JOB, accumulation=2, clipping=0.0)
SHARDED = replace(JOB, zero_init="config", clipping=0.0)
FP16 = replace(JOB, dtype="fp16", overflow=((3, 1),))
OFFLOAD = replace(ADAM, zero={**SMALL, "offload_optimizer": {"device": "cpu"}})
EXACT = 2e-6
# Ranks, group size, strategies, what is trained, the section, how far it may be from fp32 and all bits. The first tier
# has one strategy of every second one.
CASES = [
    (4, 2, ("INI", "NNI", "NII", "III"), JOB, {"steps": 2}, EXACT),
    (4, 2, ("NII", "INI"), JOB, {"steps": 2, "nesterov": False, "lr": 1.0}, EXACT),
    (6, 2, ("III", "NII"), ODD, {"steps": 2, "warmup_steps": 2}, EXACT),  # three groups
    (4, 1, ("NNI", "III"), ODD, {"steps": 2}, EXACT),  # four
    (4, 2, ("INI", "NNI"), ODD, {"steps": 4, "fragments": 2}, EXACT),
    (4, 2, ("NII", "INI"), replace(JOB, steps=12), {"steps": 6, "fragments": 3, "delay": 1, "warmup_steps": 1}, EXACT),
    (4, 2, ("III", "NII"), replace(JOB, steps=8), {"steps": 4, "delay": 3, "offload": "cpu"}, EXACT),
    # One group skips the step after which a fragment is sent; the other one, the step after which it is applied.
    (4, 2, ("NNI", "III"), replace(JOB, overflow=((3, 1),)), {"steps": 4}, EXACT),
    (4, 2, ("NII",), replace(JOB, steps=9, overflow=((3, 1), (6, 2))), {**OUTER, "steps": 4, "delay": 1}, EXACT),
    (4, 2, ("NNI", "NII", "INI", "III"), SUMS, ALONE, EXACT),
    (4, 2, ALL[2:], SHARDED, ALONE, EXACT),
    (4, 2, ("NII",), OFFLOAD, OUTER, EXACT),
    (4, 2, ("III",), OFFLOAD, OUTER, EXACT),
    (4, 2, ("INI", "NII"), JOB, {**OUTER, "bits": 8}, 0.02),
    (4, 2, ("NII", "NNI", "INI", "III"), JOB, {**OUTER, "bits": 4}, 0.2),
    (4, 2, ("NII", "INI"), replace(JOB, dtype="bf16"), OUTER, 0.05),
    (4, 2, ("III", "NNI"), FP16, OUTER, 0.05),
]
CASES = [
    *((n, m, names[:1], *rest) for n, m, names, *rest in CASES[::2]),
    *deep(*(case for number, case in enumerate(CASES) if number % 2 or len(case[2]) > 1)),
    *deep((4, 4, ("NII", "III"), ODD, {"steps": 2}, EXACT), (4, 2, ("NNI", "III"), JOB, {**OUTER, "bits": 16}, 0.01)),
    *deep((4, 2, ALL, replace(OFFLOAD, dtype="bf16"), OUTER, 0.2)),
]


def named(value: object) -> str | None:
    if isinstance(value, Job):
        return f"{value.optimizer} {value.dtype} {value.steps}{' skipping' if value.overflow else ''}"
    return " ".join(map(str, value)) if isinstance(value, tuple) else None if isinstance(value, int) else str(value)


@pytest.mark.parametrize("n, group_size, names, job, outer, bound", CASES, ids=named)
def test_training_matches_a_model_copy_for_each_group(
    ranks: Any, kernels: bool, n: int, group_size: int, names: tuple[str, ...], job: Job, outer: Any, bound: float
) -> None:
    for row in ranks(n).rows(outer_oracle.beside, names, job, outer, group_size):
        assert row.weights < bound and row.losses < bound and row.anchors and row.together, row
        assert row.measures < max(bound, 1e-3), row
        assert bound == EXACT or row.weights > EXACT, row


MUON = replace(JOB, optimizer="Muon", accumulation=2, steps=3)


def test_groups_are_independent_before_an_outer_step(ranks: Any) -> None:
    apart = ranks(4).run(trained_case, ("NNI", "III"), {KEY: {"steps": 100}})
    alone = ranks(2).run(trained_case, ("NNI", "III"), {})
    assert apart[:2] == alone and apart[2] == apart[3] != apart[0]


def trained_case(names: tuple[str, ...], outer: dict[str, Any]) -> list[list[float]]:
    return [training.train(MUON, training.placed(name, 2, **outer)).weights.tolist() for name in names]


def set_case(name: str) -> tuple[Any, ...]:
    """Set weights after two of three inner steps; return what anchors and later steps have, and a step's error."""
    outer = {"steps": 3, "lr": 1.0, "momentum": 0.0, "nesterov": False, "fragments": 2}
    engine, model = training.make_engine(JOB, training.placed(name, 2, **{KEY: outer}))
    batches = snapshots.steps_of(JOB, 3)
    snapshots.run(engine, JOB, batches[:2])
    with engine.optimizer.outer.use_outer_weights():
        before = _weights(engine, model)
        error = snapshots.error_of(engine.step)
    param = dict(model.named_parameters())["layers.1.weight"]
    value = torch.full(getattr(param, "ds_shape", param.shape), 0.25)
    safe_set_full_fp32_param(param, value)
    with engine.optimizer.outer.use_outer_weights():
        anchors = _weights(engine, model)
    changed = [key for key in anchors if not torch.equal(anchors[key], before[key])]
    equal = torch.equal(anchors["layers.1.weight"], value)
    snapshots.run(engine, JOB, batches[2:])
    after = _weights(engine, model)
    with engine.optimizer.outer.use_outer_weights():
        agreed = torch.cat([values.flatten() for values in _weights(engine, model).values()])
    together = training.replicas_equal(agreed)
    near = (after["layers.1.weight"] - value).abs().max().item()  # by a step, not back where it was
    return changed, equal, together, near < 0.1, "deepspeed_ext.outer_weights" in error


def test_weights_set_by_a_script_reach_all_groups(ranks: Any) -> None:
    expected = [(name, (["layers.1.weight"], True, True, True, True)) for name in ALL]
    assert ranks(4).each(set_case, ALL) == expected * 4


def modified_case(name: str) -> bool:
    """Whether a modification on one rank reaches all groups."""
    _, model = training.make_engine(JOB, training.placed(name, 2, **{KEY: OUTER}))
    params = list(model.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=3):
        for param in params if dist.get_rank() == 3 else ():
            param.data.fill_(0.5)
    return bool((training.whole_weights(model) == 0.5).all())


def test_a_rank_modifies_parameters_of_all_groups(ranks: Any) -> None:
    assert ranks(4).each(modified_case, ALL[2:]) == [(name, True) for name in ALL[2:]] * 4


@with_cases(
    "engine, message",
    ({"pipeline_parallelism": True}, "stages of a pipeline .* but with KEY groups of ranks run their own. Remove KEY"),
    ({"has_moe_layers": True}, "gradients of experts may be sent between groups.* with KEY. Remove KEY"),
    ids=str,
)
def test_options_that_need_all_groups_are_refused(engine: dict[str, Any], message: str) -> None:
    kinds = {"pipeline_parallelism": False, "has_moe_layers": False, "sequence_parallel_size": 1}
    for key, section in ((KEY, {}), (KEY, None), ("paro_micro_batches", [2, 1])):
        zero = SimpleNamespace(**{key: section})
        config = SimpleNamespace(zero_config=zero, _param_dict={"zero_optimization": {}})
        fake_engine = SimpleNamespace(**kinds | engine, _config=config, module=torch.nn.Module())
        expected = message.replace("KEY", key)
        with nullcontext() if section is None else pytest.raises(ValueError, match=expected):
            refuse_unsupported(UNSUPPORTED, STRATEGIES["III"], fake_engine, None)


SIZES = (512, 1023, 1024, 600)  # 2.2 million parameters
RELATIVE = 0.01  # of what is due
SCALE = 2 / 128  # bytes of an element's share of a scale
BYTES = {32: 4.0, 16: 2.0, 8: 1 + SCALE, 4: 0.5 + SCALE}  # of an element that crosses
REST = 0.02  # seconds in which barriers end on all ranks
BARRIERS = 4  # that are counted alone
NOTHING, A_FLAG = 60, 250  # bytes a step beside barriers, at most, of which some are counted before or after
PLAIN, STREAMING = {"steps": 3}, {"steps": 4, "fragments": 2, "delay": 1}


@with_cases(
    "world, group, bits, outer, dtype, names",
    (4, 2, 16, STREAMING, "bf16", ("NNI",)),
    *deep((4, 2, 4, PLAIN, "fp32", ("NII",)), (4, 2, 8, PLAIN, "fp16", ("INI",))),
    *deep((6, 2, 4, STREAMING, "fp32", ("NII",)), (4, 2, 32, PLAIN, "fp32", ALL)),
    *deep((4, 1, 8, STREAMING, "bf16", ALL), (6, 3, 16, PLAIN, "fp32", ALL)),
    *deep((8, 2, 4, STREAMING, "fp16", ALL)),
)
def test_groups_receive_only_the_fragments_that_are_due(
    ranks: Any, kernels: bool, world: int, group: int, bits: int, outer: Any, dtype: str, names: tuple[str, ...]
) -> None:
    groups, fragments, steps = world // group, outer.get("fragments", 1), outer["steps"]
    leaving = {(part + 1) * steps // fragments % steps for part in range(fragments)}
    parameters, rows = ranks(world).run(bytes_case, names, group, {**outer, "bits": bits}, dtype)[0]
    part = parameters / group / fragments  # of a rank's slice
    expected = 2 * (groups - 1) / groups * part * BYTES[bits]
    for name, at_rest, counted in rows:
        # DeepSpeed's stages 1 and 2 check for overflows in bf16, too.
        agree = dtype == "fp16" or (dtype == "bf16" and name[0] == "N")
        assert len(counted) == 2 * steps - 1
        outer_steps = [have for step, have in enumerate(counted, 2) if step % steps in leaving]
        inner_steps = [have - at_rest for step, have in enumerate(counted, 2) if step % steps not in leaving]
        assert outer_steps == pytest.approx([expected] * 2 * fragments, rel=RELATIVE), name
        assert max(inner_steps) < A_FLAG and (agree or mean(inner_steps) < NOTHING), name


def bytes_case(
    names: tuple[str, ...], group: int, outer: dict[str, int], dtype: str
) -> tuple[int, list[tuple[str, float, list[float]]]]:
    """Return the parameters, and for each strategy the mean bytes that a rank receives from other groups, by barriers
    alone, and in each step from the second one to the end of the second outer period, with all fragments."""
    job = training.Job(sizes=SIZES, empty=False, dtype=dtype)
    rows, parameters = [], 0
    for name in names:
        engine, model = training.make_engine(job, training.placed(name, group, **{KEY: outer}))
        data, counts = training.batches(job), []
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        # In the first step modules are recorded, and ranks compare the records. Before it, only barriers are counted.
        for step in range(1 - BARRIERS, 2 * outer["steps"] + 1):
            meter = TrafficMeter()
            dist.barrier()
            time.sleep(REST)
            meter.start()
            dist.barrier()
            if step > 0:
                training.step(engine, job, step, data)
                engine.optimizer.outer.receive_fragments()
            dist.barrier()
            time.sleep(REST)
            meter.stop()
            dist.barrier()
            counts.append(meter.split(group).inter_mean)
        rows.append((name, mean(counts[:BARRIERS]), counts[BARRIERS + 1 :]))
        engine.destroy()
    return parameters, rows


MOMENTS = {False: "before it sends", True: "when it has sent"}
SLEEP = 2.5  # seconds, in which the other group takes at most six steps
H, DELAY = 4, 2
STOP = 2 * H  # the step before or after which a group stops: a fragment sent after it is applied DELAY steps later


@with_cases(
    "name, after",
    ("III", False),
    *deep(("III", True), ("NII", False), ("NII", True)),
    ids=lambda value: MOMENTS.get(value, value),
)
def test_a_slow_group_delays_others_only_at_its_fragment(ranks: Any, name: str, after: bool) -> None:
    times = ranks(4).run(slow_case, name, after)
    sleeping, waking = min(begin for begin, *_ in times[2:]), min(end for _, end, _ in times[2:])
    waits = STOP + DELAY + (H if after else 0)  # its sent fragment is transferred while it sleeps
    for _, _, ends in times[:2]:
        early = [step for step, end in ends.items() if end < waking]
        assert early == list(range(STOP, waits)), [(step, end - sleeping) for step, end in ends.items()]


def slow_case(name: str, after: bool) -> tuple[float, float, dict[int, float]]:
    """Return when this rank has begun and ended to sleep, and when each following step has ended."""
    job = training.Job(empty=False)
    outer = {"steps": H, "fragments": 1, "delay": DELAY}
    engine, _ = training.make_engine(job, training.placed(name, 2, **{KEY: outer}))
    data, slow = training.batches(job), dist.get_rank() >= 2
    begin = end = 0.0
    ends = {}
    for step in range(1, STOP + 2 * H):
        if step == STOP:
            dist.barrier()
        if slow and step == STOP + after:
            begin = time.monotonic()
            time.sleep(SLEEP)
            end = time.monotonic()
        training.step(engine, job, step - 1, data)
        if step >= STOP:
            ends[step] = time.monotonic()
    engine.destroy()
    return begin, end, ends


def elsewhere_case(name: str, folder: str) -> tuple[Any, ...]:
    """Return where weights differ from the anchors: on disk, in 16 bits, in other runs; headers with other ranks."""
    job = snapshots.job_of("fp32")
    where = f"{folder}/{name}"
    engine, model = training.make_trained(job, training.placed(name, 2, **{KEY: {"steps": 2}}), 3)
    theirs = snapshots.snapshot(engine, model, job)
    with engine.optimizer.outer.use_outer_weights():
        anchors = _weights(engine, model)
    back = snapshots.difference(theirs, snapshots.snapshot(engine, model, job))
    apart = [key for key in anchors if not torch.equal(anchors[key], _weights(engine, model)[key])]
    engine.save_checkpoint(where)
    engine.save_16bit_model(where, "weights.bin")
    engine.destroy()
    dist.barrier()
    on_disk = get_fp32_state_dict_from_zero_checkpoint(where)
    differ = [key for key, value in anchors.items() if not torch.equal(on_disk[key], value)]
    files = Path(where, "global_step3").glob("*_model_states.pt")
    headers = [torch.load(file, weights_only=False)[HEADER] for file in files]
    differ += [str(header) for header in headers if (header["ranks"], header["group_size"]) != (4, 2)]
    if dist.get_rank() == 0 and Path(where, "weights.bin").exists():
        saved = torch.load(f"{where}/weights.bin")
        differ += [f"{key} of 16 bits" for key in anchors if not torch.equal(saved[key].float(), anchors[key])]
    other = training.placed({"NNI": "NII", "NII": "NNI", "INI": "III", "III": "INI"}[name], 2, **{KEY: {"steps": 2}})
    others = [training.placed(name, 2), training.placed(name, 2, **{KEY: {"steps": 3}}), other]
    return bool(apart), back, differ + _apart_after_loads(job, where, others, anchors)


def _apart_after_loads(job: Any, folder: str, others: list[dict[str, Any]], anchors: dict[str, Any]) -> list[str]:
    """Return where weights differ from the anchors, and are not finite after three steps, in runs of others."""
    differ = []
    for other in others:
        engine, model = training.make_engine(job, other)
        engine.load_checkpoint(folder)
        weights = _weights(engine, model)
        differ += [f"{key} {other}" for key in anchors if not torch.equal(weights[key], anchors[key])]
        snapshots.run(engine, job, snapshots.steps_of(job, 3, skip=3))
        differ += [f"finite {other}" for value in _weights(engine, model).values() if not value.isfinite().all()]
        engine.destroy()
    return differ


def _weights(engine: Any, model: Any) -> dict[str, Any]:
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with deepspeed.zero.GatheredParameters(list(trained.values())):
        return {name: param.detach().clone() for name, param in trained.items()}


@pytest.mark.quick
@pytest.mark.parametrize("bits", [True, False])
def test_only_compressed_changes_have_errors_to_feed_back(bits: bool) -> None:
    outer: Any = SimpleNamespace(reduce=SimpleNamespace(keeps_errors=bits, size=2))
    fragment = Fragment(7, Span(100, 5), 0, 3, *[torch.empty(0)] * 3)
    expected = ((ShardSpan(7, 0, 100, 3),), (ShardSpan(7, 1, 103, 2),))
    assert OuterOptimizer._error_feedback_spans(outer, fragment) == (expected if bits else ())


@with_cases("names", ("NNI", "III"), *deep((("NII", "INI"),)))
def test_another_run_continues_from_the_anchors(ranks: Any, tmp_path: Any, names: tuple[str, ...]) -> None:
    assert ranks(4).each(elsewhere_case, names, str(tmp_path)) == [(name, (True, {}, [])) for name in names] * 4


def converted_case(folder: str, name: str) -> list[str]:
    """Return where a universal checkpoint's weights differ from the anchors, in runs of other strategies and sizes."""
    job = snapshots.job_of("fp32")
    engine, model = training.make_trained(job, training.placed(name, 2, **{KEY: {"steps": 2}}), 3)
    with engine.optimizer.outer.use_outer_weights():
        anchors = _weights(engine, model)
    engine.save_checkpoint(folder)
    engine.destroy()
    snapshots.convert(folder)
    loading = replace(job, config={**job.config, "checkpoint": {"load_universal": True}})
    partitioned = name[0] != "N"
    groups = [training.placed(name, m, **{KEY: {"steps": 2}}) for m in (1, 4)]
    configs = [*groups, training.placed("NIG"), training.placed("IIG"), {"stage": 3 if partitioned else 2}]
    return _apart_after_loads(loading, folder, configs, anchors)


@pytest.mark.parametrize("name", ["III", *deep("NII")])
def test_converted_checkpoints_contain_the_anchors(ranks: Any, tmp_path: Any, name: str) -> None:
    assert ranks(4).run(converted_case, str(tmp_path), name) == [[]] * 4


def replaced_case(folder: str) -> tuple[bool, list[str], list[str], list[str]]:
    """Return whether a load refuses tensors of other shapes; the outer optimizer's files that remain after a save
    without one, and where weights differ from that save's after a load, with and without older files."""
    job = snapshots.job_of("fp32")
    outer, plain = training.placed("NII", 1, **{KEY: {"steps": 2}}), training.placed("NII", 1)
    engine, model = training.make_trained(job, outer, 3)
    engine.save_checkpoint(folder, "tag")
    old = sorted(Path(folder, "tag").glob("outer_rank_*.pt"))
    own = old[dist.get_rank()]
    shutil.copy(own, f"{folder}/{own.name}")
    Path(folder, "tag", RECORD).unlink(missing_ok=True)
    content = torch.load(own, weights_only=False)
    torch.save(content | {"weights": {number: it[:1] for number, it in content["weights"].items()}}, own)
    dist.barrier()
    error = snapshots.error_of(engine.load_checkpoint, folder, "tag")
    engine.destroy()
    engine, model = training.make_trained(job, plain)
    engine.save_checkpoint(folder, "tag")
    saved = _weights(engine, model)
    engine.destroy()
    remaining, differ = [path.name for path in old if path.exists()], []
    for with_old_files in (False, True):
        if with_old_files:  # as in older versions
            shutil.copy(f"{folder}/{own.name}", own)
        engine, model = training.make_engine(job, outer)
        with logged() as lines:
            engine.load_checkpoint(folder, "tag")
        weights = _weights(engine, model)
        differ.append([key for key in saved if not torch.equal(weights[key], saved[key])])
        if dist.get_rank() == 0 and not any("has no states of this outer optimizer" in line for _, line in lines):
            differ[-1].append("not said")
        engine.destroy()
        dist.barrier()
    return "rank_00.pt: weights.0 has the shape [1], expected [" in error, remaining, differ[0], differ[1]


def test_a_save_without_outer_states_removes_their_files(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2).run(replaced_case, str(tmp_path)) == [(True, [], [], [])] * 2
