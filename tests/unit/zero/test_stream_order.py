# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""On devices with streams nothing is used before it is complete; a wait that is left out is found.

See Note [How order is checked].
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import stream_cases
from tests.harness.left_out_waits import sites
from tests.harness.stream_order import device_with_streams
from tests.harness.tiers import deep

# By call (see ``left_out_waits.sites``): the strategy and the set of ``stream_cases.OPTIONS`` that find it, and the
# index of the first training in ``TRAININGS`` that does, if it is not 0.
FOUND: dict[str, tuple[Any, ...]] = {
    "comm/transfer_queue.py:StreamEvent.__init__:record": ("IIG", "plain"),
    "comm/transfer_queue.py:StreamEvent.wait:wait_event": ("IIG", "plain"),
    "comm/transfer_queue.py:StreamEvent.wait:record_stream": ("III", "by hand"),
    "comm/transfer_queue.py:Started.advance:wait": ("NGG", "overlap"),
    "comm/transfer_queue.py:Started.finish:complete": ("IIG", "every micro-step"),
    "comm/transfer_queue.py:Started.finish:wait": ("IIG", "plain"),
    "comm/transfer_queue.py:Started.wait:wait": ("NIG", "plain", 2),
    "comm/transfer_queue.py:_OnSideStream.__init__:wait_stream": ("IIG", "plain"),
    "comm/transfer_queue.py:_OnSideStream.__init__:complete": ("IIG", "plain"),
    "comm/transfer_queue.py:TransferQueue.submit:wait": ("NGG", "overlap"),
    "comm/transfer_queue.py:TransferQueue.submit:drain": ("NIG", "no overlap"),
    "comm/transfer_queue.py:TransferQueue.drain:wait 2": ("NGG", "overlap"),
    "comm/transfer_queue.py:TransferQueue._complete_up_to:complete": ("III", "units", 1),
    "comm/transfer_queue.py:TransferQueue.finish:finish": ("IIG", "plain"),
    "comm/transfer_queue.py:TransferQueue.wait:wait": ("NIG", "plain", 2),
    "leaf/units.py:Unit.partition:record_stream": ("GGG", "units"),
    "leaf/units.py:UnitGather.wait:wait": ("GGG", "units"),
    "leaf/windows.py:WindowedModule._in_order:wait": ("GGG", "windows"),
    "zero/sharded/coordinator.py:GroupCoordinator.reset_step:wait_for_current": ("GGG", "units", 2),
    "zero/sharded/coordinator.py:GroupCoordinator.wait_for_current:wait_stream": ("GGG", "plain", 2),
    "zero/sharded/expert_windows.py:_Window.wait:finish": ("GGG", "windows"),
    "zero/sharded/expert_windows.py:WindowGathers.fetch:finish": ("GGG", "windows", 3),
    "zero/sharded/expert_windows.py:WindowGradients._reduce:record_stream": ("GGG", "windows"),
    "zero/sharded/gathers.py:GatherHandle.wait:finish": ("GGG", "plain"),
    "zero/flat/gradients.py:FlatGradients.drain:drain": ("NIG", "plain", 1),
    "zero/flat/gradients.py:FlatGradients.finish:drain": ("NIG", "plain"),
    "zero/flat/gradients.py:FlatGradients.finish:drain 2": ("NNN", "overlap", 1),
    "zero/muon.py:Muon.apply:drain": ("IIG", "Muon"),
    "zero/micro_steps.py:MicroSteps.finish_buckets:drain": ("NIG", "plain", 1),
    "zero/sharded/gathers.py:Gathers._send:wait_for_updates": ("IIG", "plain", 2),
    "zero/sharded/gathers.py:Gathers._all_gather:wait": ("GGG", "units"),
    "zero/sharded/gradients.py:ShardedGradients.end_backward:drain": ("IGG", "pageable", 3),
    "zero/outer.py:OuterOptimizer._arrive:finish": ("III", "outer, delayed", 2),
    "zero/sharded/gradients.py:ShardedGradients.drain:drain": ("GGG", "offload, LoCo"),
    "zero/sharded/gradients.py:ShardedGradients.drain:drain 2": ("IGG", "chunks", 2),
    "zero/sharded/gradients.py:ShardedGradients.finish:drain": ("IIG", "plain", 1),
    "zero/sharded/gradients.py:ShardedGradients.finish:drain 2": ("IIG", "plain"),
    "zero/sharded/gradients.py:ShardedGradients.reduce_buckets:record_stream": ("ING", "plain", 2),
    "zero/sharded/slices.py:Slices._gather_slices:finish": ("IIG", "every micro-step"),
    "zero/sharded/slices.py:Slices._wait_for_windows:finish": ("IIG", "plain", 2),
    "zero/micro_steps.py:MicroSteps.end:finish_buckets": ("NGG", "overlap"),
    "zero/stage12.py:Stage12Optimizer.sync_gradients:finish_buckets": ("NIG", "plain", 1),
    "zero/flat/gradients.py:AllFlatGradients.complete_shards:finish": ("NIG", "offload"),
    "zero/sharded/slices.py:Slices.order_gathers:wait_for_current": ("IIG", "every micro-step"),
    "comm/packing.py:record_on_current_stream:record_stream": ("ING", "in few bits", 2),
    "zero/flat/gradients.py:AllFlatGradients.complete_shards:wait": ("NNG", "pipeline, overlap"),
    "zero/streams.py:ReductionStream.after_current:wait_stream": ("NGG", "overlap"),
    "zero/streams.py:ReductionStream.after_current:wait_stream 2": ("NGG", "overlap"),
    "zero/streams.py:ReductionStream.after_current:record_stream": ("NIG", "pipeline, offload"),
    "zero/streams.py:ReductionStream.wait:wait_stream": ("NNG", "pipeline, overlap"),
    "zero/sharded/reduction.py:GradientReduction.reduce_leaf:receive_current": ("GGG", "units"),
    "zero/streams.py:ReductionStream.receive_current:wait_stream": ("GGG", "units"),
    "zero/sharded/reduction.py:GradientReduction.release:record_stream": ("GGG", "plain"),
    "zero/sharded/reduction.py:GradientReduction.finish_for_host:drain": ("GGG", "offload, LoCo"),
    "zero/sharded/reduction.py:GradientReduction.finish_for_host:synchronize": ("INI", "offload"),
    "zero/sharded/reduction.py:GradientReduction.hand_over:receive_current": ("IIG", "pipeline, fp16"),
    "zero/sharded/reduction.py:GradientReduction.complete_shards:finish": ("IIG", "plain"),
    "zero/sharded/reduction.py:GradientReduction.complete_shards:wait": ("IIG", "plain"),
    "zero/sharded/reduction.py:GradientReduction.complete_shards:synchronize": ("IIG", "pipeline, offload"),
    "zero/streams.py:ReductionStream.synchronize:synchronize": ("INI", "offload"),
    "zero/sharded/parameters.py:ShardedParameters.complete_slices:complete": ("IIG", "every micro-step"),
    "zero/flat/arrivals.py:Arrivals.drain:drain": ("NIG", "every micro-step"),
    "zero/flat/arrivals.py:Arrivals.start:drain 2": ("NGG", "overlap", 2),
    "zero/flat/arrivals.py:Arrivals.wait_for:wait": ("NIG", "plain", 2),
}
_ARRIVED = "modules have waited for what they use before"
_BY_READING = "tests/unit/zero/test_updates.py reads what has not arrived, without a device"
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
# By file or folder: why waits there are of no device.
OF_HOST = {
    "checkpoint/": _WRITER,
    "tools/clocks.py": _MEASURES,
    "comm/background.py:Background": _THREAD,
    "comm/background.py:Job": _THREAD,
    "comm/host_channel.py": _GLOO,
    "comm/collectives.py:Handles": _GLOO,
    "comm/collectives.py:PairwiseHandles": _GLOO,
    "tools/compare/": "for processes",
    "tools/doctor/": _MEASURES,
    "planner/probe.py": _MEASURES,
    "tools/report/flat_collectives.py": _MEASURES,
    "tools/report/recorder.py": "the wait of whoever has the handle; tests/unit/report finds it",
}
# By call: why no case can find it.
UNFOUND = {
    "checkpoint/snapshots.py:Pace.pause:wait": _WRITER,
    "checkpoint/snapshots.py:Snapshot.give_up:synchronize": _WRITER,
    "checkpoint/snapshots.py:Snapshot._copy_on_stream:wait_stream": _ASIDE,
    "checkpoint/snapshots.py:Snapshot.complete:synchronize": _WRITER,
    "checkpoint/snapshots.py:Snapshot.seal:record": _ASIDE,
    "checkpoint/snapshots.py:Snapshot.settle:wait": _WRITER,
    "checkpoint/snapshots.py:Snapshot.settle:wait_event": _ASIDE,
    "checkpoint/snapshots.py:Snapshot.take:wait_stream": _ASIDE,
    "zero/sharded/gradients.py:ShardedGradients.end_backward:drain 2": _BEFORE_OTHERS,
    "comm/background.py:complete:synchronize": _ENDS,
    "comm/transfer_queue.py:StreamEvent.synchronize:synchronize": _ENDS,
    "comm/transfer_queue.py:TransferQueue.synchronize:synchronize": _ENDS,
    "integration/seams.py:complete_transfers_first:complete": _ENDS,
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
    "zero/sharded/coordinator.py:_record_use:record_stream": "a case of tests/unit/campaigns/test_fuzz.py",
    "zero/sharded/expert_windows.py:WindowGradients._move:record_stream": "no case gives that out again so soon",
    "zero/sharded/expert_windows.py:WindowGathers._send:wait_for_updates": "what is prefetched waits before",
    "zero/micro_steps.py:MicroSteps.finish_buckets:wait": f"{_READ}, and the boundary waits again",
    "zero/sharded/gathers.py:Gathers.release:drain": "nothing is read after the end",
    "zero/sharded/gradients.py:ShardedGradients.forget:drain": "for a backward that was given up",
    "zero/sharded/slices.py:Slices.gather_updates:drain": "nothing is under way after a step, which has waited",
    "zero/sharded/slices.py:Slices.drain:finish": _LATER,
    "zero/sharded/slices.py:Slices.settle:drain": "what is read there has arrived long before a load or save",
    "zero/sharded/slices.py:Slices.settle:synchronize": "tests/unit/device/test_training.py finds it",
    "zero/streams.py:ReductionStream.after_current:wait_event": "streams with events are also waited for",
    "zero/stage12.py:Stage12Optimizer.offload_states:finish_buckets": _HOST,
    "zero/sharded/parameters.py:ShardedParameters.receive_updates:drain": f"{_LATER}; who reads waits by itself",
    "zero/sharded/reduction.py:GradientReduction.hand_over:synchronize": "the next one waits for more",
    "zero/sharded/reduction.py:GradientReduction.hand_over:synchronize 2": "the host asks for the norm first",
    "zero/stage3.py:Stage3Optimizer.zero_grad:finish_buckets": "what was reduced is dropped",
    "zero/sharded/reduction.py:GradientReduction.require_complete:finish_buckets": _READ,
    "zero/stage3.py:Stage3Optimizer.offload_states:finish_buckets": _HOST,
    "zero/stage12.py:Stage12Optimizer.offload_states:drain": _BY_READING,
    "zero/flat/updates.py:FlatUpdates.gather:drain": "a step has waited before",
    "zero/stage12.py:Stage12Optimizer.checkpoint_event_prologue:drain": _BY_READING,
    "zero/flat/updates.py:FlatUpdates.settle:drain": _ARRIVED,
    "zero/flat/updates.py:FlatUpdates.drain:drain": _ARRIVED,
    "zero/stage12.py:Stage12Optimizer.update_lp_params:drain": _BY_READING,
    "zero/resync.py:_Vote.__init__:record": "the host reads it, in its own memory",
    "zero/resync.py:_Vote.result:synchronize": "the host reads it, in its own memory",
    "zero/sharded/reduction.py:GradientReduction.keep_whole:receive_current": "for a model on several streams",
    "zero/flat/arrivals.py:Arrivals.drop:drain": _BY_READING,
    "zero/flat/arrivals.py:Arrivals.start:drain": _ARRIVED,
    "zero/flat/arrivals.py:Arrivals.wait_for:drain": _BY_READING,
    "zero/flat/arrivals.py:Arrivals.wait:drain": _BY_READING,
    "zero/updates_in_flight.py:wait_for_updates:wait": _BY_READING,
    "zero/updates_in_flight.py:wait_for_whole_parameters:wait": _BY_READING,
}


