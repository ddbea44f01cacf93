# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Another hop for gathers between groups can be used without any other change."""

from typing import Any

import pytest

from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates

pytestmark = pytest.mark.quick

STEPS = 2


def test_parameters_cross_in_another_form(ranks: Any) -> None:
    """In half the bytes, counted at the sockets; and all ranks have the same weights, to the bit."""
    for parameters, rows in ranks(4).run(slot_case, ("NIG", "IIG", "III")):
        states = ModelStates.of(parameters, parameter_bytes=4, gradient_bytes=4)
        for name, saved, equal, apart in rows:
            due = STRATEGIES[name].phases(GroupSizes(4, 2), states)[-1].volume.inter * STEPS / 2
            assert saved == pytest.approx(due, rel=0.02, abs=500), name
            assert equal and (0 < apart < 1e-2 if due else apart == 0), (name, apart)


def slot_case(names: tuple[str, ...]) -> tuple[int, list[tuple[str, float, bool, float]]]:
    """Parameters; and for each strategy the bytes that a rank receives less from other groups, whether all ranks have
    the same weights, and how far those are from an exact run's."""
    from unittest import mock

    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.comm.hops import GatherHop, Transfer, all_gather
    from deepspeed_ext.loco import setup
    from scripts.emulation.traffic import TrafficMeter
    from tests.harness import training

    class Bf16Gather(GatherHop):
        """Sends fp32 parameters as bfloat16."""

        exact = False

        def all_gather(self, shard: torch.Tensor, out: torch.Tensor | None = None) -> Transfer:
            if self.size == 1:
                return shard
            arrived = yield from all_gather(self.collectives, shard.bfloat16())
            return arrived.to(shard.dtype) if out is None else out.copy_(arrived)

    def trained(name: str, hop: type[GatherHop]) -> tuple[float, torch.Tensor]:
        meter = TrafficMeter()
        dist.barrier()
        meter.start()
        dist.barrier()
        with mock.patch.object(setup, "gather_hop", lambda engine, strategy: hop):
            weights = training.train(job, training.placed(name)).weights
        dist.barrier()
        meter.stop()
        dist.barrier()
        return meter.split(2).inter_mean, weights

    job = training.Job(sizes=(96, 255, 128), empty=False, steps=STEPS)
    rows = []
    for name in names:
        (plain, exact), (halved, rounded) = trained(name, GatherHop), trained(name, Bf16Gather)
        apart = ((exact - rounded).abs().max() / exact.abs().max()).item()
        rows.append((name, plain - halved, training.replicas_equal(rounded), apart))
    return exact.numel(), rows
