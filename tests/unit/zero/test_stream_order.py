# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""On devices with streams no data is used before it is complete, and a missing wait is detected.

See Note [How order is checked].
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import stream_cases
from tests.harness.missing_wait_mutations import sites
from tests.harness.stream_order import device_with_streams
from tests.harness.tiers import deep, with_cases

# By call (see ``missing_wait_mutations.sites``): the strategy and the set of ``stream_cases.OPTIONS`` that detect
# its absence, and the index of the first training in ``TRAININGS`` that does, if it is not 0.
FOUND: dict[str, tuple[Any, ...]] = {
    "comm/transfer_queue.py:StreamEvent.__init__:record": ("IIG", "plain"),
    "comm/transfer_queue.py:StreamEvent.wait:wait_event": ("IIG", "plain"),
    "comm/transfer_queue.py:StreamEvent.wait:record_stream": ("III", "by hand"),
    "comm/transfer_queue.py:ActiveTransfer.advance:wait": ("NGG", "overlap"),
    "comm/transfer_queue.py:ActiveTransfer.finish:complete": ("IIG", "every micro-step"),
    "comm/transfer_queue.py:ActiveTransfer.finish:wait": ("IIG", "plain"),
    "comm/transfer_queue.py:ActiveTransfer.wait:wait": ("NIG", "plain", 2),
    "comm/transfer_queue.py:_SideStreamTransfer.__init__:wait_stream": ("IIG", "plain"),
    "comm/transfer_queue.py:_SideStreamTransfer.__init__:complete": ("IIG", "plain"),
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
    "zero/flat/gradients.py:FlatGradients.drain:drain": ("NGG", "overlap"),
    "zero/flat/gradients.py:FlatGradients.finish:drain": ("NIG", "plain"),
    "zero/flat/gradients.py:FlatGradients.finish:drain 2": ("NNN", "overlap", 1),
    "zero/muon.py:Muon.apply:drain": ("IIG", "Muon"),
    "zero/micro_steps.py:MicroSteps.finish_buckets:drain": ("NGG", "overlap"),
    "zero/sharded/gathers.py:Gathers._gather_transfer:wait_for_updates": ("IIG", "plain", 2),
    "zero/sharded/gathers.py:Gathers._all_gather:wait 2": ("GGG", "units"),
    "zero/sharded/gradients.py:ShardedGradients.end_backward:drain": ("IGG", "pageable", 3),
    "zero/outer.py:OuterOptimizer._receive_fragment:finish": ("III", "outer, delayed", 2),
    "zero/sharded/gradients.py:ShardedGradients.drain:drain": ("GGG", "offload, LoCo"),
    "zero/sharded/gradients.py:ShardedGradients.drain:drain 2": ("IGG", "chunks", 2),
    "zero/sharded/gradients.py:ShardedGradients.finish:drain": ("IIG", "plain", 1),
    "zero/sharded/gradients.py:ShardedGradients.finish:drain 2": ("IIG", "plain"),
    "zero/sharded/gradients.py:ShardedGradients.reduce_buckets:record_stream": ("ING", "plain", 2),
    "zero/sharded/slices.py:Slices._gather_slices:finish": ("IIG", "every micro-step"),
    "zero/sharded/slices.py:Slices._wait_for_windows:finish": ("IIG", "plain", 2),
    "zero/stage12.py:Stage12Optimizer.sync_gradients:finish_buckets": ("NGG", "overlap"),
    "zero/flat/gradients.py:AllFlatGradients.complete_shards:finish": ("NIG", "overlap"),
    "zero/sharded/slices.py:Slices.order_gathers:wait_for_current": ("IIG", "every micro-step"),
    "comm/packing.py:record_on_current_stream:record_stream": ("ING", "in few bits", 2),
    "zero/flat/gradients.py:AllFlatGradients.complete_shards:wait": ("NNG", "pipeline, overlap"),
    "zero/streams.py:ReductionStream.after_current:wait_stream": ("NGG", "overlap"),
    "zero/streams.py:ReductionStream.after_current:record": ("NGG", "overlap"),
    "zero/streams.py:ReductionStream.record:record_stream": ("NIG", "pipeline, offload"),
    "zero/streams.py:ReductionStream.event:record_event": ("NGG", "many buckets"),
    "zero/flat/buckets.py:GradientBuckets._write_on_current_stream:wait_event": ("NGG", "many buckets"),
    "zero/sharded/coordinator.py:GroupCoordinator.fetch_sub_module:wait": ("IIG", "whole modules", 2),
    "zero/sharded/parameters.py:ShardedParameters.wait_on_host:wait": ("IIG", "whole modules, saved"),
    "zero/sharded/reduction.py:GradientReduction.flush_buckets:wait_for_current": ("IIG", "whole modules"),
    "zero/sharded/whole.py:WholeParameters.wait:wait": ("IIG", "whole modules", 2),
    "zero/streams.py:ReductionStream.wait:wait_stream": ("NNG", "pipeline, overlap"),
    "zero/sharded/reduction.py:GradientReduction.reduce_leaf:wait_for_current": ("GGG", "units"),
    "zero/streams.py:ReductionStream.wait_for_current:wait_stream": ("GGG", "units"),
    "zero/sharded/reduction.py:GradientReduction.release:record_stream": ("GGG", "plain"),
    "zero/sharded/reduction.py:GradientReduction.wait_on_host:drain": ("GGG", "offload, LoCo"),
    "zero/sharded/reduction.py:GradientReduction.wait_on_host:synchronize": ("INI", "offload"),
    "zero/sharded/reduction.py:GradientReduction.pass_to_optimizer:wait_for_current": ("IIG", "pipeline, fp16"),
    "zero/sharded/reduction.py:GradientReduction.complete_shards:finish": ("IIG", "plain"),
    "zero/sharded/reduction.py:GradientReduction.complete_shards:wait": ("IIG", "plain"),
    "zero/sharded/reduction.py:GradientReduction.complete_shards:synchronize": ("IIG", "pipeline, offload"),
    "zero/streams.py:ReductionStream.synchronize:synchronize": ("INI", "offload"),
    "zero/sharded/parameters.py:ShardedParameters.complete_slices:complete": ("IIG", "every micro-step"),
    "zero/flat/update_gathers.py:UpdateGathers.drain:drain": ("NIG", "every micro-step"),
    "zero/flat/update_gathers.py:UpdateGathers.start:drain 2": ("NGG", "overlap", 2),
    "zero/flat/update_gathers.py:UpdateGathers.wait_for:wait": ("NIG", "plain", 2),
}
_ARRIVED = "modules have already waited for the parameters that they use"
_BY_READING = "tests/unit/zero/test_updates.py reads parameters in flight, without a device"
_GLOO = "only for gloo, where the host waits"
_ALONE = "tests/unit/comm/test_transfer_queue.py detects it"
_ENDS = f"the host waits at the end of a process; {_ALONE}"
_MEASURES = "measures time; its data is not read"
_LATER = "hops of gradients between groups, which are waited for, follow these gathers on one communicator"
_READ = "if gradients are read between micro-steps, the host waits in DeepSpeed"
_HOST = "on a CPU nothing moves to the host"
_BEFORE_OTHERS = "other groups may wait for it before they reduce flags with this one; its data is not read there"
_THREAD = "for a host thread, on devices without streams"
_ASIDE = 'tests/unit/device/test_training.py detects it ("saves aside")'
_WRITER = "for the writer thread and the host"
# By file or folder: why the waits there order no device.
OF_HOST = {
    "checkpoint/": _WRITER,
    "tools/clocks.py": _MEASURES,
    "comm/worker_thread.py:WorkerThread": _THREAD,
    "comm/worker_thread.py:Job": _THREAD,
    "comm/host_channel.py": _GLOO,
    "comm/collectives.py:Handles": _GLOO,
    "comm/collectives.py:PairwiseHandles": _GLOO,
    "tools/compare/": "for processes",
    "tools/doctor/": _MEASURES,
    "planner/probe.py": _MEASURES,
    "zero/sharded/fetch_order.py": "waits for the store",
    "tools/report/flat_collectives.py": _MEASURES,
    "tools/report/recorder.py": "the wait of the handle's owner; tests/unit/report detects it",
}
# By call: why no case can detect its absence.
UNFOUND = {
    "checkpoint/snapshots.py:Pace.pause:wait": _WRITER,
    "checkpoint/snapshots.py:Snapshot.discard:synchronize": _WRITER,
    "checkpoint/snapshots.py:Snapshot._copy_on_stream:wait_stream": _ASIDE,
    "checkpoint/snapshots.py:Snapshot.complete_copies:synchronize": _WRITER,
    "checkpoint/snapshots.py:Snapshot.start_device_copies:record": _ASIDE,
    "checkpoint/snapshots.py:Snapshot.wait_for_copies:wait": _WRITER,
    "checkpoint/snapshots.py:Snapshot.wait_for_copies:wait_event": _ASIDE,
    "checkpoint/snapshots.py:Snapshot.copy_content:wait_stream": _ASIDE,
    "zero/sharded/gradients.py:ShardedGradients.end_backward:drain 2": _BEFORE_OTHERS,
    "comm/worker_thread.py:complete_before_exit:synchronize": _ENDS,
    "comm/transfer_queue.py:StreamEvent.synchronize:synchronize": _ENDS,
    "comm/transfer_queue.py:TransferQueue.synchronize:synchronize": _ENDS,
    "integration/seams.py:complete_transfers_first:complete_before_exit": _ENDS,
    "comm/transfer_queue.py:_SideStreamTransfer._resume:wait": _ALONE,
    "comm/transfer_queue.py:_SideStreamTransfer._deliver_result:wait": _ALONE,
    "comm/transfer_queue.py:ActiveTransfer.wait:complete": "a side stream has already received all of its work",
    "comm/transfer_queue.py:_ThreadTransfer.advance:wait": _THREAD,
    "comm/transfer_queue.py:_ThreadTransfer.complete:wait": _THREAD,
    "comm/transfer_queue.py:_ThreadCompletedTransfer.complete:wait": _THREAD,
    "comm/transfer_queue.py:TransferQueue.drain:wait": _THREAD,
    "comm/transfer_queue.py:TransferQueue.submit:complete": _THREAD,
    "comm/transfer_queue.py:TransferQueue.drop:wait": _ALONE,
    "leaf/gradients.py:LeafGradients.end_open_passes:finish": "orders nothing: it is a method of a block",
    "loco/feedback.py:ErrorFeedback._wait_for_copies:synchronize": _HOST,
    "zero/sharded/coordinator.py:_record_use:record_stream": "a case of tests/unit/campaigns/test_fuzz.py",
    "zero/sharded/expert_windows.py:WindowGradients._window_transfer:record_stream": "no case reuses that memory",
    "zero/sharded/expert_windows.py:WindowGathers._window_transfer:wait_for_updates": "prefetched windows have waited",
    "zero/micro_steps.py:MicroSteps.end_micro_step:finish_buckets": _READ,
    "zero/micro_steps.py:MicroSteps.finish_buckets:wait": f"{_READ}, and the boundary waits again",
    "zero/sharded/gathers.py:Gathers.release:drain": "no parameter is read after the end",
    "zero/sharded/whole.py:WholeParameters.release:wait": "no parameter is read after the end",
    "zero/stage3.py:Stage3Optimizer.__init__:wait": _ARRIVED,
    "zero/factory.py:_make_inference:wait": _ARRIVED,
    "zero/sharded/gathers.py:Gathers._partition:wait": _ARRIVED,
    "zero/sharded/gathers.py:Gathers._all_gather:wait": _ARRIVED,
    "zero/sharded/parameters.py:ShardedParameters.receive_updates:wait": _ARRIVED,
    "zero/sharded/whole.py:WholeParameters.gather:wait": _ARRIVED,
    "zero/sharded/gradients.py:ShardedGradients.clear:drain": "for an interrupted backward",
    "zero/flat/gradients.py:AllFlatGradients.reset:drain": "for an interrupted backward",
    "zero/flat/gradients.py:AllFlatGradients.reset:wait": "for an interrupted backward",
    "zero/sharded/slices.py:Slices.gather_updates:drain": "no gather is in flight after a step, which has waited",
    "zero/sharded/slices.py:Slices.drain:finish": _LATER,
    "zero/sharded/slices.py:Slices.wait_on_host:drain": "rows are received long before a load or save reads them",
    "zero/sharded/slices.py:Slices.wait_on_host:synchronize": "tests/unit/device/test_training.py detects it",
    "zero/flat/buckets.py:GradientBuckets._reduce:record": "no case skips so many buckets",
    "zero/flat/buckets.py:GradientBuckets._reduce:record 2": "no case skips so many buckets",
    "zero/stage12.py:Stage12Optimizer.offload_states:finish_buckets": _HOST,
    "zero/sharded/parameters.py:ShardedParameters.receive_updates:drain": f"{_LATER}; readers wait themselves",
    "zero/sharded/reduction.py:GradientReduction.pass_to_optimizer:synchronize": "the next wait includes it",
    "zero/sharded/reduction.py:GradientReduction.pass_to_optimizer:synchronize 2": "the host reads the norm first",
    "zero/stage3.py:Stage3Optimizer.zero_grad:finish_buckets": "reduced gradients are dropped",
    "zero/sharded/reduction.py:GradientReduction.require_complete:finish_buckets": _READ,
    "zero/stage3.py:Stage3Optimizer.offload_states:finish_buckets": _HOST,
    "zero/stage12.py:Stage12Optimizer.offload_states:drain": _BY_READING,
    "zero/flat/updates.py:FlatUpdates.gather:drain": "a step has waited before",
    "zero/stage12.py:Stage12Optimizer.checkpoint_event_prologue:drain": _BY_READING,
    "zero/flat/updates.py:FlatUpdates.wait_and_free:drain": _ARRIVED,
    "zero/flat/updates.py:FlatUpdates.drain:drain": _ARRIVED,
    "zero/stage12.py:Stage12Optimizer.update_lp_params:drain": _BY_READING,
    "zero/pace.py:_Measurement._end_micro_step:synchronize": "for a clock on the host",
    "zero/pace.py:_Measurement._end_step:synchronize": "for a clock on the host",
    "zero/resync.py:_Vote.__init__:record": "the host reads the result in host memory",
    "zero/resync.py:_Vote.result:synchronize": "the host reads the result in host memory",
    "zero/sharded/reduction.py:GradientReduction.keep_full:wait_for_current": "for a model on several streams",
    "zero/flat/update_gathers.py:UpdateGathers.drop:drain": _BY_READING,
    "zero/flat/update_gathers.py:UpdateGathers.start:drain": _ARRIVED,
    "zero/flat/update_gathers.py:UpdateGathers.wait_for:drain": _BY_READING,
    "zero/flat/update_gathers.py:UpdateGathers.wait:drain": _BY_READING,
    "zero/updates_in_flight.py:wait_for_updates:wait": _BY_READING,
    "zero/updates_in_flight.py:wait_for_replicated_parameters:wait": _BY_READING,
}


