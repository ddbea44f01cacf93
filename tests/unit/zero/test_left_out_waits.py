# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Waits are left out, one at a time, and fixed races come back: the checker of stream order finds each of them.

See Note [How order is checked].
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import GeneratorType
from typing import Any
from unittest import mock

import pytest

from tests.harness import stream_cases
from tests.harness.left_out_waits import sites

# By call: what finds it, (strategy, options); see ``left_out_waits.Site.name`` and ``stream_cases.OPTIONS``.
FOUND = {
    "comm/transfer_queue.py:StreamEvent.__init__:record": ("IIG", "plain"),
    "comm/transfer_queue.py:StreamEvent.wait:wait_event": ("IIG", "plain"),
    "comm/transfer_queue.py:StreamEvent.wait:record_stream": ("III", "by hand"),
    "comm/transfer_queue.py:Started.advance:wait": ("NGG", "overlap"),
    "comm/transfer_queue.py:Started.finish:complete": ("IIG", "every micro-step"),
    "comm/transfer_queue.py:Started.finish:wait": ("IIG", "plain"),
    "comm/transfer_queue.py:Started.wait:wait": ("NIG", "plain"),
    "comm/transfer_queue.py:_OnSideStream.__init__:wait_stream": ("IIG", "plain"),
    "comm/transfer_queue.py:_OnSideStream.__init__:complete": ("IIG", "plain"),
    "comm/transfer_queue.py:TransferQueue.submit:wait": ("NGG", "overlap"),
    "comm/transfer_queue.py:TransferQueue.submit:drain": ("NIG", "no overlap"),
    "comm/transfer_queue.py:TransferQueue.drain:wait 2": ("NGG", "overlap"),
    "comm/transfer_queue.py:TransferQueue._complete_up_to:complete": ("III", "units"),
    "comm/transfer_queue.py:TransferQueue.finish:finish": ("IIG", "plain"),
    "comm/transfer_queue.py:TransferQueue.wait:wait": ("NIG", "plain"),
    "leaf/units.py:Unit.partition:record_stream": ("GGG", "units"),
    "leaf/units.py:UnitGather.wait:wait": ("GGG", "units"),
    "leaf/windows.py:WindowedModule._in_order:wait": ("GGG", "windows"),
    "zero/sharded/coordinator.py:GroupCoordinator.reset_step:wait_for_current": ("GGG", "units"),
    "zero/sharded/coordinator.py:GroupCoordinator.wait_for_current:wait_stream": ("GGG", "plain"),
    "zero/sharded/expert_windows.py:_Window.wait:finish": ("GGG", "windows"),
    "zero/sharded/expert_windows.py:WindowGathers._fetch:finish": ("GGG", "windows"),
    "zero/sharded/expert_windows.py:WindowGradients._reduce:record_stream": ("GGG", "windows"),
    "zero/sharded/handles.py:GatherHandle.wait:finish": ("GGG", "plain"),
    "zero/flat/gradients.py:FlatGradients.drain:drain": ("NIG", "plain"),
    "zero/flat/gradients.py:FlatGradients.finish:drain": ("NIG", "plain"),
    "zero/flat/gradients.py:FlatGradients.finish:drain 2": ("NNN", "overlap"),
    "zero/muon.py:Muon.apply:drain": ("IIG", "Muon"),
    "zero/optimizer.py:ParoOptimizer._finish_buckets:drain": ("NIG", "plain"),
    "zero/sharded/gathers.py:Gathers._send:wait_for_updates": ("IIG", "plain"),
    "zero/sharded/gathers.py:Gathers._all_gather:wait": ("GGG", "units"),
    "zero/sharded/gradients.py:ShardedGradients.end_backward:drain": ("IGG", "pageable"),
    "zero/outer.py:OuterOptimizer._arrive:finish": ("III", "outer, delayed"),
    "zero/sharded/gradients.py:ShardedGradients.drain:drain": ("GGG", "offload, LoCo"),
    "zero/sharded/gradients.py:ShardedGradients.drain:drain 2": ("IGG", "chunks"),
    "zero/sharded/gradients.py:ShardedGradients.finish:drain": ("IIG", "plain"),
    "zero/sharded/gradients.py:ShardedGradients.finish:drain 2": ("IIG", "plain"),
    "zero/sharded/gradients.py:ShardedGradients.reduce_buckets:record_stream": ("ING", "plain"),
    "zero/sharded/slices.py:Slices._gather_slices:finish": ("IIG", "every micro-step"),
    "zero/sharded/slices.py:Slices._wait_for_windows:finish": ("IIG", "plain"),
    "zero/optimizer.py:ParoOptimizer._end_micro_step:_finish_buckets": ("NGG", "overlap"),
    "zero/stage12.py:Stage12Optimizer._sync_gradients:_finish_buckets": ("NIG", "plain"),
    "zero/stage12.py:Stage12Optimizer._sync_gradients:finish": ("NIG", "offload"),
    "comm/packing.py:record_on_current_stream:record_stream": ("ING", "in few bits"),
    "zero/stage12.py:Stage12Optimizer._sync_gradients:wait": ("NNG", "pipeline, overlap"),
    "zero/streams.py:ReductionStream.after_current:wait_stream": ("NGG", "overlap"),
    "zero/streams.py:ReductionStream.after_current:wait_stream 2": ("NGG", "overlap"),
    "zero/streams.py:ReductionStream.after_current:record_stream": ("NIG", "pipeline, offload"),
    "zero/streams.py:ReductionStream.wait:wait_stream": ("NNG", "pipeline, overlap"),
    "zero/stage3.py:Stage3Optimizer.reduce_leaf:receive_current": ("GGG", "units"),
    "zero/streams.py:ReductionStream.receive_current:wait_stream": ("GGG", "units"),
    "zero/stage3.py:Stage3Optimizer.partition_grads:record_stream": ("GGG", "plain"),
    "zero/stage3.py:Stage3Optimizer._finish_for_host:drain": ("GGG", "offload, LoCo"),
    "zero/stage3.py:Stage3Optimizer._finish_for_host:synchronize": ("INI", "offload"),
    "zero/stage3.py:Stage3Optimizer._sync_gradients:receive_current": ("IIG", "pipeline, fp16"),
    "zero/stage3.py:Stage3Optimizer._sync_gradients:finish": ("IIG", "plain"),
    "zero/stage3.py:Stage3Optimizer._sync_gradients:wait": ("IIG", "plain"),
    "zero/stage3.py:Stage3Optimizer._sync_gradients:synchronize": ("IIG", "pipeline, offload"),
    "zero/streams.py:ReductionStream.synchronize:synchronize": ("INI", "offload"),
    "zero/stage3.py:Stage3Optimizer.checkpoint_event_epilogue:complete": ("IIG", "every micro-step"),
    "zero/flat/arrivals.py:Arrivals.drain:drain": ("NIG", "every micro-step"),
    "zero/flat/arrivals.py:Arrivals.start:drain 2": ("NGG", "overlap"),
    "zero/flat/arrivals.py:Arrivals.wait_for:wait": ("NIG", "plain"),
}
_ARRIVED = "modules have waited for what they use before"
_BY_READING = "tests/unit/zero/test_overlap.py reads what has not arrived, without a device"
_GLOO = "for gloo alone, where it has the host wait"
_ALONE = "tests/unit/comm/test_transfer_queue.py finds it"
_ENDS = f"the host waits at the end of a process; {_ALONE}"
_MEASURES = "measures time; nobody reads what it brings"
_LATER = "hops of gradients between groups, which are waited for, come behind these gathers: on one communicator"
_READ = "where gradients are read between micro-steps DeepSpeed has the host wait"
_HOST = "on a CPU nothing moves to the host"
_BEFORE_OTHERS = "other groups may wait for it before they agree with this one; nobody reads what it brings there"
_THREAD = "for a thread of the host, where the device has no streams"
_ASIDE = 'tests/unit/device/test_training.py finds it ("saves aside")'
_WRITER = "for the thread that writes, and the host"
# By call: why no case can find it.
UNFOUND = {
    "checkpoint/asynchronous.py:AsyncSaves._tell:wait": _WRITER,
    "checkpoint/snapshots.py:Snapshot.give_up:synchronize": _WRITER,
    "checkpoint/asynchronous.py:_written:complete": _WRITER,
    "checkpoint/exporting.py:_write:finish": _WRITER,
    "checkpoint/exporting.py:export_weights:finish": _WRITER,
    "checkpoint/exporting.py:export_weights:wait": _WRITER,
    "checkpoint/exporting.py:finish_last:wait": _WRITER,
    "checkpoint/host_writer.py:HostWriter._send:record": _WRITER,
    "checkpoint/host_writer.py:HostWriter._write:synchronize": _WRITER,
    "checkpoint/files.py:CheckpointFiles.finish:finish": _WRITER,
    "checkpoint/frameworks.py:load_state:finish": _WRITER,
    "checkpoint/frameworks.py:save_state:finish": _WRITER,
    "checkpoint/trainer_callback.py:FinishSaves.on_epoch_end:finish": _WRITER,
    "checkpoint/loading.py:load_checkpoint:finish": _WRITER,
    "checkpoint/saving.py:save_checkpoint:finish": _WRITER,
    "checkpoint/snapshots.py:Snapshot._copy_on_stream:wait_stream": _ASIDE,
    "checkpoint/snapshots.py:Snapshot.complete:synchronize": _WRITER,
    "checkpoint/snapshots.py:Snapshot.seal:record": _ASIDE,
    "checkpoint/snapshots.py:Snapshot.settle:wait": _WRITER,
    "checkpoint/snapshots.py:Snapshot.settle:wait_event": _ASIDE,
    "checkpoint/snapshots.py:Snapshot.take:wait_stream": _ASIDE,
    "comm/host_channel.py:HostChannel._all_reduce:wait": _GLOO,
    "comm/host_channel.py:HostChannel._all_reduce:wait 2": _GLOO,
    "comm/host_channel.py:HostChannel.exchange:wait": _GLOO,
    "comm/host_channel.py:HostChannel.wait_for.ends_within:wait": _WRITER,
    "comm/host_channel.py:HostChannel.wait_for:wait": _WRITER,
    "checkpoint/converting.py:_showing_work.show:wait": "waits for time to pass",
    "zero/sharded/gradients.py:ShardedGradients.end_backward:drain 2": _BEFORE_OTHERS,
    "comm/background.py:Background._next:wait": _THREAD,
    "comm/background.py:Background.wait:wait": _THREAD,
    "comm/background.py:Job.wait_within:wait": _THREAD,
    "comm/pairwise.py:Handles.wait:wait": _GLOO,
    "comm/pairwise.py:PairwiseHandles.wait:wait": _GLOO,
    "comm/pairwise.py:PairwiseHandles.break_off:wait": _GLOO,
    "comm/endings.py:complete:synchronize": _ENDS,
    "comm/transfer_queue.py:StreamEvent.synchronize:synchronize": _ENDS,
    "comm/transfer_queue.py:TransferQueue.synchronize:synchronize": _ENDS,
    "integration/seams/strategies.py:complete_transfers_first.destroy_process_group:complete": _ENDS,
    "comm/transfer_queue.py:_OnSideStream._resume:wait": _ALONE,
    "comm/transfer_queue.py:_OnSideStream._arrive:wait": _ALONE,
    "comm/transfer_queue.py:Started.wait:complete": "a side stream has been given all of it before",
    "comm/transfer_queue.py:_InBackground.advance:wait": _THREAD,
    "comm/transfer_queue.py:_InBackground.complete:wait": _THREAD,
    "comm/transfer_queue.py:_Completed.complete:wait": _THREAD,
    "comm/transfer_queue.py:TransferQueue.drain:wait": _THREAD,
    "comm/transfer_queue.py:TransferQueue.submit:complete": _THREAD,
    "comm/transfer_queue.py:TransferQueue.drop:wait": _ALONE,
    "leaf/gradients.py:LeafGradients.leave_modules:finish": "orders nothing: it is a block's own",
    "loco/feedback.py:ErrorFeedback._settle:synchronize": _HOST,
    "planner/probe.py:_runner:finish": _MEASURES,
    "planner/probe.py:_runner:finish 2": _MEASURES,
    "planner/probe.py:_timed:synchronize": _MEASURES,
    "zero/sharded/coordinator.py:_record_use:record_stream": "a case of tests/unit/scripts/test_fuzz.py",
    "zero/sharded/expert_windows.py:WindowGradients._move:record_stream": "no case gives that out again so soon",
    "zero/sharded/expert_windows.py:WindowGathers._send:wait_for_updates": "what is prefetched waits before",
    "zero/optimizer.py:ParoOptimizer._finish_buckets:wait": f"{_READ}, and the boundary waits again",
    "zero/sharded/gathers.py:Gathers.release:drain": "nothing is read after the end",
    "zero/sharded/gradients.py:ShardedGradients.forget:drain": "for a backward that was given up",
    "zero/sharded/slices.py:Slices.gather_updates:drain": "nothing is under way after a step, which has waited",
    "zero/sharded/slices.py:Slices.drain:finish": _LATER,
    "zero/sharded/slices.py:Slices.settle:drain": "what is read there has arrived long before a load or save",
    "zero/sharded/slices.py:Slices.settle:synchronize": "tests/unit/device/test_training.py finds it",
    "zero/streams.py:ReductionStream.after_current:wait_event": "streams with events are also waited for",
    "zero/stage12.py:Stage12Optimizer.offload_states:_finish_buckets": _HOST,
    "zero/stage3.py:Stage3Optimizer.drain_parameters:drain": f"{_LATER}; who reads waits by itself",
    "zero/stage3.py:Stage3Optimizer._hand_to_optimizer:synchronize": "the next one waits for more",
    "zero/stage3.py:Stage3Optimizer._hand_to_optimizer:synchronize 2": "the host asks for the norm before it steps",
    "zero/stage3.py:Stage3Optimizer.zero_grad:_finish_buckets": "what was reduced is dropped",
    "zero/stage3.py:Stage3Optimizer._refuse_unfinished_gradients:_finish_buckets": _READ,
    "zero/stage3.py:Stage3Optimizer.offload_states:_finish_buckets": _HOST,
    "zero/stage12.py:Stage12Optimizer.offload_states:drain": _BY_READING,
    "zero/flat/updates.py:FlatUpdates.gather:drain": "a step has waited before",
    "zero/stage12.py:Stage12Optimizer.checkpoint_event_prologue:drain": _BY_READING,
    "zero/flat/updates.py:FlatUpdates.settle:drain": _ARRIVED,
    "zero/flat/updates.py:FlatUpdates.drain:drain": _ARRIVED,
    "zero/stage12.py:Stage12Optimizer.update_lp_params:drain": _BY_READING,
    "zero/resync.py:_Vote.__init__:record": "the host reads it, in its own memory",
    "zero/resync.py:_Vote.result:synchronize": "the host reads it, in its own memory",
    "zero/stage3.py:Stage3Optimizer._keep_whole:receive_current": ("for a model that computes on several streams"),
    "zero/flat/arrivals.py:Arrivals.drop:drain": _BY_READING,
    "zero/flat/arrivals.py:Arrivals.start:drain": _ARRIVED,
    "zero/flat/arrivals.py:Arrivals.wait_for:drain": _BY_READING,
    "zero/flat/arrivals.py:Arrivals.wait:drain": _BY_READING,
    "zero/arrivals.py:wait_for_updates:wait": _BY_READING,
    "zero/arrivals.py:wait_for_whole_parameters:wait": _BY_READING,
    **dict.fromkeys(
        (
            "clocks.py:DeviceClock.mark:record",
            "clocks.py:DeviceClock.settle:synchronize",
            *(f"doctor/pinned.py:_best:synchronize{number}" for number in ("", " 2")),
            "doctor/wire.py:_round_trip:synchronize",
            *(f"doctor/wire.py:_send_and_receive:{name}" for name in ("synchronize", "wait")),
        ),
        "it times something",
    ),
    **dict.fromkeys(
        (
            *(f"compare/launching.py:{name}" for name in ("run:wait", "stop:wait")),
            *(f"doctor/meeting.py:{name}:wait" for name in ("Meeting.hear", "_there", "meet")),
        ),
        "for processes, or for the store",
    ),
    "report/recorder.py:WatchedHandle.wait:wait": "the wait of whoever has the handle; tests/unit/report finds it",
}


