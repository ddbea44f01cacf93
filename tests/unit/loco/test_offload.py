# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Error feedback in host memory, gradients on a device: the meta device, so that copies are recorded, but not made."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.comm.spans import ShardSpan
from deepspeed_ext.loco import feedback, setup
from deepspeed_ext.loco.settings import LocoSettings

pytestmark = pytest.mark.quick


class Copies(TorchDispatchMode):
    """Copies between devices: from where, to where, whether the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            self.found.append((args[1].device.type, args[0].device.type, not (args[2:] or [False])[0]))
            return args[0]
        if func is torch.ops.aten._to_copy.default:
            self.found.append((args[0].device.type, kwargs["device"].type, not kwargs.get("non_blocking", False)))
        return func(*args, **kwargs)


@pytest.mark.parametrize("pins", [False, True], ids=["pageable", "pinned"])
def test_offloaded_errors_are_pinned_and_nothing_is_copied_in_vain(pins: bool) -> None:
    width, pinned, empty = 300, [], torch.empty

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        pinned.extend([str(kwargs["device"])] if pin_memory else [])
        return empty(*args, **kwargs)

    device = mock.Mock()
    memory = feedback.ErrorFeedback(LocoSettings(), device="cpu", pinned=pins)
    contents = ((ShardSpan(0, 0, 0, width),),)
    with (
        mock.patch.object(feedback.torch, "empty", made),
        mock.patch.object(feedback, "get_accelerator", lambda: device),
    ):
        for step in range(2):
            for micro_batch in range(2):
                with Copies() as copies:
                    old, new = memory.buffers(contents, [width], "meta")
                    memory.keep(contents, new)
                down, up = ("meta", "cpu", False), ("cpu", "meta", False)
                assert copies.found == ([down] if (step, micro_batch) == (0, 0) else [up, down])
                assert (old is None) == ((step, micro_batch) == (0, 0)) and new.device.type == "meta"
            memory.finish_step(True)
        assert pinned == ["cpu"] * 2 * pins and not device.synchronize.called
        memory.states()  # reads what may still be on its way
        memory.states()
        assert device.synchronize.call_count == 1


def test_errors_on_the_device_of_gradients_are_not_copied() -> None:
    memory, contents = feedback.ErrorFeedback(LocoSettings()), ((ShardSpan(0, 0, 0, 300),),)
    for step in range(2):
        with Copies() as copies:
            first, _ = memory.buffers(contents, [300], "cpu")
            old, new = memory.buffers(contents, [300], "cpu")
            memory.keep(contents, new)
        assert (first is None) == (step == 0) and old is new and not copies.found
        memory.finish_step(True)


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        (None, (None, False)),
        ({"device": "none", "pin_memory": True}, (None, False)),
        ({"device": "cpu", "pin_memory": True}, ("cpu", True)),
        ({"device": "cpu", "pin_memory": False}, ("cpu", False)),
    ],
)
def test_errors_are_where_the_optimizer_is(offload: dict[str, Any] | None, expected: tuple[str | None, bool]) -> None:
    section = None if offload is None else SimpleNamespace(**offload)
    engine = SimpleNamespace(_config=SimpleNamespace(zero_config=SimpleNamespace(offload_optimizer=section)))
    assert setup._where_errors_are(engine) == expected
