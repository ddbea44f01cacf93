# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""With ``paro_overlap_updates``: reads of parameters of modules that nobody calls, and whether these have arrived."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ARRIVED = (
    "an attribute",
    "a method",
    "a weight tied by hand",
    "a wrapper made later",
    "a hook made later",
    "old weight norm",
    "parameters",
    "parameters_to_vector",
    "an average",
    "functional_call",
    "stack_module_state",
    "a parametrization made later",
    "deepcopy",
)
STALE = ("kept from before", "of the optimizer", "a plain copy", "in a module made later")


@pytest.mark.quick
def test_parameters_arrive_before_they_are_read_as_attributes_or_by_iteration(ranks: Any) -> None:
    for found in ranks(2).run(by_hand_case):
        # Whether it has waited, and whether it has read what it would read later.
        assert found == {**dict.fromkeys(ARRIVED, (True, True)), **dict.fromkeys(STALE, (False, False))}


@pytest.mark.quick
def test_what_goes_over_parameters_and_reads_none_waits_for_none(ranks: Any) -> None:
    for begun, waited, classes in ranks(2).run(unread_case):
        assert begun and not waited
        assert classes == [{"_WaitingParameters", "dict"}, {"dict"}, {"dict"}]  # a ModuleList has no parameters


def test_compiled_code_computes_the_same_and_does_not_wait_for_other_modules(ranks: Any) -> None:
    for alike, (_, *waited) in ranks(2).run(compiled_case):  # in the first call Dynamo of torch 2.10 reads the weight
        assert alike and waited == [False, True]


@contextmanager
def arriving_when_waited_for() -> Iterator[threading.Event]:
    """In this context updates are on their way until somebody waits for them; that sets the event."""
    from unittest import mock

    from deepspeed_ext.zero.flat.arrivals import Arrivals
    from deepspeed_ext.zero.flat.updates import FlatUpdates

    gate = threading.Event()
    gather, start, wait_for, drain = FlatUpdates._gather_window, Arrivals.start, Arrivals.wait_for, Arrivals.drain

    class Held:
        def wait(self) -> None:
            assert gate.wait(60)

    def late(self: Any, window: Any) -> Any:
        yield Held()
        return (yield from gather(self, window))

    def started(self: Any) -> None:
        self.drain()
        gate.clear()
        start(self)

    def waited(self: Any, number: int) -> None:
        gate.set()
        wait_for(self, number)

    def drained(self: Any) -> None:
        if self.begun:
            gate.set()
        drain(self)

    with (
        mock.patch.object(FlatUpdates, "_gather_window", late),
        mock.patch.multiple(Arrivals, start=started, wait_for=waited, drain=drained),
    ):
        yield gate


def ways_to_read(engine: Any, model: Any, x: Any) -> dict[str, Callable[[], list[Any]]]:
    """Each returns what it has read, as it was then."""
    import copy

    import torch
    from torch import nn
    from torch.func import functional_call, stack_module_state

    last, kept = model.layers[-1], list(model.parameters())
    copied = {**last._parameters}
    later = nn.Module()
    later.weight = last.weight

    def tied_to(weight: Any) -> Any:
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        head.weight = weight
        return head(x)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lenders = [last]

        def forward(self, x: Any) -> Any:
            return nn.functional.linear(x, self.lenders[0].weight)

    def values(some: Any) -> list[Any]:
        return [tensor.detach().clone() for tensor in some]

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

    average = torch.optim.swa_utils.AveragedModel(last)

    def renewed() -> list[Any]:
        average.n_averaged.zero_()
        average.update_parameters(last)
        return values(average.parameters())

    return {
        "an attribute": lambda: values([last.weight]),
        "a method": lambda: [model.last(x)],
        "a weight tied by hand": lambda: [tied_to(last.weight)],
        "a wrapper made later": lambda: [Wrapper()(x)],
        "a hook made later": hooked,
        "old weight norm": lambda: values([model.layers[1].weight_v]),
        "parameters": lambda: values(model.parameters()),
        "parameters_to_vector": lambda: values([nn.utils.parameters_to_vector(model.parameters())]),
        "an average": renewed,
        "functional_call": lambda: values(
            [functional_call(last, {name: one.clone() for name, one in last.named_parameters()}, (x,))]
        ),
        "stack_module_state": lambda: values(stack_module_state([last])[0].values()),
        "a parametrization made later": parametrized,
        "deepcopy": lambda: values(copy.deepcopy(last).parameters()),
        "kept from before": lambda: values(kept),
        "of the optimizer": lambda: values(one for group in engine.optimizer.bit16_groups for one in group),
        "a plain copy": lambda: values([copied["weight"]]),
        "in a module made later": lambda: values([later.weight]),
    }


