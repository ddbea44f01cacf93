# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters with p = I or G: made, read, changed, saved and given back as DeepSpeed's own are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networks
import pytest
import training
from networks import SQUARE
from training import PARTITIONED, Job, check

SMALL = {
    "reduce_bucket_size": 300,
    "allgather_bucket_size": 300,
    "sub_group_size": 100,
    "stage3_param_persistence_threshold": 0,
}


def placed(name: str, **more: Any) -> dict[str, Any]:
    """Keys of a strategy."""
    return {"paro_strategy": name, "paro_group_size": 2, **more}


@pytest.mark.parametrize("zero_init", ["plain", "config"])
def test_models_built_in_pieces_train_alike(ranks: Any, zero_init: str) -> None:
    check(ranks(4).run(zero_init_case, zero_init)[0])


def zero_init_case(zero_init: str) -> list[training.Difference]:
    """A model that zero.Init cuts while it is built, against stock on one that was built whole."""
    import dataclasses

    job = Job(groups=2, frozen=(1,), steps=2, empty=False, zero=SMALL)
    stock = training.train(job, {"stage": 2})
    pieces = dataclasses.replace(job, zero_init=zero_init)
    kind = "PartitionedOptimizer"
    return [training.difference(name, training.train(pieces, placed(name)), stock, kind) for name in PARTITIONED]


def test_one_strategy_after_the_other_on_one_model(ranks: Any) -> None:
    for rank_rows in ranks(4).run(handover_case):
        for name, lost, difference, equal in rank_rows:
            assert lost == 0.0, f"{name} got other weights than the last one left"
            assert difference <= 1e-5 and equal, (name, difference, equal)


def handover_case() -> list[tuple[str, float, float, bool]]:
    """Train one model with every strategy in turn and with stock stage 3, each time against stock stage 2.

    Returns:
        For each the change of weights that initialization made, their distance to stock's afterwards, and whether
        all ranks have the same.
    """
    import deepspeed
    import torch

    torch.manual_seed(7)
    job = Job(empty=False, frozen=(1,), accumulation=2, zero=SMALL)
    model, oracle = (training.Network(job.sizes, empty=False) for _ in range(2))
    data = training.batches(job)
    rows = []
    for number, name in enumerate(("III", "GGG", "IIG", "INI", "ING", "GNG", 3, "IGG", "GIG", "III", 3)):
        section = placed(name) if isinstance(name, str) else {"stage": name}
        section["stage3_param_persistence_threshold"] = number % 2 * 10**6  # none or all stay gathered
        before = training.whole_weights(model)
        torch.nn.utils.vector_to_parameters(before, oracle.parameters())
        batches = [next(data) for _ in range(4)]
        weights = []
        for module, keys in ((model, section), (oracle, {"stage": 2})):
            engine, *_ = deepspeed.initialize(
                model=module,
                model_parameters=training.parameter_groups(module, job),
                config=training.configuration(job, keys),
            )
            if module is model:
                lost = (training.whole_weights(model) - before).abs().max().item()
            for index, (x, y) in enumerate(batches):
                training.micro_step(engine, job, index, x, y)
                engine.step()
            engine.destroy()
            weights.append(training.whole_weights(module))
        gap = ((weights[0] - weights[1]).abs().max() / weights[1].abs().max()).item()
        rows.append((str(name), lost, gap, training.replicas_equal(weights[0])))
    return rows


def test_engines_side_by_side(ranks: Any) -> None:
    assert ranks(4).run(side_by_side_case) == [[0.0, 0.0]] * 4


def side_by_side_case() -> list[float]:
    """What it changes for two engines that the other one trains as well, in turn."""
    import torch

    job = Job(accumulation=2, zero=SMALL)

    def run(names: list[str]) -> list[torch.Tensor]:
        made = [(*training.make_engine(job, placed(name)), training.batches(job)) for name in names]
        for number in range(4):
            for engine, _, data in made:
                training.micro_step(engine, job, number, *next(data))
            for engine, *_ in made:
                engine.step()
        weights = [training.whole_weights(model) for _, model, _ in made]
        for engine, *_ in made:
            engine.destroy()
        return weights

    names = ["IIG", "III"]
    return [
        (both - alone).abs().max().item()
        for both, alone in zip(run(names), run(names[:1]) + run(names[1:]), strict=True)
    ]


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
    for rank_rows in ranks(4).run(evaluation_case, strategies, threshold, alone, timeout=30.0):
        for name, seen, left in rank_rows:
            assert seen == 0.0 and left == 0.0, (name, seen, left)


