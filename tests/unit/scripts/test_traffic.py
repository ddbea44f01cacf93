# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The byte counter, against messages of known size and known route."""

from typing import Any

import pytest

NUMEL = 100_000


def test_each_byte_is_counted_once_at_its_receiver(ranks: Any) -> None:
    for matrix, intra, inter in ranks(4).run(traffic_case):
        expected = {(1, 0): 4 * NUMEL, (2, 3): 8 * NUMEL}  # (receiver, sender)
        for dst, row in enumerate(matrix):
            for src, count in enumerate(row):
                assert count == pytest.approx(expected.get((dst, src), 0), rel=0.01, abs=2000), (dst, src)
        assert intra == pytest.approx([0, 4 * NUMEL, 8 * NUMEL, 0], rel=0.01, abs=4000)
        assert sum(inter) < 16_000


def traffic_case() -> tuple[list[list[int]], list[int], list[int]]:
    """Rank 0 sends one message to 1, rank 3 one of twice the size to 2."""
    import torch
    from deepspeed import comm as dist

    from scripts.emulation.traffic import TrafficMeter

    rank = dist.get_rank()
    meter = TrafficMeter()
    for round_ in range(2):  # connections open in the first
        dist.barrier()
        if round_:
            meter.start()
        message = torch.ones(NUMEL if rank < 2 else 2 * NUMEL)
        if rank in (0, 3):
            dist.send(message, {0: 1, 3: 2}[rank])
        else:
            dist.recv(message, {1: 0, 2: 3}[rank])
        dist.barrier()
    meter.stop()
    matrix = meter.read()
    split = meter.split(2)
    return matrix, split.intra, split.inter
