# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""On a device that is not the host: training gives the host's results, tensors are on the expected device, and saves
of both load on both."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.device_on_host import cases
from tests.harness.tiers import deep, with_cases
from tests.harness.training import Job

LOCO = {"zeropp_loco_param": {}}
EVERY = {name: options.strategies for name, options in cases.OPTIONS.items()}
# Options in the second tier only: others cover their code.
LATER = ("pinned", "pageable", "overflow", "LoCo, pageable", "parameters, cached", "outer", "Muon, pinned")
SOME = {"on the device": ("NIG", "GGG"), "parameters": ("IGG",), "parameters, in few bits": ("ING",)}
SOME |= {"outer, pinned": ("INI",), "Muon": ("NIG",)}

CASES = [(options, names) for options, names in (EVERY | SOME).items() if options not in LATER]


@pytest.mark.parametrize("options, names", CASES + deep(*((options, EVERY[options]) for options in (*SOME, *LATER))))
def test_training_matches_the_host_bit_for_bit(run_on_device: Any, options: str, names: tuple[str, ...]) -> None:
    optimizers = "cpu" if "offload_optimizer" in cases.OPTIONS[options].zero else "sim"
    for rows in run_on_device(cases.beside, options, names):
        assert [row.strategy for row in rows] == list(names)
        for row in rows:
            assert row.as_on_host and row.from_stock < 1e-5 and row.places == ("sim", optimizers), row


WATCHED = {"offload": "IGG", "offload, LoCo": "IIG", "windows": "IIG", "parameters on the host": "IIG"}
WATCHED |= {"parameters and offload": "IGG", "saves aside": "NIG IIG"}
DEEP = {"offload": "NIG IGG", "offload, LoCo": "NIG IGG", "in few bits, offload": "ING IIG", "units": "ING GGG"}
DEEP |= {"parameters, in few bits": "ING IIG", "parameters on the host": "ING", "parameters, pageable": "IIG"}
DEEP |= {"saves aside": "NIG IIG NNI III GGG", "saves aside, offload": "NIG IIG", "pageable": "NGG"}
DEEP |= {"in few bits": "NIG", "Muon, offload": "NIG III", "every micro-step": "NIG", "pipeline, offload": "NGG IIG"}


@pytest.mark.parametrize("kind, names", [*WATCHED.items(), *deep(*DEEP.items())])
def test_host_waits_for_values_before_reading_them(run_on_device: Any, tmp_path: Path, kind: str, names: str) -> None:
    for missing_waits in run_on_device(cases.watched, kind, names.split(), str(tmp_path)):
        assert missing_waits == {name: [] for name in names.split()}


SHAPES = ("NIG", "NNI", "IIG", "GGG")


@with_cases(
    "names, pinned, zero",
    (("IIG",), True, LOCO),
    (("III",), False, cases.OUTER),
    *deep((SHAPES, True, LOCO), (SHAPES, False, LOCO), (("NII",), False, cases.OUTER)),
)
def test_states_are_on_the_host_while_offloaded(run_on_device: Any, names: Any, pinned: bool, zero: Any) -> None:
    for rows in run_on_device(cases.offload_states, names, "Muon", pinned, zero):
        assert rows == [(name, True, ("cpu", True), "sim") for name in names]


WIDTH, LAYERS = 128, 8
LAYER = WIDTH * WIDTH
BF16, WINDOW, BUDGET = 2, 2 * LAYER // 4 * 2, 100_000  # bytes; a window of k rows, of which a rank sends one
ACTIVATIONS = 10_000  # bytes, with their gradients
SLICED = ("ING", "IIG", "IGG")


@pytest.mark.parametrize("frozen, names", [(1, ("IIG",)), *deep(*((frozen, SLICED) for frozen in range(2)))])
def test_device_has_few_modules_and_host_has_one_slice(run_on_device: Any, frozen: int, names: Any) -> None:
    at_a_time = {"stage3_prefetch_bucket_size": LAYER, "stage3_max_live_parameters": 2 * LAYER}
    zero = {"paro_parameter_cache_bytes": BUDGET, "sub_group_size": 2 * LAYER}
    buckets = {"allgather_bucket_size": LAYER, "reduce_bucket_size": LAYER}
    job = Job(
        sizes=(WIDTH,) * (LAYERS + 1),
        zero={**at_a_time, **buckets, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0},
        dtype="bf16",
        optimizer="Adam",
        empty=False,
        frozen=range(1, LAYERS - 1) if frozen else (),
        config={"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
    )
    for full_bytes, rows in run_on_device(cases.slices_held, names, job, zero):
        assert [row.strategy for row in rows] == list(names)
        for row in rows:
            assert row.places == {("cpu", True)}
            assert row.host == pytest.approx(full_bytes / 2, rel=0.01), row
            assert row.on_host == pytest.approx(row.host, rel=0.01), row
            assert 0.5 * BUDGET < row.cached <= BUDGET, row
            assert row.peak <= row.cached + 2 * LAYER * BF16 + 2 * WINDOW + ACTIVATIONS, row


RESUMED: list[tuple[str, dict[str, Any], tuple[str, ...], bool]] = [
    ("Adam", {}, ("NIG", "IIG"), False),
    ("Adam", {**LOCO, **cases.PINNED}, ("IIG", "NII"), True),
    ("Adam", {**LOCO, "paro_quantized_updates": {}}, ("NIG", "ING"), True),
    ("Adam", cases.HOST, ("ING", "IIG"), True),
    ("Muon", {}, ("III", "NIG"), False),
    ("Muon", cases.PAGEABLE, ("GNG", "NIG"), True),
]


@pytest.mark.parametrize(
    "optimizer, zero, names, from_device",
    [*((*options, names[:1], from_device) for *options, names, from_device in RESUMED[1::2]), *deep(*RESUMED)],
    ids=str,
)
def test_resumed_run_matches_uninterrupted_run_on_both(
    run_on_device: Any, tmp_path: Path, optimizer: str, zero: dict[str, Any], names: tuple[str, ...], from_device: bool
) -> None:
    for rows in run_on_device(cases.resume, str(tmp_path), names, optimizer, zero, from_device):
        assert rows == [(name, {}, {}, {}) for name in names]


def test_export_from_device_equals_model(run_on_device: Any, tmp_path: Path) -> None:
    for rows in run_on_device(cases.export, str(tmp_path), ("NIG", "IIG")):
        assert rows == [("NIG", []), ("NIG", []), ("IIG", []), ("IIG", [])]


FEW_BITS: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
ROWS: list[tuple[str, str, dict[str, Any], str]] = [("NIG", "bf16", {}, "Adam")]
MORE: list[tuple[str, str, dict[str, Any], str]] = [
    ("IIG", "bf16", FEW_BITS, "Adam"),
    ("NII", "fp16", cases.PAGEABLE, "Adam"),
    ("NIG", "bf16", cases.PINNED, "Muon"),
    ("III", "bf16", cases.OUTER, "Adam"),
]


@pytest.mark.parametrize("rows", [ROWS, *deep(MORE)], ids=len)
def test_asynchronous_saves_equal_synchronous_saves(
    run_on_device: Any, tmp_path: Path, rows: list[tuple[str, str, dict[str, Any], str]]
) -> None:
    for twins in run_on_device(cases.twins, str(tmp_path), rows):
        assert len(twins) == len(rows)
        for twin in twins:
            assert twin.different == [] and twin.files >= 28 and twin.same, tuple(twin)