@pytest.mark.quick
def test_each_wait_is_in_one_list() -> None:
    assert not FOUND.keys() & UNFOUND.keys()
    assert {*FOUND, *UNFOUND} == set(sites())
    assert len(FOUND) >= 15


CASES = sorted(set(FOUND.values()))
EACH_CASE = pytest.mark.parametrize("name, options", CASES)


@pytest.mark.parametrize("name, options", CASES[::3])
def test_a_wait_that_is_left_out_is_found(ranks: Any, tmp_path: Path, name: str, options: str) -> None:
    """The first of those that a case finds, in a third of the cases."""
    leave_out(ranks, tmp_path, name, options, number=1)


@pytest.mark.deep
@EACH_CASE
def test_each_wait_that_is_left_out_is_found(ranks: Any, tmp_path: Path, name: str, options: str) -> None:
    leave_out(ranks, tmp_path, name, options, number=len(FOUND))


def leave_out(ranks: Any, folder: Path, name: str, options: str, number: int) -> None:
    """Leave out so many of the waits that a case must find."""
    places = [place for place, case in FOUND.items() if case == (name, options)][:number]
    by_rank = ranks(4).run(stream_cases.leave_out, places, name, options, str(folder))
    for place in places:
        findings = [finding for found in by_rank for finding in found[place]]
        assert findings, place
        print(f"{place}:\n    {findings[0]}")


