# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Updates in few bits: replicas stay bit-identical, and close to the optimizer's weights, also after copies,
checkpoints, and offloading between steps.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

import deepspeed_ext
from deepspeed_ext.comm.backends import make_reduce
from deepspeed_ext.comm.spans import ShardSpan
from deepspeed_ext.comm.transfer_queue import ActiveTransfer
from deepspeed_ext.config.settings import UpdateSettings
from deepspeed_ext.loco import ops, reference
from deepspeed_ext.loco.hop import QuantizedSums
from deepspeed_ext.zero.flat.updates import FlatUpdates
from tests.harness import calls, training
from tests.harness.logs import logged
from tests.harness.tiers import deep, with_cases
from tests.harness.training import SMALL, Job

DIFFERENCES = ("NNG", "NIG", "NGG", "ING", "IIG", "IGG")
SUMS = ("NNN", "NNI", "NII", "INI", "III")
KEY = "paro_quantized_updates"
JOBS = {
    "bf16, accumulation, groups, frozen": Job(
        zero=SMALL, dtype="bf16", accumulation=3, groups=2, frozen=(1,), steps=5, optimizer="Adam"
    ),
    "LoCo": Job(zero={**SMALL, "zeropp_loco_param": {}}, optimizer="Adam", steps=5),
    "fp16, overflow": Job(zero=SMALL, dtype="fp16", overflow=((1, 2), (4, 0)), steps=6),
    "offload": Job(zero={**SMALL, "offload_optimizer": {"device": "cpu"}}, optimizer="Adam", steps=5),
    "overlap": Job(zero={**SMALL, "overlap_comm": True, "paro_overlap_updates": True}, steps=5, accumulation=2),
    "no buckets": Job(steps=5, dtype="bf16", clipping=0.0),
}


class Sent(NamedTuple):
    """A difference in flight: the expected replica, the update, and their largest allowed distance."""

    held: Any
    expected: Any
    updated: Any
    steps: Any


class Seen(NamedTuple):
    """Observations of a strategy's run on this rank."""

    messages: int  # differences with elements that this rank sent
    as_decoded: bool  # whether parameters after a step equal the previous ones plus the decoded difference
    close: bool  # whether they were within a quantization step of the update; a skipped step sends nothing
    equal: bool  # whether replicas were equal on all ranks after each step
    distance: float  # distance to the optimizer's weights at the end, in the largest steps of the last differences


def differences(sent: list[Sent]) -> Any:
    def note(_: None, updated: Any, replica: Any, wire: Any, packing: Any) -> None:
        width = updated.shape[1]
        if width:
            steps = packing.scales(wire, width).float().repeat_interleave(packing.block_size, dim=1)[:, :width]
            expected = replica.clone()
            reference.apply(wire, expected, packing.bits, packing.block_size)
            sent.append(Sent(replica, expected, updated.clone(), steps))

    return calls.after(ops, "difference", note)


def run(name: str, job: Job) -> Seen:
    engine, model, data = training.begin(job, training.placed(name, **{KEY: {}}))
    messages, as_decoded, close, equal, largest = 0, True, True, True, 0.0
    for step in range(job.steps):
        sent: list[Sent] = []
        with differences(sent):
            for number in range(step * job.accumulation, (step + 1) * job.accumulation):
                training.step(engine, job, number, data)
            deepspeed_ext.wait_for_updates()
            if hasattr(engine.optimizer, "parameters"):
                engine.optimizer.drain_parameters()
        for difference in sent:
            as_decoded &= torch.equal(difference.held, difference.expected)
            close &= bool(((difference.expected.float() - difference.updated.float()).abs() <= difference.steps).all())
        close &= not sent or engine.was_step_applied()
        messages += len(sent)
        largest = max((difference.steps.max().item() for difference in sent), default=largest)
        equal &= training.replicas_equal(training.whole_weights(model))
    everybody = torch.tensor([largest, distance_to_masters(engine)])
    torch.distributed.all_reduce(everybody, op=torch.distributed.ReduceOp.MAX)
    distance = float(everybody[1] / everybody[0]) if everybody[0] else float(everybody[1])
    return Seen(messages, as_decoded, close, equal, distance)