@pytest.mark.quick
def test_each_wait_is_in_one_list() -> None:
    assert not FOUND.keys() & UNFOUND.keys()
    of_host = {name for name in sites() if name.startswith(tuple(OF_HOST))}
    of_host -= {name for name in of_host if name.startswith("checkpoint/snapshots.py")}  # these copy on a stream
    assert {*FOUND, *UNFOUND} == set(sites()) - of_host
    assert len(FOUND) >= 15


PIPELINES = tuple(name for name, one in stream_cases.OPTIONS.items() if one.pipe is not None)
# Ranks, group size, and steps (0: the number in the options) of trainings, the cheapest first.
TRAININGS = ((2, 1, 1), (2, 2, 1), (2, 1, 0), (4, 2, 1))


@pytest.mark.parametrize("place", FOUND)
def test_a_missing_wait_is_detected(ranks: Any, tmp_path: Path, place: str) -> None:
    """The smallest training that detects it runs."""
    name, options, first = (*FOUND[place], 0)[:3]
    for world, group, steps in [(4, 1, 1)] if options in PIPELINES else TRAININGS[first:]:
        if any(ranks(world).run(stream_cases.leave_out, place, name, options, str(tmp_path), group, steps)):
            return
    pytest.fail(f"no training detects the absence of {place}")


