# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters with p = I or G are read, changed, saved and used as DeepSpeed's own are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import networks, training
from tests.harness.networks import SQUARE
from tests.harness.tiers import deep
from tests.harness.training import PARTITIONED, SMALL, Job, placed


@pytest.mark.parametrize("modifier, dtype", [(0, "bf16"), (3, "fp32")])  # 3 is in the other group
def test_what_one_rank_modifies_all_ranks_see(ranks: Any, modifier: int, dtype: str) -> None:
    answers = ranks(4).run(modify_case, modifier, dtype)
    assert answers[0] == [(name, True, True, True, True) for name in PARTITIONED]
    assert all(answer == answers[0] for answer in answers)


def modify_case(modifier: int, dtype: str) -> list[tuple[str, bool, bool, bool, bool]]:
    """Whether parameters read right, a change is seen everywhere, and lasts or not as with stock after one more step.

    What GatheredParameters changes does not reach the fp32 weights of the optimizer, so a step undoes it in stock too.
    """
    import deepspeed
    import torch
    from deepspeed import comm as dist

    job = Job(dtype=dtype, frozen=(1,), empty=False, zero=SMALL)

    def run(zero: dict[str, Any]) -> tuple[list[torch.Tensor], bool]:
        engine, model = training.make_engine(job, zero)
        data = training.batches(job)
        for _ in range(2):
            training.micro_step(engine, job, 0, *next(data))
            engine.step()
        seen = [training.whole_weights(model)]
        expected = training.Network(job.sizes, empty=False).to(training.DTYPES[dtype])
        torch.nn.utils.vector_to_parameters(seen[0].to(training.DTYPES[dtype]), expected.parameters())
        layers = model.layers
        for which, layer in enumerate(layers):  # a parameter, a list, a generator; layer 1 is frozen
            params: Any = [layer.weight, [layer.weight], layer.parameters()][which]
            with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier), torch.no_grad():
                if dist.get_rank() == modifier:
                    layer.weight.mul_(1 + which).add_(0.25)
            with torch.no_grad():
                expected.layers[which].weight.mul_(1 + which).add_(0.25)
        seen.append(training.whole_weights(model))
        same = torch.equal(seen[1], torch.cat([p.detach().float().flatten() for p in expected.parameters()]))
        x, y = next(data)
        with torch.no_grad():  # the frozen layer's change counts
            same = same and torch.equal(engine(x), expected(x))
        training.micro_step(engine, job, 0, x, y)
        engine.step()
        seen.append(training.whole_weights(model))
        engine.destroy()
        return seen, same

    stock, _ = run({"stage": 3})
    rows = []
    for name in PARTITIONED:
        ours, changed = run(placed(name))
        alike = [
            training.replicas_equal(a) and bool((a - b).abs().max() <= (1e-5 if dtype == "fp32" else 1e-2))
            for a, b in zip(ours, stock, strict=True)
        ]
        rows.append((name, alike[0], changed, alike[1], alike[2]))
    return rows


@pytest.mark.parametrize(
    "strategies, threshold, alone",
    [
        (PARTITIONED, 0, False),
        (("III", "ING", "GIG"), 10**6, False),
        (("INI", "ING", "III", "IIG", "IGG"), 0, True),  # with p = I a group needs no other
    ],
)
def test_evaluation_sees_updates_at_once_and_changes_nothing(
    ranks: Any, strategies: Sequence[str], threshold: int, alone: bool
) -> None:
    for rank_rows in ranks(4).run(evaluation_case, strategies, threshold, alone):
        for name, seen, left in rank_rows:
            assert seen == 0.0 and left <= 1e-6, (name, seen, left)


def evaluation_case(strategies: Sequence[str], threshold: int, alone: bool) -> list[tuple[str, float, float]]:
    """Forwards between all micro-steps: distance of outputs to those of the fp32 weights, and what forwards change.

    Args:
        alone: only the first group evaluates; it compares to the gathered weights, for it cannot gather others.
    """
    import torch
    from deepspeed import comm as dist
    from deepspeed.utils import safe_get_full_fp32_param

    zero = {**SMALL, "stage3_param_persistence_threshold": threshold}
    job = Job(sizes=SQUARE, network=networks.Shared, accumulation=2, steps=2, empty=False, zero=zero)
    undisturbed = training.train(job, {"stage": 3}).weights
    whole = networks.Shared(SQUARE, empty=False)
    rows = []
    for name in strategies:
        engine, model = training.make_engine(job, placed(name))
        data, probe, seen = training.batches(job), torch.ones(3, SQUARE[0]), 0.0
        for number in range(4):
            training.micro_step(engine, job, number, *next(data))
            engine.step()
            if alone and dist.get_rank() >= 2:
                continue
            engine.eval()
            with torch.no_grad():
                outputs = [engine(probe * i) for i in range(1, 4)]
                weights = training.whole_weights(model)
                if not alone:
                    weights = torch.cat([safe_get_full_fp32_param(p).flatten() for p in model.parameters()])
                torch.nn.utils.vector_to_parameters(weights, whole.parameters())
                for i, output in enumerate(outputs, 1):
                    seen = max(seen, (output - whole(probe * i)).abs().max().item())
            engine.train()
        rows.append((name, seen, (training.whole_weights(model) - undisturbed).abs().max().item()))
        engine.destroy()
    return rows


def test_only_ranks_that_gather_together_compare_what_they_use(ranks: Any) -> None:
    answers = ranks(4).run(comparison_case)
    assert answers[:2] == ["True"] * 2
    assert all("[2, 3]" in answer and "leaf module" in answer for answer in answers[2:])


