# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The simulated device is not the host: it raises errors as CUDA does, and detects missing host waits."""

import re
from collections.abc import Callable
from typing import Any


def test_operands_on_two_devices_are_refused(run_on_device: Any) -> None:
    for refused in run_on_device(mixing_case):
        assert len(refused) == 13
        for name, message in refused.items():
            expected = "on the same device|No backend type|can be pinned" if name.startswith("!") else "^$"
            assert re.search(expected, message), (name, message)


def mixing_case(library: str) -> dict[str, str]:
    """Return the errors of small programs; the names of programs that must raise start with "!"."""
    import torch
    from deepspeed import comm as dist
    from torch.nn.functional import linear

    from tests.harness.device_on_host.accelerator import device_on_host
    from tests.harness.snapshots import error_of

    with device_on_host(library):
        on_device, on_host = torch.ones(3, device="sim"), torch.ones(3)
        programs: dict[str, Callable[[], Any]] = {
            "!sum": lambda: on_device + on_host,
            "!in place": lambda: on_host.add_(on_device),
            "!list": lambda: torch.cat([on_device, on_host]),
            "!matrices": lambda: linear(on_device.view(1, 3), on_host.view(1, 3)),
            "!number of the device": lambda: on_host + on_device.sum(),
            "!number written": lambda: torch.zeros(()).add_(on_device.sum()),
            "!other device": lambda: on_device + on_device.to("sim:1"),
            "!collective": lambda: dist.all_reduce(on_host),
            "!pinned memory of the device": lambda: torch.empty(3, device="sim", pin_memory=True),
            "number of the host": lambda: on_device * on_host.sum(),
            "copy": lambda: on_device.copy_(on_host),
            "data": lambda: setattr(torch.nn.Parameter(on_host), "data", on_device),
            "collective": lambda: dist.all_reduce(on_device),
        }
        return {name: error_of(program) for name, program in programs.items()}


def test_missing_host_wait_is_detected(run_on_device: Any) -> None:
    for reported in run_on_device(waiting_case):
        assert reported == {name: name.startswith("!") for name in reported} and len(reported) == 8


def waiting_case(library: str) -> dict[str, bool]:
    """Return whether small programs are reported; the names of those without an order start with "!"."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from tests.harness.device_on_host.accelerator import device_on_host

    def copied(pinned: bool, non_blocking: bool) -> torch.Tensor:
        return torch.zeros(8, pin_memory=pinned).copy_(torch.ones(8, device="sim"), non_blocking=non_blocking)

    def waited() -> None:
        tensor = copied(True, True)
        get_accelerator().current_stream().synchronize()
        tensor.sum()

    def overwritten(pinned: bool) -> None:
        source = torch.zeros(8, pin_memory=pinned)
        source.to("sim", non_blocking=True)
        source.fill_(1)

    def other_stream() -> None:
        side = get_accelerator().Stream()
        tensor = torch.ones(8, device="sim")
        with get_accelerator().stream(side):
            tensor.cpu()

    programs: dict[str, Callable[[], Any]] = {
        "!read at once": lambda: copied(True, True).sum(),
        "!written at once": lambda: overwritten(True),
        "!of another stream": other_stream,
        "waited for": waited,
        "blocking": lambda: copied(True, False).sum(),
        "pageable": lambda: copied(False, True).sum(),
        "pageable, written": lambda: overwritten(False),
        "freed at once": lambda: [copied(True, True), torch.zeros(8)][1].sum(),
    }
    reported = {}
    for name, program in programs.items():
        with device_on_host(library) as order, order.watch():
            program()
        reported[name] = bool(order.findings)
    return reported
