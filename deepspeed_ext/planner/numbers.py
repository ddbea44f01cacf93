# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicts one strategy from plain numbers, without a model or a cluster at hand. Pure."""

from dataclasses import replace

from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.planner.costs import PLAIN, Prediction, predict, predict_plain_stage
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import Latencies, Rates
from deepspeed_ext.strategy import GroupSizes, parse_strategy

_STAGES = {name: letters for letters, name in PLAIN.items()}


def predict_numbers(
    name: str,
    *,
    nodes: int,
    ranks_per_node: int,
    intra_gbps: float,
    inter_gbps: float,
    parameters: int,
    trainable: int | None = None,
    width: int = 2,
    group_size: int | None = None,
    micro_batches: int = 1,
    compute: float = 0.0,
    gradient_bits: int | None = None,
    update_bits: int | str | None = None,
    latencies: Latencies | None = None,
    overlap_updates: bool = False,
) -> Prediction:
    """Predict what a strategy or a plain stage costs each rank; as ``plan`` does.

    Args:
        name: three letters, or a plain stage: DDP, ZeRO-1, ZeRO-2, ZeRO-3.
        nodes, ranks_per_node: the cluster.
        intra_gbps: Gbit/s that a rank receives from ranks of its node.
        inter_gbps: Gbit/s that a node receives from others.
        parameters, trainable: numbers of parameters, and of those trained; None for all.
        width: bytes of a parameter and of a gradient; each micro-batch communicates parameters * width and
            trainable * width bytes, over hops that the strategy says.
        group_size: ranks of a group; None for those of a node.
        micro_batches: of a step.
        compute: seconds of forward and backward of a micro-batch without communication.
        gradient_bits: ``bits`` of LoCo; None if gradients are not quantized.
        update_bits: ``bits`` of updates between groups; None if they are not quantized.
        latencies: of messages; None for NCCL's.
        overlap_updates: ``paro_overlap_updates``.

    Raises:
        ValueError: there is no such strategy, it does not allow quantized updates, or groups do not divide the ranks.
    """
    sizes = GroupSizes(nodes * ranks_per_node, group_size or ranks_per_node)
    rates = Rates.of_links(
        sizes, ranks_per_node, intra_gbps, inter_gbps, latencies or Latencies.of(sizes, ranks_per_node)
    )
    model = Model.of_size(parameters, trainable, width=width)
    model = replace(model, accumulation=micro_batches, compute=compute, overlap_updates=overlap_updates)
    if name in _STAGES:
        return predict_plain_stage(_STAGES[name], sizes, model, rates)
    strategy = parse_strategy(name)
    sent = Compression(
        None if gradient_bits is None else LocoSettings.parse({"bits": gradient_bits}),
        None if update_bits is None else UpdateSettings.parse({"bits": update_bits}),
    )
    if not sent.allows(strategy):
        raise ValueError(f"{name} does not allow updates in {update_bits} bits.")
    return predict(strategy, sizes, model, rates, sent)