def comparison_case() -> str:
    """Records that are the same in the first group, and of one length in the second; the answer or the error."""
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.zero.sharded.coordinator import _comparing_within, assert_same_in_group

    engine, *_ = deepspeed.initialize(
        model=torch.nn.Linear(2, 2),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": placed("III")},
    )
    group = next(engine.module.parameters()).ds_process_group
    try:
        with _comparing_within(group):
            return str(assert_same_in_group([7, 7 + max(1, dist.get_rank())]))
    except RuntimeError as error:
        return str(error)


def test_16_bit_weights_are_saved_whole(ranks: Any, tmp_path: Path) -> None:
    assert ranks(4).run(save_case, str(tmp_path)) == [[(name, True) for name in PARTITIONED]] * 4


def save_case(folder: str) -> list[tuple[str, bool]]:
    """Whether the saved file has the weights that all ranks see, exactly."""
    import torch
    from deepspeed import comm as dist

    zero = {**SMALL, "stage3_gather_16bit_weights_on_model_save": True}
    job = Job(sizes=SQUARE, network=networks.Shared, frozen=(0,), accumulation=2, dtype="bf16", empty=False, zero=zero)
    rows = []
    for name in PARTITIONED:
        engine, model = training.make_engine(job, placed(name))
        data = training.batches(job)
        for number in range(3):  # in the middle of an accumulation
            training.micro_step(engine, job, number, *next(data))
            engine.step()
        assert engine.save_16bit_model(folder, f"{name}.bin")
        dist.barrier()
        saved = torch.load(f"{folder}/{name}.bin")
        whole = networks.Shared(SQUARE, empty=False).to(torch.bfloat16)
        whole.load_state_dict(saved)
        flat = torch.cat([p.detach().float().flatten() for p in whole.parameters()])
        rows.append((name, torch.equal(flat, training.whole_weights(model)) and flat.abs().sum().item() > 0))
        engine.destroy()
    return rows


@pytest.mark.parametrize("network", [networks.Shared, networks.External], ids=lambda network: network.__name__)
def test_inference_without_an_optimizer(ranks: Any, network: Any) -> None:
    assert ranks(4).run(inference_case, network) == [[(name, 0.0, True) for name in PARTITIONED]] * 4


def inference_case(network: Any) -> list[tuple[str, float, bool]]:
    """Distance of outputs to those of the plain model, and whether its parameters were cut."""
    import copy

    import deepspeed
    import torch

    torch.manual_seed(7)
    plain = network(SQUARE, empty=False)
    rows = []
    for name in PARTITIONED:
        model = copy.deepcopy(plain)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": placed(name, **SMALL)}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.eval()
        cut = all(p.numel() == 0 for p in model.parameters())
        with torch.no_grad():
            inputs = [torch.full((3, SQUARE[0]), i / 4) for i in range(3)]
            gap = max((engine(x) - plain(x)).abs().max().item() for x in inputs)
        rows.append((name, gap, cut))
        engine.destroy()
    return rows


LEAF_UNITS = {"stage3_leaf_bytes": 10**6}
HOST = {"offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    "names, zero",
    [
        (("3", "IIG", "GGG"), {"stage3_param_persistence_threshold": 0}),
        (("IIG",), {}),
        *deep(
            *(
                (("3", *PARTITIONED), {**zero, "stage3_param_persistence_threshold": most, "overlap_comm": overlap})
                for zero in ({}, LEAF_UNITS, HOST)
                for most in (0, 100, 10**6)
                for overlap in (False, True)
            )
        ),
    ],
)
def test_weights_of_autocast_are_read_in_fp32(ranks: Any, tmp_path: Path, names: Sequence[str], zero: Any) -> None:
    for rows in ranks(4).run(autocast_case, str(tmp_path), names, zero):
        for name, apart in rows:
            if name == "3":  # parameters that stay gathered are rounded: of the last module, and persistent ones
                del apart["backward 0"], apart["backward 1"], apart["evaluation"]
            wrong = {reader: distance for reader, distance in apart.items() if distance}
            assert {"new", "step 1", "export"} <= apart.keys() and not wrong, (name, wrong)


def autocast_case(folder: str, names: Sequence[str], zero: Any) -> list[tuple[str, dict[str, float]]]:
    """Of each: how far what its readers return is from the optimizer's weights; infinite if not in fp32."""
    import deepspeed
    import torch
    from deepspeed import comm as dist
    from deepspeed.utils import safe_get_full_fp32_param
    from safetensors.torch import load_file

    import deepspeed_ext

    save = {"stage3_gather_16bit_weights_on_model_save": True}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    job = Job(empty=False, zero={**training.SEVERAL_BUCKETS, **save}, config=autocast)

    def compare(read: dict[str, torch.Tensor] | None) -> float:
        """Collective; None on ranks that get none."""
        masters = {key: safe_get_full_fp32_param(param) for key, param in model.named_parameters()}
        found = masters if read is None else read
        right = all(value.dtype == torch.float32 for value in found.values())
        return max((found[key] - masters[key]).abs().max().item() for key in masters) if right else torch.inf

    def gathered(modifier: int | None = None) -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=modifier):
            return {key: param.detach().clone() for key, param in model.named_parameters()}

    rows = []
    for name in names:
        keys = {key: value for key, value in zero.items() if name != "3" or key not in LEAF_UNITS}
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
        rows.append((name, apart))
        engine.destroy()
    return rows
