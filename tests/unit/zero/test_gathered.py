# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters with p = I or G are read, modified, and used as in DeepSpeed's stage 3."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partitioned_param_coordinator import assert_ints_same_as_other_ranks
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file

import deepspeed_ext
from deepspeed_ext.comm.process_groups import get_topology
from deepspeed_ext.zero.sharded.coordinator import _comparing_within, assert_same_in_group
from tests.harness import networks, snapshots, training
from tests.harness.tiers import deep, with_cases
from tests.harness.training import PARTITIONED, REPLICATED, SEVERAL_BUCKETS, SMALL, Job, placed

RECORDS: dict[str, tuple[list[list[int]], set[int]]] = {  # each rank's order of modules; the ranks that must raise
    "equal": ([[1, 2, 3]] * 4, set()),
    "empty": ([[]] * 4, set()),
    "groups may differ": ([[1, 2, 3], [1, 2, 3], [3, 1], [3, 1]], set()),
    "longer on one rank": ([[1, 2], [1, 2], [1, 2], [1, 2, 3]], {2, 3}),
    "longer on one rank of each group": ([[1], [1, 2], [1, 2, 3], [1, 2]], {0, 1, 2, 3}),
    "another order": ([[1, 2, 3], [1, 3, 2], [1, 2, 3], [1, 2, 3]], {0, 1}),
    "other modules": ([[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 3]], {2, 3}),
    "nothing on one rank": ([[], [5], [5], [5]], {0, 1}),
}


@pytest.mark.quick
def test_different_module_orders_raise_within_a_group(ranks: Any) -> None:
    for rank, (errors, compares_in_group) in enumerate(ranks(4).run(compare_case)):
        assert compares_in_group
        for (case, (records, differing)), error in zip(RECORDS.items(), errors, strict=True):
            assert bool(error) == (rank in differing), (case, rank, error)
            if error:
                first = rank - rank % 2
                lengths = [len(records[first]), len(records[first + 1])]
                assert f"The ranks {[first, first + 1]}, which gather parameters together" in error
                assert f"rank {rank}: {len(records[rank])} entries in the record" in error
                assert f"between {min(lengths)} and {max(lengths)} in the group" in error and "leaf module" in error


def compare_case() -> tuple[list[str], bool]:
    """Compare records within groups of two; return the errors, and whether later comparisons are over all ranks."""
    errors = []
    for records, _ in RECORDS.values():
        with _comparing_within(get_topology(None, 2).intra):
            errors.append(snapshots.error_of(assert_ints_same_as_other_ranks, records[dist.get_rank()]))
    with _comparing_within(get_topology(None, 2).intra):
        within = assert_same_in_group([1, 2])
    compares_in_group = assert_same_in_group([1, 2])
    assert_ints_same_as_other_ranks([1, 2])
    return errors, bool(within and not compares_in_group)


# 3 is in the other group.
@pytest.mark.parametrize("modifier, dtype, names", [(3, "fp32", ("III", "GNG")), *deep((0, "bf16", PARTITIONED))])
def test_all_ranks_receive_modifications_of_one_rank(ranks: Any, modifier: int, dtype: str, names: Any) -> None:
    answers = ranks(4).run(modify_case, modifier, dtype, names)
    assert answers[0] == [(name, True, True, True, True) for name in names]
    assert all(answer == answers[0] for answer in answers)


def modify_case(modifier: int, dtype: str, names: Sequence[str]) -> list[tuple[str, bool, bool, bool, bool]]:
    """Whether parameters are read correctly, and a change reaches all ranks and lasts as with stock after another
    step, which undoes it with stock, too: GatheredParameters does not change the optimizer's fp32 weights."""
    job = Job(dtype=dtype, frozen=(1,), empty=False, zero=SMALL)

    def run(zero: dict[str, Any]) -> tuple[list[torch.Tensor], bool]:
        engine, model, data = training.begin(job, zero)
        for _ in range(2):
            training.step(engine, job, 0, data)
        weights = [training.whole_weights(model)]
        expected = training.Network(job.sizes, empty=False).to(training.DTYPES[dtype])
        torch.nn.utils.vector_to_parameters(weights[0].to(training.DTYPES[dtype]), expected.parameters())
        for number, layer in enumerate(model.layers):  # a parameter, a list, a generator; layer 1 is frozen
            params: Any = [layer.weight, [layer.weight], layer.parameters()][number]
            gathered = deepspeed.zero.GatheredParameters([model.layers[number - 1].weight])
            with gathered, deepspeed.zero.GatheredParameters(params, modifier_rank=modifier), torch.no_grad():
                if dist.get_rank() == modifier:
                    layer.weight.mul_(1 + number).add_(0.25)
            with torch.no_grad():
                expected.layers[number].weight.mul_(1 + number).add_(0.25)
        weights.append(training.whole_weights(model))
        correct = torch.equal(weights[1], torch.cat([p.detach().float().flatten() for p in expected.parameters()]))
        x, y = next(data)
        with torch.no_grad():  # the frozen layer's change counts
            correct = correct and torch.equal(engine(x), expected(x))
        training.micro_step(engine, job, 0, x, y)
        engine.step()
        weights.append(training.whole_weights(model))
        engine.destroy()
        return weights, correct

    stock, _ = run({"stage": 3})
    rows = []
    for name in names:
        ours, changed = run(placed(name, **({"paro_modules": {"layers.[01]": "N"}} if name[0] == "G" else {})))
        alike = [
            training.replicas_equal(a) and bool((a - b).abs().max() <= (1e-5 if dtype == "fp32" else 1e-2))
            for a, b in zip(ours, stock, strict=True)
        ]
        rows.append((name, alike[0], changed, alike[1], alike[2]))
    return rows