# Races that were fixed: (strategy, options), what came first and what came too early.
RACES = {
    "gathers do not follow what writes parameters": (
        *("III", "plain"),
        "copy_ wrote on compute at runtime/zero/stage3.py",
        "comm/packing.py",
    ),
    "a gather is finished on whatever stream is current": (
        *("III", "by hand"),
        r"all_?gather_(single|base_?) wrote on wire",  # as releases of torch name it
        "harness/stream_cases.py",
    ),
    "zeros are written behind the wait of reductions": (
        *("GGG", "defaults"),
        "wrote on compute at leaf/gradients.py",
        "comm/parameter_bucket.py",
    ),
}


@pytest.mark.parametrize("race", RACES)
def test_a_race_that_was_mended_is_found(ranks: Any, race: str) -> None:
    name, options, first, early = RACES[race]
    for found in ranks(4).run(race_case, race, name, options):
        pairs = [finding.split("without an order behind:") for finding in found]
        assert any(re.search(first, before) and early in after for after, before in pairs), found


def race_case(race: str, name: str, options: str) -> list[str]:
    """What has no order where the mending of a race is taken back."""
    with taken_back(race):
        return stream_cases.watch_case(name, options).findings


@contextmanager
def taken_back(race: str) -> Iterator[None]:
    """Bring a race back, in this context."""
    from deepspeed_ext.comm.transfer_queue import Started
    from deepspeed_ext.zero.sharded.coordinator import GroupCoordinator

    def finish(started: Any) -> Any:
        while not started.is_complete:
            started._handle.wait()
            started._resume()
        return started._result

    def lazily(values: Any = ()) -> Any:
        return values if isinstance(values, GeneratorType) else list(values)

    with ExitStack() as patches:
        if race.startswith("gathers"):
            patches.enter_context(mock.patch.object(GroupCoordinator, "wait_for_current", lambda coordinator: None))
        elif race.startswith("a gather"):
            patches.enter_context(mock.patch.object(Started, "finish", finish))
            patches.enter_context(mock.patch.object(Started, "complete", finish))
        else:
            patches.enter_context(mock.patch("deepspeed_ext.zero.stage3.list", lazily, create=True))
        yield