SETS = {name: one.strategies for name, one in stream_cases.OPTIONS.items() if not (one.aside or one.reported)}
# tests/unit/device/test_training.py checks these in the first tier.
ON_DEVICE = ("offload", "offload, LoCo", "parameters on the host", "parameters and offload", "windows")
ON_FOUR_RANKS = ("defaults", "modules in groups", *PIPELINES)
# Other sets cover these.
LATER = ("LoCo, reset", "experts, Muon", "Muon, in few bits", "without loss", "outer, offload", "Muon, offload")
LATER += ("pipeline, LoCo", "no_sync", "experts, in few bits", "in few bits, offload", "parameters, in few bits")
LATER += ("parameters, pageable", "whole modules, saved")


@with_cases(
    "options, number, of_two",
    *((one, 2 if one == "defaults" else 1, {}) for one in ON_FOUR_RANKS if one not in LATER),
    # On two ranks, in one group or in two.
    *(
        (one, 1, {"group_size": 1 + at % 2})
        for at, one in enumerate(SETS)
        if one not in ON_DEVICE + ON_FOUR_RANKS + LATER
    ),
    *deep(*((one, len(names), {}) for one, names in SETS.items())),
)
def test_data_is_complete_before_it_is_used(
    ranks: Any, kernels: bool, tmp_path: Path, options: str, number: int, of_two: dict[str, int]
) -> None:
    """With a limited number of strategies per set, each set gets others."""
    world = 2 if of_two else 4
    for cases in ranks(world).run(stream_cases.watch_cases, options, str(tmp_path), number, **of_two):
        assert len(cases) == number
        for name, (findings, accesses, pairs) in cases.items():
            assert not findings, name
            assert accesses > 200 * world and pairs > 15 * world, (name, accesses, pairs)


@pytest.mark.parametrize("name", ["III", "GGG"])
def test_a_gather_that_another_stream_ran_is_waited_for(ranks: Any, name: str) -> None:
    assert ranks(4).run(gathers_case, name) == [([], True)] * 4


def gathers_case(name: str) -> tuple[list[str], bool]:
    """Return accesses without an order if parameters are gathered by hand, and whether their values are right."""
    with device_with_streams() as order:
        total = stream_cases.gather_by_hand(order, name)
    return [str(finding) for finding in order.findings], total > 0
