# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Updated parameters are received during the next forward, and before any code reads them."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

import deepspeed_ext
from deepspeed_ext import strategy
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.zero.flat.update_gathers import UpdateGathers
from deepspeed_ext.zero.flat.updates import FlatUpdates
from deepspeed_ext.zero.shards import Window
from tests.harness import calls, networks, training

AHEAD = training.placed("NIG", group_size=1, paro_overlap_updates=True, **training.SEVERAL_BUCKETS)


@pytest.mark.quick
def test_reads_wait_for_updated_parameters(ranks: Any) -> None:
    for results in ranks(2).run(by_hand_case):
        # Whether it has waited, and whether a later read gives the same values.
        assert results == {reader: (True, True) if "stale" not in reader else (False, False) for reader in results}


@pytest.mark.quick
def test_iteration_that_reads_no_values_does_not_wait(ranks: Any) -> None:
    for begun, waited, classes in ranks(2).run(iteration_case):
        assert begun and not waited
        assert classes == [{"_WaitingParameters", "dict"}, {"dict"}, {"dict"}]  # a ModuleList has no parameters


def test_compiled_code_waits_only_for_what_it_reads(ranks: Any) -> None:
    for alike, (_, *waited) in ranks(2).run(compiled_case):  # in the first call Dynamo of torch 2.10 reads the weight
        assert alike and waited == [False, True]


@contextmanager
def updates_held_until_waited_for() -> Iterator[threading.Event]:
    """Keep updates in flight in this context until code waits for them; the wait sets the event."""
    gate = threading.Event()
    gather = FlatUpdates.gather_window

    class Held:
        def wait(self) -> None:
            assert gate.wait(60)

    def late(self: Any, window: Any) -> Any:
        yield Held()
        return (yield from gather(self, window))

    def close(gathers: Any) -> None:
        gathers.drain()
        gate.clear()

    with (
        mock.patch.object(FlatUpdates, "gather_window", late),
        calls.before(UpdateGathers, "start", close),
        calls.before(UpdateGathers, "wait_for", lambda *_: gate.set()),
        calls.before(UpdateGathers, "drain", lambda gathers: gathers.in_flight and gate.set()),
    ):
        yield gate


def ways_to_read(engine: Any, model: Any, x: Any) -> dict[str, Callable[[], list[Any]]]:
    """Return readers, each of which returns the values that it has read; the last one destroys the engine."""
    last, kept = model.layers[-1], list(model.parameters())
    copied = {**last._parameters}
    ones = {name: torch.ones_like(param) for name, param in model.named_parameters()}
    later = nn.Module()
    later.weight = last.weight

    def values(tensors: Any) -> list[Any]:
        return [tensor.detach().clone() for tensor in tensors]

    def hooked() -> list[Any]:
        read: list[Any] = []
        handle = model.layers[0].register_forward_hook(lambda *_: read.append(last.weight))
        model.layers[0](torch.ones(1, model.layers[0].in_features))
        handle.remove()
        return values(read)

    def parametrized() -> list[Any]:
        nn.utils.parametrize.register_parametrization(last, "weight", nn.Identity())
        read = values([last.weight])
        nn.utils.parametrize.remove_parametrizations(last, "weight")
        return read

    def gathered() -> list[Any]:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return values(kept)

    def after(act: Callable[[], Any]) -> list[Any]:
        act()
        return values(kept)

    return {
        "an attribute": lambda: values([last.weight]),
        "a hook made later": hooked,
        "old weight norm": lambda: values([model.layers[1].weight_v]),
        "parameters": lambda: values(model.parameters()),
        "functional_call": lambda: values(
            [functional_call(last, {name: one.clone() for name, one in last.named_parameters()}, (x,))]
        ),
        "stack_module_state": lambda: values(stack_module_state([last])[0].values()),
        "a parametrization made later": parametrized,
        "popped": lambda: values([last._parameters.setdefault("weight", last._parameters.pop("weight"))]),
        "deepcopy": lambda: values(copy.deepcopy(last).parameters()),
        "stale, kept from before": lambda: values(kept),
        "stale, of the optimizer": lambda: values(one for group in engine.optimizer.bit16_groups for one in group),
        "stale, a plain copy": lambda: values([copied["weight"]]),
        "stale, in a module made later": lambda: values([later.weight]),
        "forward": lambda: [model(torch.ones(1, model.layers[0].in_features))],
        "a module's state_dict": lambda: values(last.state_dict().values()),
        "the engine's state dict": lambda: values(engine.module_state_dict().values()),
        "gathered": gathered,
        "wait_for_updates": lambda: after(deepspeed_ext.wait_for_updates),
        "offload": lambda: after(lambda: (engine.offload_states(), engine.reload_states())),
        "refresh_fp32_params": lambda: after(engine.optimizer.refresh_fp32_params),
        "load_state_dict": lambda: after(lambda: model.load_state_dict(ones)),
        "destroy": lambda: after(engine.destroy),
    }


