# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Communication under compute: the same bits as with a wait after everything, and really earlier."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.tiers import by_strategies, deep, with_some
from tests.harness.training import REPLICATED

# Each job, whether something can leave before the boundary in it, and strategies for which it is none.
OPTIONS: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "one micro-step, evaluation and saving in between": ({"between": True}, True, ()),
    "three micro-steps, two groups, frozen": ({"accumulation": 3, "groups": 2, "frozen": (1,)}, True, ()),
    "bf16, accumulated in fp32": ({"dtype": "bf16", "config": {"data_types": {"grad_accum_dtype": "fp32"}}}, True, ()),
    "fp16, overflow": ({"dtype": "fp16", "overflow": ((1, 2), (2, 0)), "accumulation": 2}, True, ()),
    "LoCo": ({"zero": {"zeropp_loco_param": {}}, "optimizer": "Adam", "groups": 2}, True, ()),
    "ranks differ in what they use": (
        {"network": "Wandering", "sizes": (29, 29, 29, 29), "accumulation": 2},
        True,
        ("NGG",),
    ),
    "first layers last": ({"skipped": ((1, 0), (2, 2), (3, 1)), "accumulation": 2}, True, ()),
    "nobody uses the last layer": ({"skipped": tuple((number, 2) for number in range(3))}, True, ()),
    "boundaries of the user": ({"boundary": "user", "accumulation": 2}, True, ()),
    "boundaries in step": ({"boundary": "step", "accumulation": 2}, False, ("NNN", "NNI", "NNG")),
    "offload": ({"zero": {"offload_optimizer": {"device": "cpu"}}, "optimizer": "Adam"}, True, ()),
}


SOME = ("NNG", "NII", "NIG")


@pytest.mark.parametrize("option, names", with_some(OPTIONS, SOME, REPLICATED), ids=by_strategies)
def test_bits_do_not_depend_on_overlap(ranks: Any, option: str, names: tuple[str, ...]) -> None:
    job, early, without = OPTIONS[option]
    for rows in ranks(4).run(bits_case, job, [name for name in names if name not in without]):
        assert rows
        for name, weights, told, left, ahead in rows:
            assert weights and told, name
            assert left == (early and name not in ("NGG",)), name
            assert ahead == (name != "NNN"), name


def bits_case(options: dict[str, Any], names: list[str]) -> list[tuple[str, bool, bool, bool, bool]]:
    """Of each strategy: whether weights are equal, and losses and norms; whether something left before the boundary,
    and whether steps ended before parameters were back."""
    from unittest import mock

    import torch

    from deepspeed_ext.zero.boundary import Boundary
    from tests.harness import networks, training

    network = options.get("network")
    job = training.Job(**{**options, "network": network and getattr(networks, network), "steps": 3})
    rows = []
    for name in names:
        keys = training.placed(name, overlap_comm=True, **training.SEVERAL_BUCKETS)
        with mock.patch.object(Boundary, "ready", lambda self, members: []):
            serial = training.train(job, keys)
        left: list[Any] = []
        ahead: list[bool] = []
        ready = Boundary.ready

        def count(self: Any, members: Any, ready: Any = ready, left: list[Any] = left) -> Any:
            buckets = ready(self, members)
            left += buckets
            return buckets

        def look(engine: Any, ahead: list[bool] = ahead) -> None:
            ahead.append(bool(engine.optimizer.updates.arrivals._started))

        with mock.patch.object(Boundary, "ready", count):
            overlapped = training.train(job, {**keys, "paro_overlap_updates": True}, look)
        equal = torch.equal(serial.weights, overlapped.weights)
        told = (serial.losses, serial.norms) == (overlapped.losses, overlapped.norms)
        rows.append((name, equal, told, bool(left), ahead[0]))
    return rows


READS = ("forward", "state_dict", "save", "gathered", "function", "offload", "restore", "copy", "destroy", "load")


@pytest.mark.parametrize("strategy", ["NIG", *deep("NII")])
def test_what_reads_parameters_waits_for_those_that_are_on_their_way(ranks: Any, strategy: str) -> None:
    for stale, found in ranks(4).run(reads_case, strategy):
        assert stale  # or this would show nothing
        assert found == dict.fromkeys(READS, True)


def ways_to_read(engine: Any, model: Any, kept: list[Any], x: Any) -> dict[str, Callable[[], list[Any]]]:
    """Each returns what it has read, as it was then; ``kept`` are the parameters."""
    import copy
    import threading

    import deepspeed
    import torch

    import deepspeed_ext

    def values(some: Any = None) -> list[Any]:
        return [tensor.detach().clone() for tensor in (kept if some is None else some)]

    def gathered() -> list[Any]:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return values()

    def destroyed() -> list[Any]:
        engine.destroy()
        read = values()
        threading.Event().wait(2.0)  # what comes late shows
        return read

    def loaded() -> list[Any]:
        model.load_state_dict({key: torch.ones_like(value) for key, value in model.named_parameters()})
        return values()

    return {
        "forward": lambda: [model(x)],
        "state_dict": lambda: values(model.layers[-1].state_dict().values()),
        "save": lambda: values(engine.module_state_dict().values()),
        "gathered": gathered,
        "function": lambda: [deepspeed_ext.wait_for_updates(), *values()][1:],
        "offload": lambda: [engine.offload_states(), engine.reload_states(), *values()][2:],
        "restore": lambda: [engine.optimizer.refresh_fp32_params(), *values()][1:],
        "copy": lambda: values(copy.deepcopy(model.layers).parameters()),
        "load": loaded,
        "destroy": destroyed,
    }


def reads_case(name: str) -> tuple[bool, dict[str, bool]]:
    """Whether parameters are stale before anything reads them, and for each way to read them whether it waits."""
    import threading
    from unittest import mock

    import torch

    import deepspeed_ext
    from deepspeed_ext.zero.flat.updates import FlatUpdates
    from tests.harness import training

    class Held:
        """A communication that takes a while."""

        def wait(self) -> None:
            threading.Event().wait(0.1)

    gather = FlatUpdates._gather_window

    def late(self: Any, window: Any) -> Any:
        yield Held()
        return (yield from gather(self, window))

    job = training.Job(empty=False)
    keys = training.placed(name, paro_overlap_updates=True, **training.SEVERAL_BUCKETS)
    found: dict[str, bool] = {}
    stale = False
    for way in READS:
        with mock.patch.object(FlatUpdates, "_gather_window", late):
            engine, model = training.make_engine(job, keys)
            kept = list(model.parameters())  # which wait for nothing, where the model's own do
            x, y = next(training.batches(job))
            training.micro_step(engine, job, 0, x, y)
            engine.step()
            before = torch.cat([p.detach().flatten() for p in kept])
            read = ways_to_read(engine, model, kept, x)[way]
            seen = read()
            waited = not engine.optimizer.updates.arrivals._started or way == "forward"
        deepspeed_ext.wait_for_updates()
        after = [p.detach() for p in model.parameters()]
        stale = stale or not torch.equal(before, torch.cat([one.flatten() for one in after]))
        # What is loaded stays, and what was read otherwise are the parameters as they are now.
        wanted = read() if way in ("forward", "state_dict", "save", "copy") else after
        found[way] = waited and all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))
        if way != "destroy":
            engine.destroy()
    return stale, found