def evaluation_case(strategies: Sequence[str], threshold: int, alone: bool) -> list[tuple[str, float, float]]:
    """Forwards between all micro-steps: distance of outputs to those of a whole model, and what they change.

    Args:
        alone: only the first group evaluates.
    """
    import torch
    from deepspeed import comm as dist

    zero = {**SMALL, "stage3_param_persistence_threshold": threshold}
    job = Job(sizes=SQUARE, network=networks.Shared, accumulation=2, empty=False, zero=zero)
    rows = []
    for name in strategies:
        weights, seen = [], 0.0
        for look in (False, not alone or dist.get_rank() < 2):
            engine, model = training.make_engine(job, placed(name))
            whole = networks.Shared(SQUARE, empty=False)
            data, probe = training.batches(job), torch.ones(3, SQUARE[0])
            for number in range(4):
                training.micro_step(engine, job, number, *next(data))
                engine.step()
                if look:
                    engine.eval()
                    with torch.no_grad():
                        outputs = [engine(probe * i) for i in range(1, 4)]
                        torch.nn.utils.vector_to_parameters(training.whole_weights(model), whole.parameters())
                        for i, output in enumerate(outputs, 1):
                            seen = max(seen, (output - whole(probe * i)).abs().max().item())
                    engine.train()
            weights.append(training.whole_weights(model))
            engine.destroy()
        rows.append((name, seen, (weights[0] - weights[1]).abs().max().item()))
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

    from deepspeed_ext.zero.coordinator import _comparing_within, assert_same_in_group

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


def test_padding_stays_zero_and_chunks_stay_views(ranks: Any) -> None:
    answers = ranks(6).run(padding_case, 2)
    assert sum(sum(padded for _, padded, *_ in rows) for rows in answers) > 0  # else this shows nothing
    for rows in answers:
        for name, _, largest, views, held in rows:
            assert largest == 0.0 and views and held, (name, largest, views, held)


def padding_case(group: int) -> list[tuple[str, int, float, bool, bool]]:
    """Padding after training where all memory is NaN at first and AdamW changes what is not zero.

    Returns:
        For each strategy: elements of padding, the largest absolute value in it, whether this rank's chunks and the
        optimizer's flat partitions are views, and whether rows hold what belongs there.
    """
    import torch

    config = {"optimizer": {"params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "torch_adam": True}}}
    job = Job(optimizer="AdamW", frozen=(1,), accumulation=2, empty=False, config=config, zero=SMALL)
    rows = []
    torch.use_deterministic_algorithms(True)
    try:
        for name in PARTITIONED:
            zero = {"paro_strategy": name, "paro_group_size": group}
            engine, model = training.make_engine(job, zero)
            data = training.batches(job)
            views = held = True
            for number in range(4):
                training.micro_step(engine, job, number, *next(data))
                engine.step()
                views &= all(is_view(engine.optimizer, p) for p in model.parameters())
            engine.optimizer.parameters.drain()
            padding = []
            for param in model.parameters():
                with_padding = whole_with_padding(param)
                for index, row in chunks_held(engine.optimizer, param):
                    chunk = row.numel()
                    real = max(0, min(chunk, param.ds_numel - index * chunk))
                    padding.append(row[real:].float())
                    held &= torch.equal(row, with_padding[index * chunk : (index + 1) * chunk])
            padding += masters_padding(engine.optimizer)
            flat = torch.cat(padding)
            rows.append((name, flat.numel(), flat.abs().max().item() if flat.numel() else 0.0, views, held))
            engine.destroy()
    finally:
        torch.use_deterministic_algorithms(False)
    return rows


def is_view(optimizer: Any, param: Any) -> bool:
    """Whether ``ds_tensor`` is the row of this rank's group, in the optimizer's buffer if the parameter is trained."""
    held = optimizer.parameters._held(param)
    own = optimizer.topology.cluster.groups > 1 and len(held) > 1
    row = held[optimizer._moves.inter.rank if own else 0]
    same: bool = row.data_ptr() == param.ds_tensor.data_ptr()
    if param.requires_grad:
        buffer = optimizer.lp_param_buffer.untyped_storage().data_ptr()
        same = same and all(row.untyped_storage().data_ptr() == buffer for row in held)
    return same


def chunks_held(optimizer: Any, param: Any) -> list[tuple[int, Any]]:
    """(number of the chunk, its tensor) of what this rank holds of a parameter."""
    held = optimizer.parameters._held(param)
    if len(held) == 1:
        return [(param.ds_zero_partition_rank, held[0])]
    cluster = optimizer.topology.cluster
    return [(j * cluster.group_size + optimizer._moves.intra.rank, row) for j, row in enumerate(held)]


def whole_with_padding(param: Any) -> Any:
    """1D: the parameter, gathered, with zeros behind its end."""
    import deepspeed
    import torch

    with deepspeed.zero.GatheredParameters([param]):
        flat = param.detach().flatten().clone()
    missing = param.ds_tensor.ds_numel * param.ds_zero_partition_world_size - param.ds_numel
    return torch.nn.functional.pad(flat, (0, missing))


def masters_padding(optimizer: Any) -> list[Any]:
    """Padding of fp32 weights and of Adam's states."""
    found = []
    for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        state = optimizer.optimizer.state[master]
        for tensor in (master.detach(), state["exp_avg"], state["exp_avg_sq"]):
            offset = 0
            for param in group:
                chunk = param.ds_tensor.ds_numel
                real = max(0, min(chunk, param.ds_numel - param.ds_zero_partition_rank * chunk))
                found.append(tensor[offset + real : offset + chunk])
                offset += chunk
    return found


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