@pytest.mark.quick
def test_each_wait_is_in_one_list() -> None:
    assert not FOUND.keys() & UNFOUND.keys()
    of_host = {name for name in sites() if name.startswith(tuple(OF_HOST))}
    of_host -= {name for name in of_host if name.startswith("checkpoint/snapshots.py")}  # these copy on a stream
    assert {*FOUND, *UNFOUND} == set(sites()) - of_host
    assert len(FOUND) >= 15


PIPELINES = tuple(name for name, one in stream_cases.OPTIONS.items() if one.pipe is not None)
# Ranks, group size, and steps (0: as many as the options say) of trainings, the cheapest first.
TRAININGS = ((2, 1, 1), (2, 2, 1), (2, 1, 0), (4, 2, 1))


@pytest.mark.parametrize("place", FOUND)
def test_a_wait_that_is_left_out_is_found(ranks: Any, tmp_path: Path, place: str) -> None:
    """By the smallest training that finds it."""
    name, options, first = (*FOUND[place], 0)[:3]
    for world, group, steps in [(4, 1, 1)] if options in PIPELINES else TRAININGS[first:]:
        if any(ranks(world).run(stream_cases.leave_out, place, name, options, str(tmp_path), group, steps)):
            return
    pytest.fail(f"nothing is found without {place}")