@pytest.mark.parametrize("modifier, names", [(1, ("IIG", "IIG")), (3, ("III", "IIG")), (3, ("3", "III"))])
def test_one_context_gathers_from_several_engines(ranks: Any, modifier: int, names: tuple[str, ...]) -> None:
    assert ranks(4).run(several_engines_case, modifier, names) == [[0, 0, 0]] * 4


def several_engines_case(modifier: int, names: tuple[str, ...]) -> list[int]:
    """Modify parameters of two engines and of a layer without one in one context; return wrong elements of each."""
    engines = [training.make_engine(Job(empty=False), placed(name)) for name in names]
    with deepspeed.zero.Init():
        later = torch.nn.Linear(5, 7)
    params = [list(model.parameters()) for model in (*(model for _, model in engines), later)]
    everything = [param for engine_params in params for param in engine_params]
    with deepspeed.zero.GatheredParameters(everything, modifier_rank=modifier):
        for param in everything:
            param.data.fill_(100 + dist.get_rank())
    wrong = []
    for engine_params in params:
        with deepspeed.zero.GatheredParameters(engine_params[::-1]):
            wrong.append(sum(int((p.data != 100 + modifier).sum()) for p in engine_params))
    for engine, _ in engines:
        engine.destroy()
    assert torch.is_grad_enabled()
    return wrong


UNITS = {"stage3_leaf_bytes": 10**5}
ON_HOST = {"offload_param": {"device": "cpu", "pin_memory": False}, "paro_parameter_cache_bytes": 3000}
AHEAD = {"paro_overlap_updates": True, "overlap_comm": True}


@with_cases(
    "names, zero, alone",
    (("GGG",), {"stage3_param_persistence_threshold": 20}, False),
    (("IIG",), {}, True),  # with p = I a group needs no other
    *deep((PARTITIONED, {}, False), (("ING", "IGG"), {}, True), (PARTITIONED, UNITS, False)),
    *deep((REPLICATED, AHEAD, False), (("ING", "IIG", "IGG"), ON_HOST, False)),
    *deep((PARTITIONED, {"stage3_param_persistence_threshold": 10**6}, False)),
)
def test_evaluation_reads_updates_and_changes_no_weights(
    ranks: Any, tmp_path: Path, names: Sequence[str], zero: dict[str, Any], alone: bool
) -> None:
    for name, (from_masters, from_stock) in ranks(4).each(evaluation_case, names, zero, alone, str(tmp_path)):
        assert from_masters == 0.0 and from_stock <= 1e-6, (name, from_masters, from_stock)


def evaluation_case(name: str, zero: dict[str, Any], alone: bool, folder: str) -> tuple[float, float]:
    """Evaluate under ``torch.inference_mode()``, whose tensors autograd rejects, before the first micro-step and after
    each, and save and load in it; return the distance of outputs from outputs of the fp32 weights, and of trained
    weights from stock's. ``alone``: the first group, which cannot gather others, compares with the gathered
    weights."""
    job = Job(networks.SQUARE, False, 2, 2, network=networks.Shared, zero={**SMALL, **zero})
    undisturbed = training.train(replace(job, zero=SMALL), {"stage": 3}).weights  # stock takes no keys of ours
    full_model = networks.Shared(networks.SQUARE, empty=False)
    engine, model = training.make_engine(job, placed(name))
    data, probe, from_masters = training.batches(job), torch.ones(3, networks.SQUARE[0]), 0.0
    for number in range(-1, 4):
        if number >= 0:
            training.step(engine, job, number, data)
        if alone and dist.get_rank() >= 2:
            continue
        engine.eval()
        with torch.inference_mode():
            outputs = [engine(probe * i) for i in range(1, 4)]
            training.whole_weights(model)
            if number == 1 and not alone:
                engine.save_checkpoint(f"{folder}/{name}")
                engine.load_checkpoint(f"{folder}/{name}")
        with torch.no_grad():
            weights = training.whole_weights(model)
            if not alone:
                weights = torch.cat([safe_get_full_fp32_param(p).flatten() for p in model.parameters()])
            torch.nn.utils.vector_to_parameters(weights, full_model.parameters())
            for i, output in enumerate(outputs, 1):
                from_masters = max(from_masters, (output - full_model(probe * i)).abs().max().item())
        engine.train()
    return from_masters, (training.whole_weights(model) - undisturbed).abs().max().item()


