# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of each model state, against the formula; and that a step needs only a few buckets beside it."""

import ctypes
import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from training import PARTITIONED, REPLICATED

from deepspeed_ext.placement import STRATEGIES, Cluster, Memory, ModelStates, Placement, Strategy

sys.path.append(str(Path(__file__).parents[3] / "scripts"))

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
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split(" ")
    ]


mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if mallinfo2 is not None:
    mallinfo2.restype = Mallinfo2


BOTH = pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p-cut"])
has_mallinfo = pytest.mark.skipif(mallinfo2 is None, reason="needs glibc 2.33")


def begin(name: str, group: int, **job: Any) -> tuple[Any, Callable[[bool], None]]:
    """An engine after its first step, which makes the optimizer's states, and what runs a micro-step of it."""
    import training

    details = training.Job(**MIXED, **job)
    engine, _ = training.make_engine(details, {"paro_strategy": name, "paro_group_size": group})
    data = training.batches(details)

    def micro_step(boundary: bool) -> None:
        engine.set_gradient_accumulation_boundary(boundary)
        training.micro_step(engine, details, 0, *next(data))
        engine.step()
        if STRATEGIES[name].stage == 3:
            engine.optimizer.parameters.drain()

    micro_step(True)
    return engine, micro_step


@BOTH
@pytest.mark.parametrize("world, group", [(4, 2), (6, 3)])
@pytest.mark.parametrize("frozen", [(), (1,)], ids=["trainable", "frozen"])
def test_each_state_is_as_large_as_the_formula_says(
    ranks: Any, world: int, group: int, frozen: tuple[int, ...], names: tuple[str, ...]
) -> None:
    for rows in ranks(world).run(memory_case, names, group, frozen):
        for name, states, extra, memory in rows:
            expected = STRATEGIES[name].memory(Cluster(world, group), states)
            assert memory.parameters == pytest.approx(expected.parameters, rel=0.05), name
            assert memory.gradients == pytest.approx(expected.gradients + extra, rel=0.05), name
            assert memory.optimizer == pytest.approx(expected.optimizer, rel=0.05), name


def memory_case(
    names: tuple[str, ...], group: int, frozen: tuple[int, ...]
) -> list[tuple[str, ModelStates, float, Memory]]:
    """Model states, what ZeRO-3 adds to the gradients, and what this rank holds between two micro-steps."""
    import strategies
    from deepspeed import comm as dist

    rows = []
    for name in names:
        engine, micro_step = begin(name, group, sizes=(256, 255, 256, 300), frozen=frozen, zero=NEVER_KEPT)
        micro_step(False)
        numels = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in engine.module.parameters()]
        states = ModelStates.of(sum(n for n, _ in numels), sum(n for n, trainable in numels if trainable), **BYTES)
        extra = strategies.gradient_buffer(STRATEGIES[name], Cluster(dist.get_world_size(), group), states)
        rows.append((name, states, extra, strategies.held(engine)))
        engine.destroy()
    return rows


def crossing(strategy: Strategy, cluster: Cluster, states: ModelStates) -> float:
    """Bytes of gradients twice there at the accumulation boundary: in the I-slices and in the optimizer's shard.

    With p = N the I-slices are complete when the shard is made. Where gradients were whole until then, they are gone
    by the time, as large as they were: what comes on top is the other one of the two, at most a slice.
    """
    if strategy.p > Placement.N or strategy.g == Placement.G:
        return 0.0
    return states.gradients / cluster.shards(Placement.I if strategy.g == Placement.N else strategy.os)


@BOTH
@has_mallinfo
def test_a_step_needs_a_few_buckets_beside_the_states(ranks: Any, names: tuple[str, ...]) -> None:
    cluster, states = Cluster(4, 2), ModelStates.of(LAYERS * LAYER, **BYTES)
    for rows in ranks(4).run(peak_case, names, 2, timeout=110):
        for name, accumulating, boundary in rows:
            # A gathered layer, its gradient, the bucket, its message, the parts that arrive and their sum in fp32.
            slack = states.parameters / 2
            assert accumulating < slack, (name, accumulating / slack)
            boundary -= crossing(STRATEGIES[name], cluster, states)
            assert boundary < slack, (name, boundary / slack)


def peak_case(names: tuple[str, ...], group: int) -> list[tuple[str, float, float]]:
    """Most bytes beyond the formula's during a micro-step, and during one at the boundary with the optimizer step."""
    import strategies
    from deepspeed import comm as dist

    cluster, states = Cluster(dist.get_world_size(), group), ModelStates.of(LAYERS * LAYER, **BYTES)
    zero = {"reduce_bucket_size": LAYER, "allgather_bucket_size": LAYER, "sub_group_size": LAYER, **NEVER_KEPT}
    rows = []
    for name in names[:1] + names:  # the first run imports what is imported late, and is not looked at
        engine, micro_step = begin(name, group, sizes=(WIDTH,) * (LAYERS + 1), zero=zero)
        gc.collect()
        due = STRATEGIES[name].memory(cluster, states).total
        due += strategies.gradient_buffer(STRATEGIES[name], cluster, states)
        # All that is in use now, less the states that are held now, is not model states.
        other = bytes_in_use() - strategies.held(engine).total
        peaks = [peak_of(partial(micro_step, boundary)) for boundary in (False, True)]
        rows.append((name, *(peak - other - due for peak in peaks)))
        engine.destroy()
    return rows[1:]


def bytes_in_use() -> int:
    """What the process has taken from malloc and not given back: torch's CPU tensors, those of gloo's threads, too."""
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def peak_of(work: Callable[[], Any]) -> int:
    """Most bytes in use after any operator that ``work`` runs, collectives and backward included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Peak(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            self.most = max(self.most, bytes_in_use())
            return result

    with Peak() as peak:
        work()
    return peak.most


@has_mallinfo
def test_the_ruler_sees_what_backward_and_collectives_allocate(ranks: Any) -> None:
    for before, backward, after, collective in ranks(4).run(ruler_case):
        assert 64e6 <= backward - before < 65e6
        assert abs(after - before) < 1e6
        assert 80e6 <= collective - before < 81e6  # with the part that is sent


def ruler_case() -> tuple[int, int, int, int]:
    """Bytes in use before, at the peak of a backward that takes 64 MB, after it, and at the peak of such a gather."""
    import torch
    from deepspeed import comm as dist

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            torch.empty(16_000_000)
            return gradient

    def gather() -> None:
        mine = torch.empty(16_000_000 // dist.get_world_size())
        dist.all_gather_into_tensor(mine.new_empty(16_000_000), mine)

    loss = Greedy.apply(torch.ones(1, requires_grad=True)).sum()
    before = bytes_in_use()
    return before, peak_of(loss.backward), bytes_in_use(), peak_of(gather)