def by_hand_case() -> dict[str, tuple[bool, bool]]:
    """Return for each way to read parameters whether it has waited, and whether later reads give the same values."""
    job = training.Job(sizes=networks.SQUARE, network=networks.Normed)
    results: dict[str, tuple[bool, bool]] = {}
    with updates_held_until_waited_for() as gate:
        engine, model = training.make_engine(job, AHEAD)
        data, references = training.batches(job), list(model.parameters())
        model.eval()
        model(next(data)[0])  # the first forward waits for all of them
        model.train()
        ways = ways_to_read(engine, model, torch.ones(1, model.layers[-1].in_features))
        for reader, read in ways.items():
            training.step(engine, job, 0, data)
            values, waited = read(), gate.is_set()
            if reader != "destroy":
                deepspeed_ext.wait_for_updates()
            # Loaded values, and values after the end of an engine, do not change.
            now = references if reader in ("load_state_dict", "destroy") else read()
            results[reader] = waited, all(torch.equal(a, b) for a, b in zip(values, now, strict=True))
    return results


def iteration_case() -> tuple[bool, bool, list[set[str]]]:
    """Return whether updates were in flight, and whether any code has waited for them; then classes of modules'
    parameters, of copies of modules, and after the engine."""
    job = training.Job(empty=False)
    classes = []
    with updates_held_until_waited_for() as gate:
        engine, model = training.make_trained(job, AHEAD)
        engine.zero_grad()  # as HF's Trainer does
        model.train()
        begun, waited = engine.optimizer.updates.gathers.in_flight, gate.is_set()
        classes.append({type(module._parameters).__name__ for module in model.modules()})
        classes.append({type(copy.deepcopy(layer)._parameters).__name__ for layer in model.layers})
        engine.destroy()
        classes.append({type(module._parameters).__name__ for module in model.modules()})
    return begun, waited, classes


def compiled_case() -> tuple[bool, list[bool]]:
    """Return whether a compiled model ends with the same weights, and whether a compiled function that reads a
    module's weight, and one that calls the module, have waited for it."""
    job = training.Job(empty=False)
    weights, waited = [], []
    for compiled in (False, True):
        with updates_held_until_waited_for() as gate:
            engine, model = training.make_engine(job, AHEAD)
            if compiled:
                engine.compile(backend="eager")
            data, last = training.batches(job), model.layers[-1]
            x = torch.ones(1, last.in_features)
            read = torch.compile(lambda x, last=last: torch.nn.functional.linear(x, last.weight), backend="eager")
            called = torch.compile(lambda x, last=last: last(x), backend="eager")
            for function in (read, read, called):
                training.step(engine, job, 0, data)
                if compiled:
                    function(x)
                    waited.append(gate.is_set())
                deepspeed_ext.wait_for_updates()
            weights.append(training.whole_weights(model))
            engine.destroy()
    return torch.equal(*weights), waited


@pytest.mark.quick
def test_one_sub_group_is_gathered_in_several_windows(ranks: Any, kernels: bool) -> None:
    for sub_groups, total, waited, different in ranks(4).run(windows_case):
        assert sub_groups == {1}  # as in checkpoints of versions that knew no windows
        assert 0 < waited[0] <= total / 16 * 1.1 + LAYER  # in one window it would be all of them
        assert total / 2 < waited[-1] <= total + 4  # with padding
        assert not different


LAYER = 16 * 17  # elements


