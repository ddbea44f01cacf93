# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of each model state, against the formula; and that a step needs only a few buckets beside it."""

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from deepspeed import comm as dist
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext import model_bytes
from deepspeed_ext.config.settings import UpdateSettings
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement, StateBytes, Strategy
from tests.harness import training
from tests.harness.tiers import by_strategies, deep
from tests.harness.training import PARTITIONED, REPLICATED

BYTES = {"parameter_bytes": 2, "gradient_bytes": 4, "optimizer_bytes": 12}
MIXED: dict[str, Any] = {  # bf16, gradients accumulated in fp32, Adam with an fp32 master copy
    "dtype": "bf16",
    "optimizer": "Adam",
    "empty": False,
    "config": {
        "data_types": {"grad_accum_dtype": "fp32"},
        # Fused, or Adam's temporaries, twice the optimizer's shard, would hide what is looked for.
        "optimizer": {"params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True, "fused": True}},
    },
}
NEVER_KEPT = {
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
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


def begin(name: str, group: int, **job: Any) -> tuple[Any, Callable[[bool], None]]:
    """An engine after its first step, which makes the optimizer's states, and what runs a micro-step of it."""
    details = training.Job(**{**MIXED, **job})
    engine, _ = training.make_engine(details, training.placed(name, group))
    data = training.batches(details)

    def micro_step(boundary: bool) -> None:
        engine.set_gradient_accumulation_boundary(boundary)
        training.micro_step(engine, details, 0, *next(data))
        engine.step()
        if name in PARTITIONED:
            engine.optimizer.drain_parameters()

    micro_step(True)
    return engine, micro_step


@pytest.mark.parametrize(
    "world, group, frozen, names",
    [
        (6, 3, (1,), REPLICATED),
        (6, 3, (1,), ("INI", "IIG", "GGG")),
        *deep((6, 3, (1,), PARTITIONED), (4, 2, (), REPLICATED), (4, 2, (), PARTITIONED)),
    ],
    ids=by_strategies,
)
def test_each_state_is_as_large_as_the_formula_says(
    ranks: Any, world: int, group: int, frozen: tuple[int, ...], names: tuple[str, ...]
) -> None:
    for rows in ranks(world).run(memory_case, names, group, frozen):
        for name, states, memory, left in rows:
            expected = STRATEGIES[name].memory(GroupSizes(world, group), states)
            assert memory.parameters == pytest.approx(expected.parameters, rel=0.05), name
            assert memory.gradients == pytest.approx(expected.gradients, rel=0.05), name
            assert memory.optimizer == pytest.approx(expected.optimizer, rel=0.05), name
            # After the step nothing; with ZeRO-3's flat buffer no more than in use.
            strategy = STRATEGIES[name]
            last = strategy.os if strategy.g == Placement.N else strategy.g
            buffer = states.gradients / GroupSizes(world, group).shards(last) if strategy.stage == 3 else 0
            assert left == pytest.approx(buffer, rel=0.05), name


def memory_case(
    names: tuple[str, ...], group: int, frozen: tuple[int, ...]
) -> list[tuple[str, ModelStates, StateBytes, float]]:
    """Of each strategy the model states, what this rank holds in an accumulation, and of gradients after a step."""
    rows = []
    for name in names:
        engine, micro_step = begin(name, group, sizes=(256, 255, 256, 300), frozen=frozen, zero=NEVER_KEPT)
        micro_step(False)
        numels = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in engine.module.parameters()]
        states = ModelStates.of(sum(n for n, _ in numels), sum(n for n, trainable in numels if trainable), **BYTES)
        between = model_bytes.measure_state_bytes(engine)
        micro_step(True)
        rows.append((name, states, between, model_bytes.measure_state_bytes(engine).gradients))
        engine.destroy()
    return rows


def crossing(strategy: Strategy, cluster: GroupSizes, states: ModelStates) -> float:
    """Bytes of gradients that come on top at the accumulation boundary.

    With g = N whole gradients are freed bucket by bucket as they fill the optimizer's shard, or where p = N the
    I-slices. Where p = N and g = I the shard comes beside the I-slices.
    """
    if strategy.p > Placement.N:
        return states.gradients / cluster.shards(strategy.os) if strategy.g == Placement.N else 0.0
    if strategy.g == Placement.G:
        return 0.0
    return states.gradients / cluster.shards(Placement.I if strategy.g == Placement.N else strategy.os)


@pytest.mark.parametrize(
    "names", [("IGG",), *deep((("NIG", "NNN", "NGG", "NNG"),), (("IIG", "GGG", "ING"),))], ids=by_strategies
)
@has_mallinfo
def test_a_step_needs_a_few_buckets_beside_the_states(ranks: Any, names: tuple[str, ...]) -> None:
    cluster, states = GroupSizes(4, 2), ModelStates.of(LAYERS * LAYER, **BYTES)
    for rows in ranks(4).run(peak_case, names, 2):
        for name, accumulating, boundary in rows:
            # A layer that is gathered and unpacked, its gradient, the bucket, its message, the parts that arrive and
            # their sum in fp32, gloo's own copies: 10 layers were counted. A second copy of anything is 24 or more.
            slack = 14 / LAYERS * states.parameters
            assert slack / 14 < accumulating < slack, (name, accumulating / slack)  # a gathered layer is seen
            boundary -= crossing(STRATEGIES[name], cluster, states)
            assert boundary < slack, (name, boundary / slack)


def peak_case(names: tuple[str, ...], group: int) -> list[tuple[str, float, float]]:
    """Most bytes beyond the formula's during a micro-step, and during one at the boundary with the optimizer step."""
    cluster, states = GroupSizes(dist.get_world_size(), group), ModelStates.of(LAYERS * LAYER, **BYTES)
    zero = {"reduce_bucket_size": LAYER, "allgather_bucket_size": LAYER, "sub_group_size": LAYER, **NEVER_KEPT}
    rows = []
    for number, name in enumerate(names[:1] + names):
        # The first run, of a small model, imports what is imported late, and is not looked at.
        engine, micro_step = begin(name, group, sizes=(WIDTH,) * (LAYERS + 1 if number else 3), zero=zero)
        gc.collect()
        due = STRATEGIES[name].memory(cluster, states).total
        # All that is in use now, less the states that are held now, is not model states.
        other = bytes_in_use() - model_bytes.measure_state_bytes(engine).total
        peaks = [peak_of(partial(micro_step, boundary)) for boundary in (False, True)]
        rows.append((name, *(peak - other - due for peak in peaks)))
        engine.destroy()
    return rows[1:]


@pytest.mark.parametrize("names", [("NIG", "NII", "NNN"), ("IIG", "III", "GNG")], ids=by_strategies)
@has_mallinfo
@pytest.mark.deep
def test_muon_takes_a_shard_and_a_few_matrices(ranks: Any, names: tuple[str, ...]) -> None:
    """The momentum of this step until it is known to be applied, in fp32, and rounds of a matrix for each owner."""
    cluster = GroupSizes(4, 2)
    for rows in ranks(4).run(muon_case, names):
        for name, held, taken in rows:
            shard = LAYERS * LAYER / cluster.shards(STRATEGIES[name].os)
            # Newton-Schulz of a matrix with what travels: 32 to 35 bytes for each of its elements were counted. A copy
            # of all matrices in bf16 is 48.
            slack = 42 * LAYER
            assert held == pytest.approx(shard, rel=0.02), (name, held)
            assert taken < 4 * shard + slack, (name, (taken - 4 * shard) / LAYER)


def muon_case(names: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """Elements of momentum on this rank, and the most bytes that Muon's part of a step takes beside all others."""
    zero = {"reduce_bucket_size": LAYER, "allgather_bucket_size": LAYER, "sub_group_size": LAYER, **NEVER_KEPT}
    rows = []
    config = {"data_types": {"grad_accum_dtype": "fp32"}}
    for number, name in enumerate(names[:1] + names):  # as above
        sizes = (WIDTH,) * (LAYERS + 1 if number else 3)
        engine, micro_step = begin(name, 2, sizes=sizes, zero=zero, optimizer="Muon", config=config)
        muon, taken = engine.optimizer.muon, []
        apply = muon.apply

        def noting(apply: Any = apply, taken: Any = taken) -> None:
            gc.collect()
            before = bytes_in_use()
            taken.append(peak_of(apply) - before)

        muon.apply = noting
        micro_step(True)
        states = engine.optimizer.optimizer.state.values()
        held = sum(state["momentum_buffer"].numel() for state in states if "momentum_buffer" in state)
        rows.append((name, held, max(taken)))
        engine.destroy()
    return rows[1:]


# DeepSpeed's own Adam for the host is compiled for a minute.
@pytest.mark.parametrize("torch_adam", [True, *deep(False)])
@has_mallinfo
def test_offloaded_gradients_wait_on_the_host(ranks: Any, torch_adam: bool) -> None:
    """In what the optimizer reads: with g = G a micro-step takes no other memory that outlives it."""
    for rows in ranks(4).run(offloaded_case, ("NGG", "NIG"), torch_adam):
        for name, left, numel, shares in rows:
            gradients = 2 * numel  # bytes, in bf16
            expected = {"NGG": 0, "NIG": gradients / 2}[name]
            assert left == pytest.approx(expected, abs=gradients / 16), name
            assert not shares or name == "NGG", "there is nothing on the host before the boundary"
            assert name != "NGG" or 0.2 * numel < sum(shares) < 0.3 * numel, shares


def offloaded_case(names: tuple[str, ...], torch_adam: bool) -> list[tuple[str, int, int, list[int]]]:
    """Bytes that a micro-step leaves, elements of the model, those on the host where upstream's readers look."""
    zero = {"reduce_bucket_size": LAYER, "allgather_bucket_size": LAYER, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_force_ds_cpu_optimizer": False, "optimizer": {"params": {"lr": 1e-2, "torch_adam": torch_adam}}}
    rows = []
    for name in names[:1] + names:  # as above
        engine, micro_step = begin(name, 2, sizes=(WIDTH,) * 7, zero=zero, config=config)
        optimizer = engine.optimizer
        optimizer.accumulated_grads_in_cpu.clear()
        gc.collect()
        before = bytes_in_use()
        micro_step(False)
        gc.collect()
        left = bytes_in_use() - before
        read = {master.grad.data_ptr() for master in optimizer.single_partition_of_fp32_groups}
        held = optimizer.accumulated_grads_in_cpu.values()
        shares = [one.numel() for one in held if one.any() and one.untyped_storage().data_ptr() in read]
        rows.append((name, left, sum(p.numel() for p in engine.module.parameters()), shares))
        engine.destroy()
    return rows[1:]


@pytest.mark.parametrize("names", [("NNN", "NIG"), ("III", "IIG")], ids=by_strategies)
@pytest.mark.deep
def test_updates_in_few_bits_leave_nothing_but_errors_of_sums(ranks: Any, kernels: bool, names: Any) -> None:
    cases = [*((name, {}) for name in names), ("NIG", {"round_robin_gradients": True})]  # flat, without stripes
    cluster, numel, sent = GroupSizes(4, 2), 8 * LAYER, Compression(updates=UpdateSettings())
    shard = numel / cluster.ranks
    for rows in ranks(4).run(few_bits_case, cases):
        for (name, zero), left, after, within in rows:
            errors = sent.error_bytes_in_step(STRATEGIES[name], cluster, numel)
            assert within == pytest.approx(errors, rel=0.02), name
            assert after == pytest.approx(errors / 2, rel=0.02), name
            assert left == pytest.approx(after, abs=0.02 * shard), (name, zero)


def few_bits_case(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[Any, float, int, int]]:
    """Bytes that an engine has more between steps than without the key; of errors of sums then, and within a step."""
    rows = []
    for name, zero in cases:
        taken = []
        for keys in ({}, {"paro_quantized_updates": {}}):
            before = bytes_of_tensors()
            zero_keys = {"reduce_bucket_size": LAYER, "allgather_bucket_size": LAYER, **NEVER_KEPT, **zero, **keys}
            engine, micro_step = begin(name, 2, sizes=(WIDTH,) * 9, zero=zero_keys)
            errors, within = engine.optimizer.families["dense"].reduce.inter.sums.errors, []
            nbytes = getattr(errors, "nbytes", lambda: 0)

            def noting(*given: Any, step: Any = engine.optimizer.step, nbytes: Any = nbytes, at: Any = within) -> Any:
                at.append(nbytes())
                return step(*given)

            engine.optimizer.step = noting
            for _ in range(2):
                micro_step(True)
            taken.append(bytes_of_tensors() - before)
            after = nbytes()
            engine.destroy()
            del engine, micro_step, errors, nbytes, noting
        rows.append(((name, zero), taken[1] - taken[0], after, within[-1]))
    return rows


def bytes_of_tensors() -> int:
    """What all tensors that Python knows of hold: no noise of the allocator's."""
    gc.collect()
    storages = (one.untyped_storage() for one in gc.get_objects() if isinstance(one, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bytes_in_use() -> int:
    """What the process has taken from malloc and not given back: torch's CPU tensors, those of gloo's threads, too."""
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def peak_of(work: Callable[[], Any]) -> int:
    """Most bytes in use after any operator that ``work`` runs, collectives and backward included."""

    class Peak(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            self.most = max(self.most, bytes_in_use())
            return result

    with Peak() as peak:
        work()
    return peak.most
