# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A reference of outer optimizers in one process: a copy of the model for each group, and an outer step of ten lines.
Everything here runs inside rank processes, of which each computes all groups."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import Tensor

from tests.harness import training
from tests.harness.training import Job, Network

KEY = "paro_outer_optimizer"
DEFAULTS = {"steps": 30, "lr": 0.7, "momentum": 0.9, "nesterov": True, "warmup_steps": 0, "delay": 0}


class Apart(NamedTuple):
    """A run with an outer optimizer."""

    losses: list[float]  # losses of this rank
    weights: Tensor  # weights of this rank's group, 1D, all parameters
    anchors: Tensor  # the result of the last outer step, 1D, all trained parameters; of this rank's slice in ours
    measures: list[dict[str, float]]  # those of each outer step that the monitor gets


def train_oracle(job: Job, outer: dict[str, Any], group_size: int, offsets: Sequence[Tensor] | None = None) -> Apart:
    """Train a copy for each group, of SGD or AdamW. A group skips a step in which one of its ranks overflows, all
    groups in fp16. ``offsets`` say of each trained parameter when its elements leave; by default after H steps."""
    settings = {**DEFAULTS, **outer}
    n, rank = dist.get_world_size(), dist.get_rank()
    copies = [_copy(job) for _ in range(n // group_size)]
    data = [training_batches(job, item) for item in range(n)]
    trained = [[p for p in model.parameters() if p.requires_grad and p.numel()] for model, _ in copies]
    anchors = [p.detach().clone() for p in trained[0]]
    momenta = [torch.zeros_like(anchor) for anchor in anchors]
    offsets = offsets or [torch.zeros(anchor.shape) for anchor in anchors]
    due: dict[int, list[tuple[int, Tensor]]] = {}
    losses, measures = [], list[dict[str, float]]()
    for step in range(1, job.steps + 1):
        batches = [[next(of) for _ in range(job.accumulation)] for of in data]
        of_warmup = step <= settings["warmup_steps"]
        for group, (model, _) in enumerate(copies):
            for param in trained[group]:  # ZeRO steps all elements of a shard
                param.grad = torch.zeros_like(param)
            for item in range(n):
                if of_warmup or item // group_size == group:
                    results = _backward(model, job, step, batches[item], n if of_warmup else group_size)
                    losses += results if item == rank and group == rank // group_size else []
            torch.nn.utils.clip_grad_norm_(trained[group], job.clipping or torch.inf)
        skipping = {rank // group_size for at, rank in job.overflow if at // job.accumulation == step - 1}
        for group, (_, optimizer) in enumerate(copies):
            if group not in skipping and not (skipping and job.dtype == "fp16"):
                optimizer.step()
        if of_warmup:
            anchors = [p.detach().clone() for p in trained[0]]
            continue
        for number, mask in due.pop(step, []):
            for subset in trained:
                subset[number].data[mask] = anchors[number][mask]
        squares = torch.zeros(2)
        for number, (anchor, momentum) in enumerate(zip(anchors, momenta, strict=True)):
            mask = offsets[number] == (step - settings["warmup_steps"]) % settings["steps"]
            changes = torch.stack([anchor - subset[number].detach() for subset in trained])[:, mask]
            change = changes.mean(0)
            squares += torch.stack([change.square().sum(), (changes - change).square().sum() / len(trained)])
            momentum[mask] = settings["momentum"] * momentum[mask] + change
            ahead = change + settings["momentum"] * momentum[mask] if settings["nesterov"] else momentum[mask]
            anchor[mask] -= settings["lr"] * ahead
            if settings["delay"]:
                due.setdefault(step + settings["delay"], []).append((number, mask))
            else:
                for subset in trained:
                    subset[number].data[mask] = anchor[mask]
        if squares[0]:
            measures.append(dict(zip(("gradient_norm", "distance_of_groups"), squares.sqrt().tolist(), strict=True)))
    own, anchored = copies[rank // group_size][0], torch.cat([tensor.flatten() for tensor in anchors])
    return Apart(losses, torch.cat([p.detach().flatten() for p in own.parameters()]), anchored, measures)


def _copy(job: Job) -> tuple[Network, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = (job.network or Network)(job.sizes, job.checkpointing, job.empty)
    groups = training.parameter_groups(model, job)
    if job.optimizer == "SGD":
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def training_batches(job: Job, rank: int) -> Any:
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        yield tuple(torch.randn(2, size, generator=generator) for size in (job.sizes[0], job.sizes[-1]))


def _backward(model: Network, job: Job, step: int, batches: Sequence[Any], ranks: int) -> list[float]:
    losses = []
    for number, (x, y) in enumerate(batches, (step - 1) * job.accumulation):
        skipped = [layer for at, layer in job.skipped if at == number]
        loss = ((model(x, skipped) - y) ** 2).mean()
        if loss.requires_grad:
            (loss / job.accumulation / ranks).backward()
        losses.append(loss.item())
    return losses


class Found(NamedTuple):
    """The comparison of our run with the oracle."""

    strategy: str
    weights: float  # largest difference of the group's weights, relative to the largest weight
    losses: float  # largest difference
    measures: float  # largest difference of an outer step's measures, relative to the norm of the outer gradient
    anchors: bool  # whether they are the same bits in all groups
    together: bool  # whether all ranks of a group have the same bits of parameters


def beside(names: Sequence[str], job: Job, outer: dict[str, Any], group_size: int) -> list[Found]:
    """Train strategies with an outer optimizer, and compare them with ``expected``."""
    rows = []
    for name in names:
        engine, model = training.make_engine(job, training.placed(name, group_size, **{KEY: outer}))
        data, losses, measures = training.batches(job), [], list[dict[str, float]]()
        engine.optimizer.outer._report = measures.append
        for number in range(job.steps * job.accumulation):
            losses.append(training.step(engine, job, number, data))
        weights = training.whole_weights(model)
        own = engine.optimizer.outer
        own.receive_fragments()
        offsets = _offsets(engine, model)
        anchors = torch.cat([fragment.anchor.flatten() for fragment in own.fragments])
        is_same = training.replicas_equal(anchors, own.topology.inter)
        together = training.replicas_equal(weights, own.topology.intra)
        engine.destroy()
        oracle = train_oracle(job, outer, group_size, offsets)
        apart = ((weights.cpu() - oracle.weights).abs().max() / oracle.weights.abs().max()).item()
        of_losses = max(abs(a - b) for a, b in zip(losses, oracle.losses, strict=True))
        assert 0 <= len(oracle.measures) - len(measures) <= bool(outer.get("delay")), (measures, oracle.measures)
        of_measures = max(
            abs(measure[key] - other[key]) / other["gradient_norm"]
            for measure, other in zip(measures, oracle.measures, strict=False)
            for key in measure
        )
        rows.append(Found(name, apart, of_losses, of_measures, is_same, together))
    return rows


def _offsets(engine: Any, model: Network) -> list[Tensor]:
    """When the elements of each trained parameter leave."""
    optimizer, results = engine.optimizer, []
    own: list[tuple[str, int, int, int]] = []
    names = {id(p): name for name, p in model.named_parameters()}
    for shard in optimizer.flat_shards():
        for member in shard.members:
            for fragment in (item for item in optimizer.outer.fragments if item.number == shard.number):
                both = member.in_shard.common(fragment.span)
                if both.numel:
                    start = member.span.start + both.start - member.offset
                    own.append((names[id(member.param)], start, both.numel, fragment.offset))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    for name, param in model.named_parameters():
        numel, shape = getattr(param, "ds_numel", param.numel()), getattr(param, "ds_shape", param.shape)
        if not (param.requires_grad and numel):
            continue
        offsets = torch.full((numel,), -1)
        for other, start, count, offset in (row for rows in everybody for row in rows):
            if other == name:
                offsets[start : min(numel, start + count)] = offset
        assert (offsets >= 0).all(), name
        results.append(offsets.view(shape))
    return results