def distance_to_masters(engine: Any) -> float:
    """Return the distance of this rank's own elements to the optimizer's weights, rounded to the parameters' dtype."""
    worst, optimizer = 0.0, engine.optimizer
    for param in engine.module.parameters():
        if not param.requires_grad or not getattr(param, "ds_numel", param.numel()):
            continue
        span = optimizer.owned_span(param)
        if not span.numel:
            continue
        if hasattr(param, "ds_tensor"):
            values = param.ds_tensor[: span.numel]
            master = safe_get_local_fp32_param(param).flatten()[: span.numel]
        else:
            values = span.of(param.detach().flatten())
            master = param._hp_mapping.get_hp_fragment().flatten()
        worst = max(worst, (values.float() - master.to(values.dtype).float()).abs().max().item())
    return worst


IN_TURNS = [(job, DIFFERENCES[number % 3 :: 3]) for number, job in enumerate(JOBS)]


@with_cases("job, names", *IN_TURNS[::4], *deep(*((job, DIFFERENCES) for job in JOBS)))
def test_replicas_are_equal_and_close_to_weights(ranks: Any, job: str, names: tuple[str, ...]) -> None:
    for name, observations in ranks(4).each(run, names, JOBS[job]):
        assert observations.messages >= (3 if "overflow" in job else 4), name
        assert observations.as_decoded and observations.close and observations.equal, name
        assert observations.distance <= 1, name


EXACT = {
    "bf16": Job(zero=SMALL, dtype="bf16", accumulation=2, groups=2, frozen=(1,), steps=4, optimizer="Adam"),
    "fp16, overlap": Job(
        zero={**SMALL, "paro_overlap_updates": True}, dtype="fp16", overflow=((1, 2),), steps=4, optimizer="Adam"
    ),
    "offload": Job(zero={**SMALL, "offload_optimizer": {"device": "cpu"}}, dtype="bf16", optimizer="Adam", steps=4),
}


@with_cases("job, names", ("fp16, overlap", ("NIG", "IIG")), *deep(*((job, DIFFERENCES) for job in EXACT)))
def test_lossless_updates_do_not_change_training(ranks: Any, job: str, names: tuple[str, ...]) -> None:
    for name, (equal, messages) in ranks(4).each(exact_case, names, EXACT[job]):
        assert equal and messages >= 3, (name, equal, messages)


def exact_case(name: str, job: Job) -> tuple[bool, int]:
    """Return whether losses, norms, and weights equal those without the key in all bits; and encoded messages."""
    with mock.patch.object(ops, "pack", wraps=ops.pack) as pack:
        ours = training.train(job, training.placed(name, **{KEY: {"bits": "exact"}}))
    plain = training.train(job, training.placed(name))
    rest = [run._replace(weights=None) for run in (ours, plain)]
    return torch.equal(ours.weights, plain.weights) and rest[0] == rest[1], pack.call_count


CHANGES = {
    "safe_set_full": ("NIG", "IIG"),
    "safe_set_local": ("IIG",),
    "load_state_dict": ("NIG",),
    "GatheredParameters": ("NIG", "IIG"),
    "load_checkpoint": ("NIG", "IIG"),
    "every so many": ("NNG", "IGG"),
}


@with_cases("change, names", *CHANGES.items())
def test_changes_from_outside_are_sent_unencoded(ranks: Any, change: str, names: Sequence[str], tmp_path: Any) -> None:
    for name, (before, after, equal) in ranks(4).each(change_case, names, change, str(tmp_path)):
        assert before > 0, name  # or it would not show
        assert after == 0 and equal, (name, after)


