# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""On a device that is not the host, training gives the host's results, and tensors are where they should be."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.device_on_host import cases
from tests.harness.tiers import deep, with_some


@pytest.mark.parametrize("options", cases.OPTIONS)
def test_training_is_that_on_the_host_to_the_bit(run_on_device: Any, options: str) -> None:
    given = cases.OPTIONS[options]
    optimizers = "cpu" if "offload_optimizer" in given.zero else "sim"
    for rows in run_on_device(cases.beside, options):
        assert [row.strategy for row in rows] == list(given.strategies)
        for row in rows:
            assert row.as_on_host and row.from_stock < 1e-5 and row.places == ("sim", optimizers), row


WATCHED = [
    ("offload", ("NIG", "IGG")),
    ("offload, LoCo", ("NIG", "IIG")),
    ("in few bits, offload", ("ING",)),
    ("windows", ("IIG",)),
    ("parameters on the host", ("ING", "IIG")),
    ("parameters and offload", ("IGG",)),
    ("parameters, in few bits", ("IIG",)),
    ("parameters, pageable", ("IIG",)),
    *deep(
        ("pageable", ("NGG",)),
        ("in few bits", ("NIG",)),
        ("Muon, offload", ("NIG", "III")),
        ("every micro-step", ("NIG",)),
        ("units", ("ING", "GGG")),
        ("pipeline, offload", ("NGG", "IIG")),
    ),
]


@pytest.mark.parametrize("options, names", WATCHED)
def test_the_host_waits_for_what_it_reads(
    run_on_device: Any, tmp_path: Path, options: str, names: tuple[str, ...]
) -> None:
    for found in run_on_device(cases.watched, options, names, str(tmp_path)):
        assert found == {name: [] for name in names}


@pytest.mark.parametrize("pinned, names", with_some([True, False], ("NIG", "IIG"), ("NIG", "NNI", "IIG", "GGG")))
def test_states_are_on_the_host_between_offload_and_reload(
    run_on_device: Any, pinned: bool, names: tuple[str, ...]
) -> None:
    for rows in run_on_device(cases.offload_states, names, "Muon", pinned):
        assert rows == [(name, True, ("cpu", True), "sim") for name in names]


@pytest.mark.parametrize("name", ["IIG", *deep("ING", "IGG")])
def test_a_group_holds_its_parameters_once_in_pinned_memory_and_some_on_the_device(
    run_on_device: Any, name: str
) -> None:
    budget = 20_000
    for held in run_on_device(cases.slices_held, name, budget):
        assert held.places == {("cpu", True)}
        assert held.host == pytest.approx(held.whole / 2, rel=0.01)
        assert 0.5 * budget < held.cached <= budget
