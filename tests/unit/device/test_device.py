# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The simulated device is not the host: it raises errors as CUDA does, and detects missing host waits."""

import re
from collections.abc import Callable
from typing import Any


def test_operands_on_two_devices_are_refused(run_on_device: Any) -> None:
    for refused in run_on_device(mixing_case):
        assert len(refused) == 13
        for name, said in refused.items():
            expected = "on the same device|No backend type|can be pinned" if name.startswith("!") else "^$"
            assert re.search(expected, said), (name, said)


def mixing_case(library: str) -> dict[str, str]:
    """Return the errors of small programs; the names of programs that must raise start with "!"."""
    import torch
    from deepspeed import comm as dist
    from torch.nn.functional import linear

    from tests.harness.device_on_host.accelerator import device_on_host
    from tests.harness.snapshots import error_of

    with device_on_host(library):
        here, there = torch.ones(3, device="sim"), torch.ones(3)
        programs: dict[str, Callable[[], Any]] = {
            "!sum": lambda: here + there,
            "!in place": lambda: there.add_(here),
            "!list": lambda: torch.cat([here, there]),
            "!matrices": lambda: linear(here.view(1, 3), there.view(1, 3)),
            "!number of the device": lambda: there + here.sum(),
            "!number written": lambda: torch.zeros(()).add_(here.sum()),
            "!other device": lambda: here + here.to("sim:1"),
            "!collective": lambda: dist.all_reduce(there),
            "!pinned memory of the device": lambda: torch.empty(3, device="sim", pin_memory=True),
            "number of the host": lambda: here * there.sum(),
            "copy": lambda: here.copy_(there),
            "data": lambda: setattr(torch.nn.Parameter(there), "data", here),
            "collective": lambda: dist.all_reduce(here),
        }
        return {name: error_of(program) for name, program in programs.items()}


def test_missing_host_wait_is_detected(run_on_device: Any) -> None:
    for found in run_on_device(waiting_case):
        assert found == {name: name.startswith("!") for name in found} and len(found) == 8


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
    found = {}
    for name, program in programs.items():
        with device_on_host(library) as order, order.watch():
            program()
        found[name] = bool(order.findings)
    return found
