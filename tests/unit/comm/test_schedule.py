# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What is on the wire together, and who waits."""

from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_ext.comm.schedule import Schedule, Started
from tests.harness.transfers import Handle

pytestmark = pytest.mark.quick


def transfer(log: list[str], name: str) -> Any:
    """Two hops."""
    for hop in (1, 2):
        log.append(f"start {name}{hop}")
        yield Handle(log, f"{name}{hop}")
    log.append(f"done {name}")
    return torch.empty(0)


def test_overlapped_transfers_are_one_hop_apart() -> None:
    log: list[str] = []
    schedule = Schedule(overlap=True)
    for name in "ab":
        schedule.submit(transfer(log, name))
    schedule.drain()
    # The first hop of b is on the wire together with the second of a.
    assert log == [
        *("start a1", "wait a1", "start a2", "start b1", "wait a2", "done a"),
        *("wait b1", "start b2", "wait b2", "done b"),
    ]


def test_without_overlap_a_transfer_ends_before_the_next_starts() -> None:
    log: list[str] = []
    schedule = Schedule(overlap=False)
    for name in "ab":
        schedule.submit(transfer(log, name))
    assert log == [
        f"{what}" for n in "ab" for what in (f"start {n}1", f"wait {n}1", f"start {n}2", f"wait {n}2", f"done {n}")
    ]


def test_started_has_one_hop_on_the_wire_until_it_is_finished() -> None:
    log: list[str] = []
    started = Started(transfer(log, "a"))
    assert log == ["start a1"]
    result = started.finish()
    assert log == ["start a1", "wait a1", "start a2", "wait a2", "done a"]
    assert started.finish() is result and log[-1] == "done a"


def test_started_has_all_hops_on_the_wire_where_waiting_does_not_block_the_host() -> None:
    log: list[str] = []
    with mock.patch("deepspeed_ext.comm.schedule.get_accelerator") as accelerator:
        accelerator().is_synchronized_device.return_value = False
        started = Started(transfer(log, "a"), hops=2)
        assert log == ["start a1", "wait a1", "start a2"]
        assert started.finish().numel() == 0
    assert log == ["start a1", "wait a1", "start a2", "wait a2", "done a"]


def test_started_without_hops_is_finished_at_once() -> None:
    """As in a group of one rank."""
    kept = torch.ones(3)

    def nothing() -> Any:
        return kept
        yield

    assert Started(nothing()).finish() is kept
