# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How rates are measured, on a made-up clock: work is queued, and waiting for it costs time."""

from typing import Any

import pytest


def test_what_a_run_takes_among_others(ranks: Any) -> None:
    ((short, short_runs), (long, long_runs)) = ranks(1).run(clock_case)[0]
    assert short == pytest.approx(10e-6 + 100e-6 / 10, rel=1e-3)  # of the wait a tenth
    assert short_runs == 1 + 3 * 10
    assert long == pytest.approx(0.5 + 100e-6, rel=1e-3) and long_runs == 3  # seconds are not wasted


def clock_case() -> list[tuple[float, int]]:
    """Seconds that are found, and runs, of what takes 10 us and of what takes 0.5 s where a wait takes 100 us."""
    from unittest import mock

    from deepspeed_ext.planner import probe

    found = []
    for seconds in (10e-6, 0.5):
        clock, runs = [0.0], []

        def pass_by(span: float, clock: list[float] = clock) -> None:
            clock[0] += span

        def run(seconds: float = seconds, runs: list[None] = runs, pass_by: Any = pass_by) -> None:
            runs.append(None)
            pass_by(seconds)

        device = mock.Mock(synchronize=lambda pass_by=pass_by: pass_by(100e-6), current_device_name=lambda: "cpu")
        with (
            mock.patch.object(probe, "get_accelerator", lambda device=device: device),
            mock.patch.object(probe.time, "perf_counter", lambda clock=clock: clock[0]),
        ):
            found.append((probe._seconds(run), len(runs)))
    return found


def test_copies_from_the_host_are_measured_where_there_is_a_device(ranks: Any) -> None:
    """Where parameters are on the host, from memory of their kind."""
    assert ranks(1).run(host_case)[0] == [(float("inf"), 0), (float("inf"), 0), (1.0, 0), (1.0, 1)]


def host_case() -> list[tuple[float, int]]:
    """MiB a second, and how often memory was pinned: on the host, without parameters there, and with both."""
    from unittest import mock

    from deepspeed_ext.planner import probe

    found = []
    for on_host, pinned in ((True, True), (False, None), (False, False), (False, True)):
        device = mock.Mock(
            is_synchronized_device=lambda on_host=on_host: on_host,
            current_device_name=lambda: "cpu",
            pin_memory=mock.Mock(side_effect=lambda tensor: tensor),
        )
        with (
            mock.patch.object(probe, "get_accelerator", lambda device=device: device),
            mock.patch.object(probe, "_seconds", lambda run: run().nbytes / 2**20),
        ):
            rate = probe._host(pinned)
        found.append((rate / 2**20, device.pin_memory.call_count))  # as if a MiB took a second
    return found


def test_memory_is_measured_beyond_caches_where_there_is_room(ranks: Any) -> None:
    host, small, large = ranks(1).run(memory_case)[0]
    assert host == 64 and small == 64 and large == 128


def memory_case() -> list[float]:
    """MiB that are read and written: on the host, on a device with little memory, on one with some."""
    from unittest import mock

    import torch

    from deepspeed_ext.planner import probe

    found = []
    for on_host, room in ((True, 2**40), (False, 2**20), (False, 2**30)):
        device = mock.Mock(
            is_synchronized_device=lambda on_host=on_host: on_host,
            available_memory=lambda room=room: room,
            current_device_name=lambda: "cpu",
        )
        with (
            mock.patch.object(probe, "get_accelerator", lambda device=device: device),
            mock.patch.object(probe, "_seconds", lambda run: run().nbytes / 2**20),
        ):
            # As if a MiB took a second: the rate tells nothing, so look at the buffer.
            with mock.patch.object(torch, "ones", wraps=torch.ones) as ones:
                rate = probe._memory()
            assert abs(rate / 2**21 - 1) < 1e-3
            found.append(ones.call_args.args[0] * 4 / 2**20)
    return found
