# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Error feedback: cost of finding errors, changes of buckets, and host memory. Copies between devices are recorded on
the meta device, which does not execute them."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.comm.spans import Contents, ShardSpan
from deepspeed_ext.config.settings import LocoSettings, UpdateSettings
from deepspeed_ext.loco import feedback as errors_of_messages
from deepspeed_ext.loco import setup
from deepspeed_ext.loco.feedback import ErrorFeedback, SpanMap
from tests.harness.tiers import with_cases

pytestmark = pytest.mark.quick

NUMEL = 8  # elements of a run: few, so that time is that of bookkeeping


def messages_of(groups: int, messages: int, shift: int = 0) -> list[Contents]:
    """Return buckets as with g = G: each has a span of every group's row."""
    starts = range(shift, shift + messages * NUMEL, NUMEL)
    return [tuple((ShardSpan(0, row, start, NUMEL),) for row in range(groups)) for start in starts]


def take(feedback: ErrorFeedback, messages: list[Contents]) -> None:
    for contents in messages:
        old, new = feedback.buffers(contents, [NUMEL] * len(contents), "cpu")
        new.zero_() if old is None else new.copy_(old)
        feedback.store(contents, new)
    feedback.finish_step(True)


def calls(groups: int, messages: int, changes: bool) -> float:
    """Return the number of Python calls for each span."""
    counted = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event == "call"

    feedback = ErrorFeedback(LocoSettings(block_size=32))
    if changes:
        take(feedback, messages_of(groups, messages))
    step = messages_of(groups, messages, NUMEL // 2 if changes else 0)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        take(feedback, step)
    finally:
        sys.setprofile(before)
    return counted / groups / messages


@pytest.mark.parametrize("changes", [False, True], ids=["first", "changed"])
def test_bookkeeping_calls_are_proportional_to_spans(changes: bool) -> None:
    few = calls(4, 16, changes)
    assert calls(32, 16, changes) < 2 * few  # groups
    assert calls(4, 128, changes) < 2 * few  # messages: bisection adds their logarithm


def test_span_map_finds_overlaps() -> None:
    spans: SpanMap[str] = SpanMap()
    for start, numel, name in ((20, 10, "c"), (0, 10, "a"), (10, 5, "b"), (30, 0, "nothing")):
        spans.add(ShardSpan(0, 1, start, numel), name)

    def names(start: int, numel: int, row: int = 1) -> str:
        return "".join(name for _, name in spans.overlapping(ShardSpan(0, row, start, numel)))

    assert names(0, 100) == "abc" and names(0, 100, row=0) == ""
    assert names(9, 1) == "a" and names(10, 1) == "b" and names(14, 6) == "b" and names(15, 5) == ""
    assert names(14, 7) == "bc" and names(29, 5) == "c" and names(30, 5) == "" and names(12, 0) == ""
    assert [name for _, name in spans.pop_overlapping(ShardSpan(0, 1, 5, 6))] == ["a", "b"]
    assert names(0, 100) == "c"


def test_errors_follow_elements_into_other_buckets() -> None:
    generator = torch.Generator().manual_seed(0)
    numel = 64
    values = {row: torch.randint(-7, 8, (numel,), generator=generator).float() for row in (0, 1)}
    # Of what was not sent, an error is the half. bf16 holds these to the bit.
    feedback = ErrorFeedback(LocoSettings(err_beta=0.5, block_size=32, error_bits=16))
    feedback.load_errors({ShardSpan(0, row, 0, numel): of for row, of in values.items()}, steps=1)
    # Two runs of one row in one part, a part across rows, gaps, and messages that overlap with several others.
    steps = [
        [(((0, 3, 10), (0, 20, 7)), ((1, 0, 5),)), (((1, 5, 40),), ((0, 40, 24),))],
        [(((0, 0, 64),), ((1, 44, 20),))],
        [(((1, 0, 30), (1, 30, 34)),), (((0, 10, 20),), ((0, 30, 2), (0, 5, 5)))],
    ]
    for step in steps:
        for parts in step:
            contents = tuple(tuple(ShardSpan(0, *run) for run in part) for part in parts)
            splits = [sum(run.numel for run in part) for part in contents]
            old, new = feedback.buffers(contents, splits, "cpu")
            assert old is not None
            new.copy_(old)
            expected = [torch.cat([values[r.row][r.start : r.start + r.numel] for r in part]) for part in contents]
            assert torch.equal(feedback._decode(old, splits), torch.cat(expected) / 2)
        feedback.finish_step(True)
    loaded = {row: torch.zeros(numel) for row in values}
    for run, numbers in feedback.errors_in(feedback.states()):
        loaded[run.row][run.start : run.start + run.numel] += numbers
    assert all(torch.equal(loaded[row], values[row]) for row in values)


def test_errors_are_loaded_with_other_settings() -> None:
    """Errors of sums in older checkpoints have blocks of 128, and are not averaged."""
    unsent = torch.randn(200, generator=torch.Generator().manual_seed(0))
    old, feedback = ErrorFeedback(LocoSettings(err_beta=0.0)), ErrorFeedback(UpdateSettings().sums)
    run = ShardSpan(0, 0, 0, 200)
    old.load_errors({run: unsent}, steps=7)
    old.buffers(((run,),), [200], "cpu")
    old.finish_step(False)
    feedback.load_states(old.states())
    ((_, error),) = feedback.errors_in(feedback.states())
    assert feedback.steps == 7 and (error - unsent).abs().max() < 0.02 * unsent.abs().max()


def test_unassigned_errors_count_as_memory() -> None:
    feedback = ErrorFeedback(LocoSettings())
    feedback.load_errors({ShardSpan(0, 0, 0, 100): torch.ones(100), ShardSpan(0, 1, 0, 50): torch.ones(50)}, steps=3)
    assert feedback.nbytes() == 150 * torch.float32.itemsize


def test_sums_in_4_bits_have_smaller_blocks_by_default() -> None:
    assert UpdateSettings().sums == LocoSettings(block_size=32)
    assert UpdateSettings(bits=8, resync_T=9).sums == LocoSettings(bits=8, block_size=128, reset_T=9)
    assert UpdateSettings(block_size=64).sums == LocoSettings(block_size=64)
    assert [UpdateSettings(block_size=block_size).difference_block for block_size in (None, 32)] == [128, 32]


class Copies(TorchDispatchMode):
    """Records copies between devices: source, target, and whether the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            self.records.append((args[1].device.type, args[0].device.type, not (args[2:] or [False])[0]))
            return args[0]
        if func is torch.ops.aten._to_copy.default:
            self.records.append((args[0].device.type, kwargs["device"].type, not kwargs.get("non_blocking", False)))
        return func(*args, **kwargs)


@pytest.mark.parametrize("pins", [False, True], ids=["pageable", "pinned"])
def test_offloaded_errors_are_pinned_and_copied_once(pins: bool) -> None:
    width, pinned, empty = 300, [], torch.empty

    def pinned_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        pinned.extend([str(kwargs["device"])] if pin_memory else [])
        return empty(*args, **kwargs)

    device = mock.Mock()
    memory = ErrorFeedback(LocoSettings(), device="cpu", pinned=pins)
    contents = ((ShardSpan(0, 0, 0, width),),)
    with (
        mock.patch.object(errors_of_messages.torch, "empty", pinned_empty),
        mock.patch.object(errors_of_messages, "get_accelerator", lambda: device),
    ):
        for step in range(2):
            for micro_batch in range(2):
                with Copies() as copies:
                    old, new = memory.buffers(contents, [width], "meta")
                    memory.store(contents, new)
                down, up = ("meta", "cpu", False), ("cpu", "meta", False)
                assert copies.records == ([down] if (step, micro_batch) == (0, 0) else [up, down])
                assert (old is None) == ((step, micro_batch) == (0, 0)) and new.device.type == "meta"
            memory.finish_step(True)
        assert pinned == ["cpu"] * 2 * pins and not device.synchronize.called
        memory.states()  # reads what may still be on its way
        memory.states()
        assert device.synchronize.call_count == 1


def test_errors_on_gradient_device_are_not_copied() -> None:
    memory, contents = ErrorFeedback(LocoSettings()), ((ShardSpan(0, 0, 0, 300),),)
    for step in range(2):
        with Copies() as copies:
            first, _ = memory.buffers(contents, [300], "cpu")
            old, new = memory.buffers(contents, [300], "cpu")
            memory.store(contents, new)
        assert (first is None) == (step == 0) and old is new and not copies.records
        memory.finish_step(True)


@with_cases(
    ("offload", "expected"),
    (None, (None, False)),
    ({"device": "none", "pin_memory": True}, (None, False)),
    ({"device": "cpu", "pin_memory": True}, ("cpu", True)),
    ({"device": "cpu", "pin_memory": False}, ("cpu", False)),
)
def test_errors_are_on_the_device_of_the_optimizer(offload: dict[str, Any] | None, expected: tuple[Any, bool]) -> None:
    section = None if offload is None else SimpleNamespace(**offload)
    engine = SimpleNamespace(_config=SimpleNamespace(zero_config=SimpleNamespace(offload_optimizer=section)))
    assert setup._error_device(engine) == expected
