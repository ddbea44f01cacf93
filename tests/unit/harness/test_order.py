# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The checker of stream order finds accesses without an order, and only these. See Note [How order is checked]."""

from typing import Any

import pytest

pytestmark = pytest.mark.quick


def test_accesses_without_an_order_are_found(ranks: Any) -> None:
    for found in ranks(2).run(checker_case):
        assert found == {name: name.startswith("!") for name in found} and len(found) == 19


def checker_case() -> dict[str, bool]:
    """Whether anything is found in small programs; those that lack an order have names that begin with "!"."""
    import torch
    from deepspeed import comm as dist
    from deepspeed.accelerator import get_accelerator

    from tests.harness.stream_order import device_with_streams

    def written(side: Any) -> torch.Tensor:
        tensor = torch.zeros(8)
        side.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(side):
            tensor[:4].fill_(1)
        return tensor

    def ordered(side: Any, how: Any) -> None:
        tensor = written(side)
        how()
        tensor.sum()

    def by_event(side: Any) -> None:
        tensor, event = written(side), get_accelerator().Event()
        event.record(side)
        side.wait_stream(get_accelerator().current_stream())
        get_accelerator().current_stream().wait_event(event)
        tensor.sum()

    def by_answer(side: Any) -> None:
        tensor = written(side)
        with get_accelerator().stream(side):
            tensor[0].item()
        tensor.sum()

    def overwritten(side: Any) -> None:
        tensor = torch.zeros(8)
        side.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(side):
            tensor.view(2, 4).sum()
        tensor.t().fill_(1)

    def reduced(side: Any, waits: int, reads: bool = True) -> None:
        tensor = torch.zeros(8)
        handle = dist.all_reduce(tensor, async_op=True)
        if waits == 2:
            with get_accelerator().stream(side):
                handle.wait()
        if waits == 1:
            handle.wait()
        tensor.sum() if reads else tensor[0].fill_(1)
        handle.wait()

    def freed(side: Any, then: Any = lambda tensor: None, afterwards: Any = lambda: None) -> None:
        tensor = torch.zeros(8)
        side.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(side):
            tensor.sum()
        then(tensor)
        del tensor
        afterwards()
        torch.zeros(8)

    def by_host(side: Any, wait: Any = lambda side: None) -> None:
        tensor = written(side)
        wait(side)
        with order.by_host():
            tensor.add_(1)
        with get_accelerator().stream(get_accelerator().Stream()):
            tensor.sum()  # everything that the host starts is ordered after what it has done

    def here() -> Any:
        return get_accelerator().current_stream()

    programs: dict[str, Any] = {
        "!read": lambda side: ordered(side, lambda: None),
        "read behind a stream": lambda side: ordered(side, lambda: here().wait_stream(side)),
        "read behind the device": lambda side: ordered(side, get_accelerator().synchronize),
        "read behind the host": lambda side: ordered(side, side.synchronize),
        "read behind an event": by_event,
        "read behind an answer": by_answer,
        "read beside": lambda side: written(side)[4:].sum(),
        "!read across": lambda side: written(side)[3:].sum(),
        "!overwritten": overwritten,
        "!reduced": lambda side: reduced(side, 0),
        "!reduced, and overwritten": lambda side: reduced(side, 0, False),
        "!reduced for another stream": lambda side: reduced(side, 2),
        "reduced for this stream": lambda side: reduced(side, 1),
        "!freed": freed,
        "freed and recorded": lambda side: freed(side, lambda tensor: tensor.record_stream(side)),
        "!read by the host": by_host,
        "!read by the host behind another stream": lambda side: by_host(side, lambda side: here().synchronize()),
        "read by the host behind its wait": lambda side: by_host(side, lambda side: side.synchronize()),
        "freed, and late": lambda side: freed(side, afterwards=lambda: here().wait_stream(side)),
    }
    found = {}
    with device_with_streams() as order:
        for name, program in programs.items():
            order.findings.clear()
            with order.watch():
                program(get_accelerator().Stream())
            found[name] = bool(order.findings)
    return found


def test_questions_to_the_device_are_counted(ranks: Any) -> None:
    assert ranks(1).run(questions_case) == [{"tolist": 1, "cpu": 1, "numpy": 1, "_local_scalar_dense": 2}]


def questions_case() -> dict[str, int]:
    """Count six operations; one of them does not need an answer."""
    from collections import Counter

    import torch

    from tests.harness.host_synchronizations import asking
    from tests.harness.stream_order import device_with_streams

    with device_with_streams() as order:
        values = torch.ones(3)
        with order.watch(), asking(order):
            values.tolist()
            values.cpu()
            values.numpy()
            values.sum().item()
            bool(values.sum() > 1)
            values.sum()
    counted: Counter[str] = Counter()
    for one, count in order.synchronizations.items():
        counted[one.what] += count
    return dict(counted)