def windows_case() -> tuple[set[int], int, list[int], list[str]]:
    """Train IIG with default sizes; return the number of sub-groups, the elements of the model, the elements that are
    received before each layer runs, and names whose bits differ from training with one window."""
    small = {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    job = training.Job(sizes=(16,) * 33, dtype="bf16", empty=False, steps=2, zero=small)
    exact = {"paro_quantized_updates": {"bits": "exact"}}
    sub_groups, waited, weights = set[int](), list[int](), dict[str, Any]()
    for name, windows, extra in (("one", 1, {}), ("many", 16, {}), ("many, exact", 16, exact)):
        with mock.patch.multiple(strategy, _LEAST_BUCKET=1, _BUCKETS=windows):  # windows of a small model, too
            engine, model, data = training.begin(job, training.placed("IIG", **extra))
            for number in range(job.steps):
                training.step(engine, job, number, data)
        sub_groups.add(len(engine.optimizer.fp16_groups))
        total = sum(param.ds_numel for param in model.parameters())
        if name == "many":
            note_waits(engine, model, waited)
            engine(next(data)[0])
        weights[name] = training.whole_weights(model)
        engine.destroy()
    return sub_groups, total, waited, [name for name, value in weights.items() if not value.equal(weights["one"])]


def note_waits(engine: Any, model: Any, waited: list[int]) -> None:
    """Record before each layer of the next forward how many elements have been waited for."""
    slices = engine.optimizer.slices["dense"]
    finish = slices._updates.finish
    numbers = {id(started): number for number, started in slices._update_of.items()}
    ranks = slices.topology.sizes.ranks
    arrived = [0]

    def finishing(started: Any) -> Any:
        before = slices._windows[: numbers[id(started)] + 1]
        arrived.append(max(arrived[-1], ranks * sum(window.span.numel for window in before)))
        return finish(started)

    slices._updates.finish = finishing
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: waited.append(arrived[-1]))


class Gate(nn.Module):
    """Reads the weight of a child without calling it, as torch's attention and the gate of DeepSpeed's MoE do."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part or nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.part.weight)


def hooked_gathers(model: nn.Module) -> UpdateGathers:
    """Return UpdateGathers of a model, with a window for each parameter, in order."""
    positions = {id(param): position for position, param in enumerate(model.parameters())}
    windows = [Window(0, Span(position, 1), (position,)) for position in positions.values()]
    updates = UpdateGathers(windows, mock.Mock(), overlap=True, overlap_updates=True)
    updates.install_hooks(model, positions)
    return updates


def windows_waited_for(updates: UpdateGathers, model: nn.Module) -> list[int]:
    with mock.patch.object(UpdateGathers, "in_flight", True), mock.patch.object(updates, "wait_for") as wait_for:
        model(torch.ones(1, 4))
    return [call.args[0] for call in wait_for.call_args_list]


class Projection(nn.Module):
    """Calls its child in training, unless it is set to read the weight, as it does in evaluation."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4)) if scaled else 1.0
        self.part = nn.Linear(4, 4, bias=False)
        self.reads = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.reads:
            return self.part(x * self.scale)
        return nn.functional.linear(x * self.scale, self.part.weight)


def some_gate() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Gate(), nn.Sequential(nn.Linear(4, 4)))


def shared_part(other: type[nn.Module]) -> nn.Module:
    part = nn.Linear(4, 4, bias=False)
    return nn.Sequential(Gate(part), other(part))


# Windows that modules wait for in two forwards, and in one after a change.
WAITS: dict[str, tuple[Any, list[int], list[int], Any, list[int]]] = {
    "read": (some_gate, [4, 1, 2, 4, 4], [1, 2, 4], None, [1, 2, 4]),
    "shared": (lambda: shared_part(Gate), [0, 0, 0], [0, 0], None, [0, 0]),
    "called by another": (lambda: shared_part(nn.Sequential), [0, 0, 0, 0], [0, 0, 0], None, [0, 0, 0]),
    "called in training": (lambda: Projection(scaled=False), [0, 0], [0], nn.Module.eval, [0]),
    "seldom": (lambda: Projection(scaled=True), [1, 1], [1, 1], lambda model: setattr(model, "reads", True), [1]),
}


@pytest.mark.quick
@pytest.mark.parametrize("make, first, second, change, third", WAITS.values(), ids=WAITS.keys())
def test_a_module_waits_for_what_it_may_read(make: Any, first: Any, second: Any, change: Any, third: Any) -> None:
    model = make()
    updates = hooked_gathers(model)
    copy.deepcopy(model)  # reads parameters, and calls nothing
    assert [windows_waited_for(updates, model), windows_waited_for(updates, model)] == [first, second]
    if change:
        change(model)
    assert windows_waited_for(updates, model) == third
    updates.drop()
    assert not any(module._forward_pre_hooks for module in model.modules())