@pytest.mark.parametrize("network", [networks.Tangled, *deep(networks.Shared)], ids=lambda network: network.__name__)
def test_inference_without_an_optimizer_matches_the_model(ranks: Any, network: Any) -> None:
    assert ranks(4).each(inference_case, PARTITIONED, network) == [(name, (0.0, True)) for name in PARTITIONED] * 4


def inference_case(name: str, network: Any) -> tuple[float, bool]:
    """Return the distance of outputs from the plain model's, and whether its parameters were sharded."""
    torch.manual_seed(7)
    plain = network(networks.SQUARE, empty=False)
    model = copy.deepcopy(plain)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": placed(name, **SMALL)}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    cut = all(p.numel() == 0 for p in model.parameters())
    with torch.no_grad():
        inputs = [torch.full((3, networks.SQUARE[0]), i / 4) for i in range(3)]
        gap = max((engine(x) - plain(x)).abs().max().item() for x in inputs)
    return gap, cut


HOST = {"offload_param": {"device": "cpu"}}


@with_cases(
    "names, zero",
    (("3", "IIG", "GGG"), {"stage3_param_persistence_threshold": 0}),
    (("IIG",), {}),
    *deep(
        *(
            (("3", *PARTITIONED), {**zero, "stage3_param_persistence_threshold": 100, "overlap_comm": overlap})
            for zero in ({}, UNITS, HOST)
            for overlap in (False, True)
        )
    ),
)
def test_weights_of_autocast_are_read_in_fp32(ranks: Any, tmp_path: Path, names: Sequence[str], zero: Any) -> None:
    for name, apart in ranks(4).each(autocast_case, names, str(tmp_path), zero):
        if name == "3":  # parameters that stay gathered are rounded: of the last module, and persistent ones
            del apart["backward 0"], apart["backward 1"], apart["evaluation"]
        wrong = {reader: distance for reader, distance in apart.items() if distance}
        assert {"new", "step 1", "export"} <= apart.keys() and not wrong, (name, wrong)


def autocast_case(name: str, folder: str, zero: Any) -> dict[str, float]:
    """Return for each reader its distance from the optimizer's weights; infinite if it does not return fp32."""
    save = {"stage3_gather_16bit_weights_on_model_save": True}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    job = Job(empty=False, zero={**SEVERAL_BUCKETS, **save}, config=autocast)

    def compare(read: dict[str, torch.Tensor] | None) -> float:
        """Compare values with the optimizer's weights; collective; None on ranks that receive none."""
        masters = {key: safe_get_full_fp32_param(param) for key, param in model.named_parameters()}
        values = masters if read is None else read
        right = all(value.dtype == torch.float32 for value in values.values())
        return max((values[key] - masters[key]).abs().max().item() for key in masters) if right else torch.inf

    def gathered(modifier: int | None = None) -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=modifier):
            return {key: param.detach().clone() for key, param in model.named_parameters()}

    keys = {key: value for key, value in zero.items() if name != "3" or key not in UNITS}
    engine, model = training.make_engine(job, placed(name, **keys))
    data, apart = training.batches(job), {"new": compare(gathered(modifier=0))}
    for number in range(2):
        training.micro_step(engine, job, number, *next(data))
        apart[f"backward {number}"] = compare(gathered())
        engine.step()
        apart[f"step {number}"] = compare(gathered(modifier=0))
    engine.eval()
    with torch.no_grad():
        engine(next(data)[0])
    apart["evaluation"] = compare(gathered())
    apart["state dict"] = compare(engine._zero3_consolidated_16bit_state_dict())
    engine.save_16bit_model(folder, f"{name}.bin")
    deepspeed_ext.export_weights(engine, f"{folder}/{name}")
    dist.barrier()
    apart["16 bits"] = compare(torch.load(f"{folder}/{name}.bin"))
    apart["export"] = compare(load_file(f"{folder}/{name}/model.safetensors"))
    return apart