def by_hand_case() -> dict[str, tuple[bool, bool]]:
    """For each way to read parameters: whether it has waited, and whether it has read what it reads afterwards."""
    import torch

    import deepspeed_ext
    from tests.harness import networks, training

    job = training.Job(sizes=networks.SQUARE, network=networks.Normed)
    keys = training.placed("NIG", group_size=1, paro_overlap_updates=True, **training.SEVERAL_BUCKETS)
    found: dict[str, tuple[bool, bool]] = {}
    with arriving_when_waited_for() as gate:
        engine, model = training.make_engine(job, keys)
        data = training.batches(job)
        model.eval()
        model(next(data)[0])  # the first forward waits for all of them
        model.train()
        ways = ways_to_read(engine, model, torch.ones(1, model.layers[-1].in_features))
        for way, read in ways.items():
            training.micro_step(engine, job, 0, *next(data))
            engine.step()
            seen, waited = read(), gate.is_set()
            deepspeed_ext.wait_for_updates()
            found[way] = waited, all(torch.equal(a, b) for a, b in zip(seen, read(), strict=True))
        engine.destroy()
    return found


def unread_case() -> tuple[bool, bool, list[set[str]]]:
    """Whether updates were on their way, and whether something has waited for them; then classes of modules'
    parameters, of copies of modules, and those after the engine."""
    import copy

    from tests.harness import training

    job = training.Job(empty=False)
    classes = []
    with arriving_when_waited_for() as gate:
        engine, model = training.make_engine(
            job, training.placed("NIG", group_size=1, paro_overlap_updates=True, **training.SEVERAL_BUCKETS)
        )
        training.micro_step(engine, job, 0, *next(training.batches(job)))
        engine.step()
        engine.zero_grad()  # as HF's Trainer does
        model.train()
        begun, waited = engine.optimizer.updates.arrivals.begun, gate.is_set()
        classes.append({type(module._parameters).__name__ for module in model.modules()})
        classes.append({type(copy.deepcopy(layer)._parameters).__name__ for layer in model.layers})
        engine.destroy()
        classes.append({type(module._parameters).__name__ for module in model.modules()})
    return begun, waited, classes


def compiled_case() -> tuple[bool, list[bool]]:
    """Whether a compiled model ends with the same weights; whether a compiled function that reads a module's weight
    has waited for it in two calls, and one that calls the module."""
    import torch

    import deepspeed_ext
    from tests.harness import training

    job = training.Job(empty=False)
    keys = training.placed("NIG", group_size=1, paro_overlap_updates=True, **training.SEVERAL_BUCKETS)
    weights, waited = [], []
    for compiled in (False, True):
        with arriving_when_waited_for() as gate:
            engine, model = training.make_engine(job, keys)
            if compiled:
                engine.compile(backend="eager")
            data, last = training.batches(job), model.layers[-1]
            x = torch.ones(1, last.in_features)
            read = torch.compile(lambda x, last=last: torch.nn.functional.linear(x, last.weight), backend="eager")
            called = torch.compile(lambda x, last=last: last(x), backend="eager")
            for function in (read, read, called):
                training.micro_step(engine, job, 0, *next(data))
                engine.step()
                if compiled:
                    function(x)
                    waited.append(gate.is_set())
                deepspeed_ext.wait_for_updates()
            weights.append(training.whole_weights(model))
            engine.destroy()
    return torch.equal(*weights), waited
