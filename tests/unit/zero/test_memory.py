# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of each model state on a rank, compared with the formula; a step needs only a few buckets more."""

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from deepspeed import comm as dist
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext import model_bytes
from deepspeed_ext.config.settings import UpdateSettings
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.planner.costs import predict
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.models import describe
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement, StateBytes, Strategy
from tests.harness import calls, networks, training
from tests.harness.tiers import deep, with_cases
from tests.harness.training import NOTHING_KEPT, PARTITIONED, REPLICATED

BYTES = {"parameter_bytes": 2, "gradient_bytes": 4, "optimizer_bytes": 12}
MIXED: dict[str, Any] = {  # bf16, gradients accumulated in fp32, Adam with an fp32 master copy
    "dtype": "bf16",
    "optimizer": "Adam",
    "empty": False,
    "config": {
        "data_types": {"grad_accum_dtype": "fp32"},
        # Fused, because Adam's temporaries, twice the optimizer's shard, would hide other allocations.
        "optimizer": {"params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True, "fused": True}},
    },
}
LAYERS, WIDTH = 24, 256
LAYER = WIDTH * WIDTH


class Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``, mallinfo(3)."""

    _fields_: ClassVar = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if mallinfo2 is not None:
    mallinfo2.restype = Mallinfo2


has_mallinfo = pytest.mark.skipif(mallinfo2 is None, reason="needs glibc 2.33")


def start_engine(name: str, group: int, **job: Any) -> tuple[Any, Callable[[bool], None]]:
    """Return an engine after its first step, which creates states, and a function for its micro-steps."""
    details = training.Job(**{**MIXED, **job})
    engine, _, data = training.begin(details, training.placed(name, group))

    def micro_step(boundary: bool) -> None:
        engine.set_gradient_accumulation_boundary(boundary)
        training.step(engine, details, 0, data)
        if name in PARTITIONED:
            engine.optimizer.drain_parameters()

    micro_step(True)
    return engine, micro_step


@pytest.mark.quick
@pytest.mark.parametrize("dtype, each", [(torch.bfloat16, 2), (torch.float32, 4)])
def test_parameters_have_the_size_of_the_trained_dtype(dtype: torch.dtype, each: int) -> None:
    config = SimpleNamespace(zero_config=SimpleNamespace(offload_param=None, offload_optimizer=None))
    engine: Any = SimpleNamespace(_config=config, get_data_types=lambda: (dtype, torch.float32))
    assert model_bytes.states_on_device(engine, [torch.nn.Parameter(torch.zeros(10))]).parameters == 10 * each


@with_cases(
    "world, group, frozen, names, modules",
    (6, 3, (1,), REPLICATED, {}),
    (6, 3, (1,), ("INI", "IIG", "GGG"), {}),
    (6, 3, (1,), ("IIG",), {"layers.2": "N"}),
    (6, 3, (1,), ("GGG",), {"layers.[12]": "I"}),
    *deep((6, 3, (1,), PARTITIONED, {}), (4, 2, (), REPLICATED, {}), (4, 2, (), PARTITIONED, {})),
)
def test_sizes_of_model_states_match_the_formula(
    ranks: Any, world: int, group: int, frozen: tuple[int, ...], names: tuple[str, ...], modules: dict[str, str]
) -> None:
    for name, (model, memory, after_step) in ranks(world).each(memory_case, names, group, frozen, modules):
        strategy, states, cluster = STRATEGIES[name], model.states, GroupSizes(world, group)
        expected = predict(strategy, cluster, model, Rates.of_links(cluster, group, 100, 10)).memory
        assert not modules or strategy.memory(cluster, states).parameters < memory.parameters < states.parameters
        assert memory.parameters == pytest.approx(expected.parameters, rel=0.05), name
        assert memory.gradients == pytest.approx(expected.gradients, rel=0.05), name
        assert memory.optimizer == pytest.approx(expected.optimizer, rel=0.05), name
        # After the step there are none; with ZeRO-3's flat buffer no more than are in use.
        last = strategy.os if strategy.g == Placement.N else strategy.g
        buffer = states.gradients / cluster.shards(last) if strategy.stage == 3 else 0
        assert after_step == pytest.approx(buffer, rel=0.05), name


def memory_case(name: str, group: int, frozen: tuple[int, ...], modules: Any) -> tuple[Model, StateBytes, float]:
    """Return for each strategy the model, bytes on this rank within an accumulation, and gradients after a step."""
    zero = NOTHING_KEPT | ({"paro_modules": modules} if modules else {})
    engine, micro_step = start_engine(name, group, sizes=(256, 255, 256, 300), frozen=frozen, zero=zero)
    micro_step(False)
    model = describe(engine.module, BYTES["parameter_bytes"], BYTES["gradient_bytes"])
    between = model_bytes.measure_state_bytes(engine)
    micro_step(True)
    return model, between, model_bytes.measure_state_bytes(engine).gradients


def bytes_at_boundary(strategy: Strategy, cluster: GroupSizes, states: ModelStates) -> float:
    """Return the additional bytes of gradients at the accumulation boundary. With g = N full gradients are freed
    bucket by bucket as they fill the optimizer's shard, or with p = N the I-slices. With p = N and g = I the shard is
    allocated in addition to the I-slices."""
    if strategy.p > Placement.N:
        return states.gradients / cluster.shards(strategy.os) if strategy.g == Placement.N else 0.0
    if strategy.g == Placement.G:
        return 0.0
    return states.gradients / cluster.shards(Placement.I if strategy.g == Placement.N else strategy.os)


@with_cases("names", ("IGG",), *deep((("NIG", "NNN", "NGG", "NNG"),), (("IIG", "GGG", "ING"),)))
@has_mallinfo
def test_a_step_allocates_only_a_few_buckets(ranks: Any, names: tuple[str, ...]) -> None:
    cluster, states = GroupSizes(4, 2), ModelStates.of(LAYERS * LAYER, **BYTES)
    for name, units, accumulating, boundary in ranks(4).rows(peak_case, names, 2):
        # A layer that is gathered and unpacked, its gradient, the bucket, its message, the parts that arrive and
        # their sum in fp32, gloo's own copies: 10 layers were counted. A second copy of anything is 24 or more.
        # A unit of two layers has another layer gathered, and two more gradients.
        slack = (18 if units else 14) / LAYERS * states.parameters
        assert slack / 14 < accumulating < slack, (name, accumulating / slack)  # a gathered layer is seen
        boundary -= bytes_at_boundary(STRATEGIES[name], cluster, states)
        assert boundary < slack, (name, boundary / slack)


def peak_case(names: tuple[str, ...], group: int) -> list[tuple[str, bool, float, float]]:
    """Return for each run whether it has units, and its peak bytes beyond the formula: in a micro-step, and in one at
    the boundary with the optimizer step."""
    cluster, states = GroupSizes(dist.get_world_size(), group), ModelStates.of(LAYERS * LAYER, **BYTES)
    zero = {"reduce_bucket_size": LAYER, "allgather_bucket_size": LAYER, "sub_group_size": LAYER, **NOTHING_KEPT}
    rows = []
    runs = [(name, units) for name in names for units in ((False, True) if name in PARTITIONED else (False,))]
    for number, (name, units) in enumerate(runs[:1] + runs):
        # The first run, of a small model, triggers late imports, and is not evaluated.
        sizes = (WIDTH,) * ((LAYERS // 2 if units else LAYERS) + 1 if number else 3)
        job = {"network": networks.Blocks} if units else {}
        engine, micro_step = start_engine(name, group, sizes=sizes, zero=zero, **job)
        gc.collect()
        expected = STRATEGIES[name].memory(cluster, states).total
        # Bytes in use now, less the states that exist now, are not model states.
        other = bytes_in_use() - model_bytes.measure_state_bytes(engine).total
        # The least of five: gloo's threads buffer what arrives early from other ranks, more or less by chance.
        peaks = [min(peak_of(partial(micro_step, boundary)) for _ in range(5)) for boundary in (False, True)]
        rows.append((name, units, *(peak - other - expected for peak in peaks)))
        engine.destroy()
    return rows[1:]


@with_cases("names", ("NIG", "NII", "NNN"), ("IIG", "III", "GNG"))
@has_mallinfo
@pytest.mark.deep
def test_muon_allocates_a_shard_and_a_few_matrices(ranks: Any, names: tuple[str, ...]) -> None:
    """It needs this step's momentum in fp32 until the step is applied, and rounds of a matrix for each owner."""
    cluster = GroupSizes(4, 2)
    for name, momentum, peak in ranks(4).rows(muon_case, names):
        shard = LAYERS * LAYER / cluster.shards(STRATEGIES[name].os)
        # Newton-Schulz of a matrix with what travels: 32 to 35 bytes for each of its elements were counted. A copy
        # of all matrices in bf16 is 48.
        slack = 42 * LAYER
        assert momentum == pytest.approx(shard, rel=0.02), (name, momentum)
        assert peak < 4 * shard + slack, (name, (peak - 4 * shard) / LAYER)


def muon_case(names: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """Return elements of momentum on this rank, and the peak bytes of Muon's part of a step."""
    zero = {"reduce_bucket_size": LAYER, "allgather_bucket_size": LAYER, "sub_group_size": LAYER, **NOTHING_KEPT}
    rows = []
    config = {"data_types": {"grad_accum_dtype": "fp32"}}
    for number, name in enumerate(names[:1] + names):  # as above
        sizes = (WIDTH,) * (LAYERS + 1 if number else 3)
        engine, micro_step = start_engine(name, 2, sizes=sizes, zero=zero, optimizer="Muon", config=config)
        muon, peaks = engine.optimizer.muon, []
        apply = muon.apply

        def noting(apply: Any = apply, peaks: Any = peaks) -> None:
            gc.collect()
            before = bytes_in_use()
            peaks.append(peak_of(apply) - before)

        muon.apply = noting
        micro_step(True)
        states = engine.optimizer.optimizer.state.values()
        momentum = sum(state["momentum_buffer"].numel() for state in states if "momentum_buffer" in state)
        rows.append((name, momentum, max(peaks)))
        engine.destroy()
    return rows[1:]


# Building DeepSpeed's CPU Adam takes a minute.
@pytest.mark.parametrize("torch_adam", [True, *deep(False)])
@has_mallinfo
def test_offloaded_gradients_stay_on_the_host(ranks: Any, torch_adam: bool) -> None:
    """The optimizer reads them there: with g = G a micro-step allocates no other memory that outlives it."""
    for name, growth, numel, shares in ranks(4).rows(offloaded_case, ("NGG", "NIG"), torch_adam):
        gradients = 2 * numel  # bytes, in bf16
        expected = {"NGG": 0, "NIG": gradients / 2}[name]
        assert growth == pytest.approx(expected, abs=gradients / 16), name
        assert not shares or name == "NGG", "there is nothing on the host before the boundary"
        assert name != "NGG" or 0.2 * numel < sum(shares) < 0.3 * numel, shares


def offloaded_case(names: tuple[str, ...], torch_adam: bool) -> list[tuple[str, int, int, list[int]]]:
    """Return bytes that a micro-step allocates, the model's elements, and those that upstream finds on the host."""
    zero = {"reduce_bucket_size": LAYER, "allgather_bucket_size": LAYER, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_force_ds_cpu_optimizer": False, "optimizer": {"params": {"lr": 1e-2, "torch_adam": torch_adam}}}
    rows = []
    for name in names[:1] + names:  # as above
        engine, micro_step = start_engine(name, 2, sizes=(WIDTH,) * 7, zero=zero, config=config)
        optimizer = engine.optimizer
        optimizer.accumulated_grads_in_cpu.clear()
        gc.collect()
        before = bytes_in_use()
        micro_step(False)
        gc.collect()
        growth = bytes_in_use() - before
        read = {master.grad.data_ptr() for master in optimizer.single_partition_of_fp32_groups}
        gradients = optimizer.accumulated_grads_in_cpu.values()
        shares = [part.numel() for part in gradients if part.any() and part.untyped_storage().data_ptr() in read]
        rows.append((name, growth, sum(p.numel() for p in engine.module.parameters()), shares))
        engine.destroy()
    return rows[1:]


@with_cases("names", ("NNN", "NIG"), ("III", "IIG"))
@pytest.mark.deep
def test_quantized_updates_keep_only_errors_of_sums(ranks: Any, kernels: bool, names: Any) -> None:
    cases = [*((name, {}) for name in names), ("NIG", {"round_robin_gradients": True})]  # flat, without stripes
    cluster, numel, sent = GroupSizes(4, 2), 8 * LAYER, Compression(updates=UpdateSettings())
    shard = numel / cluster.ranks
    for (name, zero), (growth, after, within) in ranks(4).each(few_bits_case, cases):
        errors = 2 * sent.error_bytes(STRATEGIES[name], cluster, numel)
        assert within == pytest.approx(errors, rel=0.02), name
        assert after == pytest.approx(errors / 2, rel=0.02), name
        assert growth == pytest.approx(after, abs=0.02 * shard), (name, zero)


def few_bits_case(case: tuple[str, dict[str, Any]]) -> tuple[float, int, int]:
    """Return the bytes that the key adds between steps, and the bytes of errors of sums, then and within a step."""
    (name, zero), bytes_taken = case, []
    for keys in ({}, {"paro_quantized_updates": {}}):
        before = bytes_of_tensors()
        zero_keys = {"reduce_bucket_size": LAYER, "allgather_bucket_size": LAYER, **NOTHING_KEPT, **zero, **keys}
        engine, micro_step = start_engine(name, 2, sizes=(WIDTH,) * 9, zero=zero_keys)
        errors, within = engine.optimizer.families["dense"].reduce.inter.sums.errors, []
        nbytes = getattr(errors, "nbytes", lambda: 0)
        with calls.before(engine.optimizer, "step", lambda *_, nbytes=nbytes, at=within: at.append(nbytes())):
            for _ in range(2):
                micro_step(True)
        bytes_taken.append(bytes_of_tensors() - before)
        after = nbytes()
        engine.destroy()
        del engine, micro_step, errors, nbytes
    return bytes_taken[1] - bytes_taken[0], after, within[-1]


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors that Python can reach, without the allocator's noise."""
    gc.collect()
    storages = (value.untyped_storage() for value in gc.get_objects() if isinstance(value, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bytes_in_use() -> int:
    """Return the bytes that the process has allocated by malloc, including torch's CPU tensors and gloo's buffers."""
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def peak_of(work: Callable[[], Any]) -> int:
    """Return the most bytes in use after any operator that ``work`` runs, collectives and backward included."""

    class Peak(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            self.most = max(self.most, bytes_in_use())
            return result

    with Peak() as peak:
        work()
    return peak.most