def change_case(name: str, change: str, folder: str) -> tuple[float, float, bool]:
    """Return the largest distance of parameters to the optimizer's weights on any rank, before the change and one step
    after it, and whether replicas are equal then."""

    def distance(engine: Any) -> float:
        if hasattr(engine.optimizer, "parameters"):
            engine.optimizer.drain_parameters()
        distance = torch.tensor(distance_to_masters(engine))
        dist.all_reduce(distance, op=dist.ReduceOp.MAX)
        return distance.item()

    # Sizes that allow DeepSpeed to set a rank's part.
    job = Job((12, 36, 28, 8), zero=SMALL, dtype="bf16", optimizer="Adam", empty=False)
    key = {"resync_T": 3} if change == "every so many" else {}
    engine, model, data = training.begin(job, training.placed(name, **{KEY: key}))
    for number in range(2):
        training.step(engine, job, number, data)
    before = distance(engine)
    _change(change, engine, model, folder, job, data)
    if change != "load_checkpoint":
        training.step(engine, job, 2, data)
    return before, distance(engine), training.replicas_equal(training.whole_weights(model))


def _change(change: str, engine: Any, model: Any, folder: str, job: Job, data: Any) -> None:
    weight = model.layers[1].weight
    if change == "safe_set_full":
        safe_set_full_fp32_param(weight, torch.randn(28, 36, generator=torch.Generator().manual_seed(1)))
    elif change == "safe_set_local":
        if dist.get_rank() == 0:  # one rank's part of it
            safe_set_local_fp32_param(weight, torch.randn(weight.ds_tensor.ds_numel))
    elif change == "load_state_dict":
        states = {name: 2 * value for name, value in model.state_dict().items()}
        if dist.get_rank() == 0:  # and the others get it from there
            model.load_state_dict(states)
        for param in model.parameters():
            dist.broadcast(param.data, 0)
    elif change == "GatheredParameters":
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            if not hasattr(weight, "ds_id") or dist.get_rank() == 0:
                weight.data.mul_(2)
    elif change == "load_checkpoint":
        engine.save_checkpoint(folder, "some")
        for _ in range(2):
            training.step(engine, job, 2, data)
        engine.load_checkpoint(folder, "some")


@with_cases("dtype, names", ("bf16", SUMS[1:2]), *deep(("bf16", SUMS), ("fp32", SUMS)))
def test_gradient_sums_are_gathered_in_few_bits(ranks: Any, dtype: str, names: tuple[str, ...]) -> None:
    job = Job(zero=SMALL, dtype=dtype, accumulation=2, groups=2, steps=3)
    for name, (equal, apart) in ranks(4).each(sums_case, names, job):
        assert equal, name
        assert 0 < apart < (5e-3 if dtype == "fp32" else 2e-2), (name, apart)


def sums_case(name: str, job: Job) -> tuple[bool, float]:
    """Return whether replicas are equal, and the relative distance of weights to those of a run without the key."""
    ours, exact = (training.train(job, training.placed(name, **key)) for key in ({KEY: {"bits": 8}}, {}))
    apart = (ours.weights - exact.weights).abs().max() / exact.weights.abs().max()
    return training.replicas_equal(ours.weights), apart.item()


def test_errors_of_sums_are_sent_with_next_sums(ranks: Any) -> None:
    for applied, skipped, equal, noise in ranks(2).run(feedback_case):
        assert equal and applied < 0.01 and skipped > 0.05, (applied, skipped)
        assert 0.9 < noise < 1.4, noise  # 2 if an error were added as a whole


def feedback_case() -> tuple[float, float, bool, float]:
    """Return the distance of the mean of 50 gathered sums to the sum, if steps are applied and if they are skipped;
    whether all ranks get the same bits; and the squared distance of changing sums, relative to that of the first one,
    which has no error."""
    numel, off, equal = 1001, [], True
    for applied, varies in ((True, False), (False, False), (True, True)):
        generator, squares = torch.Generator().manual_seed(3), []
        gradient = torch.randn(numel, generator=generator)
        hop = make_reduce(None, "hop")
        hop.sums = QuantizedSums(UpdateSettings().sums)
        total = torch.zeros(numel)
        for _ in range(50):
            arrived = ActiveTransfer(hop.all_reduce(gradient.clone(), (ShardSpan(0, 0, 0, numel),))).finish()
            equal &= training.replicas_equal(arrived)
            hop.sums.errors.finish_step(applied)
            total += arrived
            expected = gradient * dist.get_world_size()
            squares.append((arrived - expected).square().sum().item())
            gradient = torch.randn(numel, generator=generator) if varies else gradient
        off.append(((total / 50 - expected).abs().max() / expected.abs().max()).item())
    return off[0], off[1], equal, sum(squares[10:]) / 40 / squares[0]


