# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measurement of rates, on a simulated clock and on this machine: work is queued, and waiting for it takes time."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_ext.comm.process_groups import get_topology
from deepspeed_ext.planner import probe
from deepspeed_ext.planner.models import micro_step_flops
from deepspeed_ext.tools.report import flat_collectives

WAIT = 100e-6  # seconds to wait for the simulated device


def on_device(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> mock.Mock:
    """Put a simulated accelerator in the place of the real one, and return it; there is one rank."""
    monkeypatch.setattr(probe, "all_reduce_max", lambda values: values)
    monkeypatch.setattr(probe.dist, "barrier", lambda: None)
    device = mock.Mock(current_device_name=lambda: "cpu", **methods)
    monkeypatch.setattr(probe, "get_accelerator", lambda: device)
    return device


def test_a_run_is_repeated_until_waits_hardly_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a tenth of the wait counts; long runs are not repeated."""
    passed: list[float] = []
    on_device(monkeypatch, synchronize=lambda: passed.append(WAIT))
    monkeypatch.setattr(probe.time, "perf_counter", lambda: sum(passed))
    for seconds, expected, times in ((10e-6, 10e-6 + WAIT / 10, 1 + 3 * 10), (0.5, 0.5 + WAIT, 3)):
        passed.clear()
        assert probe._seconds(lambda seconds=seconds: passed.append(seconds)) == pytest.approx(expected, rel=1e-3)
        assert passed.count(seconds) == times


@pytest.mark.parametrize(
    "on_host, pinned, rate, pinnings",
    [(True, True, float("inf"), 0), (False, None, float("inf"), 0), (False, False, 1.0, 0), (False, True, 1.0, 1)],
)
def test_copies_from_the_host_use_the_memory_of_parameters(
    monkeypatch: pytest.MonkeyPatch, on_host: bool, pinned: bool | None, rate: float, pinnings: int
) -> None:
    """Nothing is measured on a host, nor without parameters there (None); else from pageable or pinned memory."""
    pin = mock.Mock(side_effect=lambda tensor: tensor)
    on_device(monkeypatch, is_synchronized_device=lambda: on_host, pin_memory=pin)
    monkeypatch.setattr(probe, "_seconds", lambda run: run().nbytes / 2**20)  # as if a MiB took a second
    assert probe._host_copy_rate(pinned) / 2**20 == rate and pin.call_count == pinnings


@pytest.mark.parametrize("on_host, free, size", [(True, 2**40, 64), (False, 2**20, 64), (False, 2**30, 128)])
def test_memory_is_probed_beyond_caches(monkeypatch: pytest.MonkeyPatch, on_host: bool, free: int, size: int) -> None:
    """MiB of the buffer: on the host, on a device with little free memory, and on one with enough."""
    on_device(monkeypatch, is_synchronized_device=lambda: on_host, available_memory=lambda: free)
    monkeypatch.setattr(probe, "_seconds", lambda run: run().nbytes / 2**20)
    with mock.patch.object(torch, "ones", wraps=torch.ones) as make_ones:
        assert probe._memory_rate() / 2**21 == pytest.approx(1, abs=1e-3)
    assert make_ones.call_args.args[0] * 4 / 2**20 == size


def test_a_rate_is_that_of_what_a_rank_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """From each of the others: a hop of three ranks, at a gigabyte a second."""
    monkeypatch.setattr(probe, "_runner", lambda hop, share, dtype: lambda: (hop.size - 1) * share * dtype.itemsize)
    monkeypatch.setattr(probe, "_seconds", lambda run: run() / 1e9)
    assert probe._hop_rate(SimpleNamespace(size=3), torch.float32).bandwidth == pytest.approx(1e9)  # type: ignore[arg-type]


def test_compute_is_estimated_rather_too_low() -> None:
    """With 3 samples: of a plain model, language models with few and many positions, and experts, one for a token."""
    model = nn.Sequential(nn.Embedding(1000, 10), nn.Linear(10, 20, bias=False), nn.Linear(20, 10, bias=False))
    model[2].requires_grad_(False)
    plain = micro_step_flops(model, 3)
    assert plain == 3 * (6 * 200 + 4 * 200)
    for config, positions in (({"n_positions": 100}, 100), ({"max_position_embeddings": 10**6}, 2048)):
        model.config = SimpleNamespace(get_text_config=lambda config=config: SimpleNamespace(**config))
        assert micro_step_flops(model, 3) == positions * plain
    routed = nn.Module()
    routed.experts = nn.ModuleList(nn.Linear(10, 20, bias=False) for _ in range(4))
    counts = SimpleNamespace(num_local_experts=4, num_experts_per_tok=1)
    routed.config = SimpleNamespace(get_text_config=lambda: counts)
    assert micro_step_flops(routed, 3) == 3 * 6 * 200


def probe_case() -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    with mock.patch.object(probe, "SIZES", (2**16, 2**20)):
        measured = probe.measure(get_topology(None, 2)).as_dict(), probe.measure_flops(torch.float32)
    dist.all_gather_object(gathered, measured)
    return gathered


def test_the_probe_gives_all_ranks_the_same_rates(ranks: Any) -> None:
    first, *others = ranks(4).run(probe_case)[0]
    assert all(rates == first for rates in others)
    rates, flops = first
    for hops in (rates["gather"], rates["reduce"]):
        assert all(1e6 < hops[hop]["bandwidth"] < 1e12 for hop in ("intra", "inter"))
    assert 1e8 < rates["memory"] < 1e13 and 1e8 < flops < 1e13


def flat_case(scatter: bool, as_shipped: bool) -> tuple[Any, list[bool]]:
    """Return the rates of plain stages' collectives, and whether each of two reductions has run on this rank."""
    zero = SimpleNamespace(reduce_scatter=scatter, use_multi_rank_bucket_allreduce=as_shipped)
    with (
        mock.patch.object(probe, "SIZES", (2**16, 2**20)),
        mock.patch.object(flat_collectives.dist, "reduce", wraps=flat_collectives.dist.reduce) as reduce,
        mock.patch.object(
            flat_collectives.dist, "reduce_scatter_tensor", wraps=flat_collectives.dist.reduce_scatter_tensor
        ) as reduce_scatter,
    ):
        rates = flat_collectives.measure(SimpleNamespace(zero_config=zero), torch.float32)  # type: ignore[arg-type]
    return rates, [reduce.called, reduce_scatter.called]


@pytest.mark.parametrize("scatter, as_shipped", [(True, True), (True, False), (False, False)])
def test_collectives_of_plain_stages_are_as_configured(ranks: Any, scatter: bool, as_shipped: bool) -> None:
    first, *others = ranks(4).run(flat_case, scatter, as_shipped)
    assert all(rates == first for rates in others) and first[1] == [scatter and not as_shipped, scatter]
    assert all(1e6 < rate.bandwidth < 1e12 for rate in vars(first[0]).values())