SETS = {name: one.strategies for name, one in stream_cases.OPTIONS.items() if not (one.aside or one.reported)}
# tests/unit/device/test_training.py watches these in the first tier.
ON_DEVICE = ("offload", "offload, LoCo", "parameters on the host", "parameters and offload", "windows")
ON_FOUR_RANKS = ("defaults", *PIPELINES)
# Others have what these have.
LATER = ("LoCo, reset", "experts, Muon", "Muon, in few bits", "without loss", "outer, offload", "Muon, offload")
LATER += ("pipeline, LoCo", "no_sync", "experts, in few bits", "in few bits, offload", "parameters, in few bits")
LATER += ("parameters, pageable",)


@pytest.mark.parametrize(
    "options, number, of_two",
    [
        *((one, 2 if one == "defaults" else 1, {}) for one in ON_FOUR_RANKS if one not in LATER),
        # On two ranks, in one group or in two.
        *(
            (one, 1, {"group_size": 1 + at % 2})
            for at, one in enumerate(SETS)
            if one not in ON_DEVICE + ON_FOUR_RANKS + LATER
        ),
        *deep(*((one, len(names), {}) for one, names in SETS.items())),
    ],
)
def test_nothing_is_used_before_it_is_complete(
    ranks: Any, kernels: bool, tmp_path: Path, options: str, number: int, of_two: dict[str, int]
) -> None:
    """With so many strategies of a set, other ones of each set."""
    world = 2 if of_two else 4
    for cases in ranks(world).run(stream_cases.watch_cases, options, str(tmp_path), number, **of_two):
        assert len(cases) == number
        for name, (findings, accesses, pairs) in cases.items():
            assert not findings, name
            assert accesses > 200 * world and pairs > 15 * world, (name, accesses, pairs)


@pytest.mark.parametrize("name", ["III", "GGG"])
def test_a_gather_that_another_stream_has_finished_is_waited_for(ranks: Any, name: str) -> None:
    assert ranks(4).run(gathers_case, name) == [([], True)] * 4


def gathers_case(name: str) -> tuple[list[str], bool]:
    """What has no order where parameters are gathered by hand; whether they are there."""
    with device_with_streams() as order:
        total = stream_cases.gather_by_hand(order, name)
    return [str(finding) for finding in order.findings], total > 0