def test_saves_are_refused_while_parameters_are_offloaded(ranks: Any, tmp_path: Any) -> None:
    for refused, saved in ranks(4).run(offloaded_case, str(tmp_path)):
        assert refused.startswith("Parameters are offloaded, but with zero_optimization.paro_quantized_updates")
        assert refused.endswith("Call engine.reload_states() first.") and saved


def offloaded_case(folder: str) -> tuple[str, bool]:
    """Return the error of a save while parameters are offloaded, and whether a later save succeeds."""
    job = training.Job(zero=training.SMALL, empty=False)
    engine, _ = training.make_trained(job, training.placed("IIG", **{KEY: {}}))
    # Here the device is the host, and DeepSpeed looks for what is on the device.
    engine.optimizer.offloaded_states.add(OffloadStateTypeEnum.lp_params)
    error = ""
    try:
        engine.save_checkpoint(folder, "refused")
    except RuntimeError as raised:
        error = str(raised)
    engine.optimizer.offloaded_states.clear()
    dist.barrier()
    engine.save_checkpoint(folder, "saved")
    dist.barrier()
    return error, Path(folder, "saved").is_dir()


def test_loads_warn_about_missing_and_unused_errors(ranks: Any, tmp_path: Any) -> None:
    warnings, *other_ranks = ranks(4).run(halves_case, str(tmp_path))
    assert warnings == [["errors of sums start at zero"], ["errors of sums were saved, but are not loaded"], []]
    assert all(lines == [[], [], []] for lines in other_ranks)


def halves_case(folder: str) -> list[list[str]]:
    """Return the warnings of loads of errors: of one half of an all-reduce into both, of both into one and both."""
    job = training.Job(zero={**training.SMALL, "zeropp_loco_param": {}}, empty=False)
    keys: dict[str, dict[str, Any]] = {"one": {}, "both": {KEY: {}}}
    for half, key in keys.items():
        engine, _ = training.make_trained(job, training.placed("NII", **key))
        engine.save_checkpoint(folder, half)
        engine.destroy()
    warnings_of_loads = []
    for saved, loaded in (("one", "both"), ("both", "one"), ("both", "both")):
        engine, _ = training.make_engine(job, training.placed("NII", **keys[loaded]))
        with logged() as lines:
            engine.load_checkpoint(folder, saved)
        warnings = [line for level, line in lines if level == "WARNING" and "errors of" in line]
        warnings_of_loads.append([line.split(": ")[2] for line in warnings])
        engine.destroy()
    return warnings_of_loads


def test_padding_of_optimizer_weights_is_zero_after_a_load(ranks: Any) -> None:
    assert ranks(4).run(padding_case) == [(True, True)] * 4


def padding_case() -> tuple[bool, bool]:
    """Return whether the optimizer's weights have padding here or on other ranks, and whether it is zero after they
    were copied from the model into reused memory."""
    job = training.Job(sizes=(13, 37, 29, 7), zero=training.SMALL, empty=False)
    engine, _ = training.make_engine(job, training.placed("NIG", **{KEY: {}}))
    optimizer = engine.optimizer

    def leave_nan(_: None, updates: Any) -> None:
        for _, own in updates._separate_partitions():
            own.fill_(torch.nan)

    with calls.after(FlatUpdates, "_allocate_partitions", leave_nan):  # what others have left in that memory
        optimizer._restore_from_bit16_weights()
    weights = optimizer.single_partition_of_fp32_groups
    padding = [span.of(weights[buffer.number].detach()) for buffer in optimizer.buffers for span in buffer.padding()]
    counted = torch.tensor([float(sum(part.numel() for part in padding))])
    dist.all_reduce(counted)
    return bool(counted.item()), all(not part.any() for part in padding)
