# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters with p = I or G: how they are made, held and given back."""

from typing import Any

import pytest

from tests.harness import training
from tests.harness.training import PARTITIONED, SMALL, Job, check, placed


@pytest.mark.parametrize("zero_init", ["plain", "config"])
def test_models_built_in_pieces_train_alike(ranks: Any, zero_init: str) -> None:
    check(ranks(4).run(zero_init_case, zero_init)[0])


def zero_init_case(zero_init: str) -> list[training.Difference]:
    """A model that zero.Init cuts while it is built, against stock on one that was built whole."""
    import dataclasses

    job = Job(groups=2, frozen=(1,), steps=2, empty=False, zero=SMALL)
    stock = training.train(job, {"stage": 2})
    pieces = dataclasses.replace(job, zero_init=zero_init)
    kind = "Stage3Optimizer"
    return [training.difference(name, training.train(pieces, placed(name)), stock, kind) for name in PARTITIONED]


def test_an_engine_that_is_destroyed_drops_what_it_has_accumulated(ranks: Any) -> None:
    assert ranks(2).run(destroyed_case) == [[(True, False)] * 2] * 2


def destroyed_case() -> list[tuple[bool, bool]]:
    """Whether gradients are held before and after the end of an engine within an accumulation."""
    job, rows = Job(empty=False, accumulation=2, zero=SMALL), []
    for name in ("GGG", "IGG"):
        engine, _ = training.make_engine(job, placed(name))
        training.micro_step(engine, job, 0, *next(training.batches(job)))
        gradients = engine.optimizer.gradients["dense"]
        before = gradients.begun
        engine.destroy()
        rows.append((before, gradients.begun))
    return rows


@pytest.mark.parametrize("name", ["NIG", "IIG", "GGG"])
def test_nothing_is_left_of_an_engine_that_is_destroyed(ranks: Any, name: str) -> None:
    assert ranks(2).run(left_case, name) == [[]] * 2


def left_case(name: str) -> list[str]:
    """What is left of an engine, while another one goes on."""
    import gc
    import weakref

    job = Job(empty=False, optimizer="Adam", zero=SMALL)
    one, other = (training.make_engine(job, placed(name))[0] for _ in range(2))
    data = training.batches(job)
    for number, engine in enumerate((one, other) * 3):
        training.micro_step(engine, job, number, *next(data))
        engine.step()
    left = {kind: weakref.ref(of) for kind, of in {"engine": one, "model": one.module, "os": one.optimizer}.items()}
    one.destroy()
    del one, engine
    gc.collect()
    training.micro_step(other, job, 6, *next(data))
    other.step()
    return [kind for kind, of in left.items() if of() is not None]


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
    for number, name in enumerate(("III", "GGG", "IIG", 3, "IGG", "III", 3)):
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
        for name in ("ING", "III", "IIG", "GIG", "GGG"):
            engine, model = training.make_engine(job, placed(name, group))
            data = training.batches(job)
            views = held = True
            for number in range(4):
                training.micro_step(engine, job, number, *next(data))
                engine.step()
                views &= all(is_view(engine.optimizer, p) for p in model.parameters())
            engine.optimizer.drain_parameters()
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
    held = optimizer.slices["dense"].held(param)
    own = optimizer.topology.sizes.groups > 1 and len(held) > 1
    row = held[optimizer.families["dense"].reduce.row if own else 0]
    same: bool = row.data_ptr() == param.ds_tensor.data_ptr()
    if param.requires_grad:
        buffer = optimizer.lp_param_buffer.untyped_storage().data_ptr()
        same = same and all(row.untyped_storage().data_ptr() == buffer for row in held)
    return same


def chunks_held(optimizer: Any, param: Any) -> list[tuple[int, Any]]:
    """(number of the chunk, its tensor) of what this rank holds of a parameter."""
    held = optimizer.slices["dense"].held(param)
    if len(held) == 1:
        return [(param.ds_zero_partition_rank, held[0])]
    cluster = optimizer.topology.sizes
    return [(j * cluster.group_size + optimizer.families["dense"].reduce.col, row) for j, row in enumerate(held)]


def whole_with_padding(param: Any) -> Any:
    """1D: the parameter, gathered, with zeros after its end."""
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
