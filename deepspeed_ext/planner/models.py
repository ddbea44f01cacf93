# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Counts a model's bytes, layers and FLOPs for the planner."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import nn

from deepspeed_ext.leaf.modules import LeafKind, Settings, choose, default_settings, numel_of
from deepspeed_ext.model_bytes import (
    count_states,
    dense_parameters,
    experts_by_size,
    muon_parameters,
    parameter_nbytes,
)
from deepspeed_ext.planner.memory import BUCKET, Model, Part
from deepspeed_ext.strategy import Placement, full_bucket
from deepspeed_ext.zero.matrices import matrices_of
from deepspeed_ext.zero.module_placements import placed_parameters

MAX_LIVE = 10**9  # elements; DeepSpeed's default stage3_max_live_parameters
MAX_TOKENS = 2048  # maximum tokens of a sample: most models have longer contexts than they are trained on


def describe(
    model: nn.Module,
    parameter_bytes: int | None = None,
    gradient_bytes: int | None = None,
    accumulation: int = 1,
    bucket: int = BUCKET,
    units: Settings | None = None,
) -> Model:
    """Count the bytes of a model, which may be on any device, even meta, and may be sharded by ``zero.Init``.

    Args:
        model: the model to train.
        parameter_bytes: bytes of a parameter in forward and backward; by default those of its dtype.
        gradient_bytes: bytes of a gradient; by default those of a parameter.
        accumulation: micro-steps per step.
        bucket: maximum elements of a bucket of gradients; see ``full_bucket``.
        units: criteria of units with p = I or G; by default those without a key.

    Raises:
        ValueError: the model has no parameters.
    """
    first = next((p for p in model.parameters() if p.requires_grad), next(model.parameters(), None))
    if first is None:
        raise ValueError(f"expected a model with parameters, got a {type(model).__name__} without.")
    width = gradient_bytes or parameter_bytes or first.element_size()
    units = units or default_settings(model, MAX_LIVE)
    fetches, largest_layer = _count_fetches(model, units, parameter_bytes)
    states = count_states(dense_parameters(model), parameter_bytes, width)

    def part(size: int, params: list[nn.Parameter], fetches: int) -> Part:
        matrices = float(width * sum(map(numel_of, muon_parameters(params))))
        shared = _shared_bytes(model, units, parameter_bytes, params)
        return Part(size, count_states(params, parameter_bytes, width), None, fetches, matrices, shared)

    experts = tuple(
        part(size, params, len(list(_layers_with(model, params)))) for size, params in experts_by_size(model).items()
    )
    placed = {}
    for placement in (Placement.N, Placement.I):
        if params := placed_parameters(model, placement):
            other_fetches, largest_other = _count_fetches(model, units, parameter_bytes, params)
            placed[placement] = part(1, params, fetches - other_fetches)
            largest_layer = largest_other if placement == Placement.N else largest_layer  # others are gathered
    elements = round((states.gradients + sum(family.states.gradients for family in experts)) / width)
    return Model(
        states,
        width,
        accumulation,
        fetches=fetches,
        largest_layer=largest_layer,
        shared=_shared_bytes(model, units, parameter_bytes, dense_parameters(model)),
        without_units=_count_fetches(model, replace(units, budget=None), parameter_bytes),
        bucket=full_bucket(bucket, elements),
        matrices=float(width * sum(map(numel_of, muon_parameters(dense_parameters(model))))),
        experts=experts,
        placed=placed,
    )


def mark_matrices(model: nn.Module) -> None:
    """Mark the parameters that Muon trains (``use_muon``), as ``deepspeed.initialize`` does if Muon is configured."""
    import deepspeed

    deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)


def orthogonalizing_flops(model: nn.Module, method: str) -> float:
    """Return the FLOPs of orthogonalizing all of Muon's matrices once with an ``ns_method``."""
    return sum(
        matrix.flops
        for param in muon_parameters(model.parameters())
        for matrix in matrices_of(
            getattr(param, "ds_shape", param.shape), getattr(param, "muon_num_heads", None), method, float("inf")
        )
    )


def micro_step_flops(model: nn.Module, samples: int) -> float:
    """Estimate the FLOPs of forward and backward of a micro-step; the estimate tends to be too low.

    Each token and parameter counts 2 in forward and 2 in backward, and 2 more if the parameter is trained. Of the
    experts, only those that a token is sent to are counted. Embeddings, attention and recomputation are not counted.
    Models other than language models of ``transformers`` have one token per sample.
    """
    config = _language_model(model)
    share = _experts_used(config)
    ranks = {id(param): size for size, params in experts_by_size(model).items() for param in params}
    flops_per_token, seen = 0.0, set()
    for name, module in model.named_modules():
        for parameter in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
            if id(parameter) not in seen:  # shared parameters count once
                # With expert parallelism over E ranks, a rank has 1/E of the experts, but the tokens of E ranks.
                of_experts = share * ranks.get(id(parameter), 1) if "experts" in name.split(".") else 1.0
                elements = numel_of(parameter) * of_experts
                flops_per_token += elements * (6 if parameter.requires_grad else 4)
                seen.add(id(parameter))
    return samples * _tokens(config) * flops_per_token


def _language_model(model: nn.Module) -> Any:
    """Return the text configuration of a model of ``transformers``; None for other models."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def _tokens(config: Any) -> int:
    lengths = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return min(next((length for length in lengths if isinstance(length, int)), 1), MAX_TOKENS)


def _experts_used(config: Any) -> float:
    """Return the fraction of experts that a token is sent to."""
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    total = next((count for count in counts if isinstance(count, int)), None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / total if total and isinstance(used, int) else 1.0


def _layers_with(model: nn.Module, owned_params: list[nn.Parameter]) -> Iterator[nn.Module]:
    """Return the modules that directly own one of these parameters."""
    param_ids = set(map(id, owned_params))
    return (module for module in model.modules() if any(id(p) in param_ids for p in module.parameters(recurse=False)))


def _count_fetches(
    model: nn.Module, units: Settings, parameter_bytes: int | None, without: Sequence[nn.Parameter] = ()
) -> tuple[int, float]:
    """Return how many fetches have dense parameters, and the bytes of the largest fetch, with a unit's gradients.

    Args:
        without: parameters that are not fetched.
    """
    left_out = set(map(id, without))
    dense_ids = {id(param) for param in dense_parameters(model)} - left_out
    layers = [([p for p in layer if id(p) not in left_out], is_unit) for layer, is_unit in _fetches(model, units)]
    return max(1, sum(any(id(param) in dense_ids for param in layer) for layer, _ in layers)), max(
        parameter_nbytes(layer, parameter_bytes)
        + is_unit * parameter_nbytes([param for param in layer if param.requires_grad], parameter_bytes)
        for layer, is_unit in layers
    )


def _shared_bytes(
    model: nn.Module, units: Settings, parameter_bytes: int | None, params: Sequence[nn.Parameter]
) -> float:
    """Return the bytes of these parameters that another fetch gathers again."""
    first = {id(param): param for param in params}
    fetched = [param for layer, _ in _fetches(model, units) for param in layer if id(param) in first]
    return parameter_nbytes(fetched, parameter_bytes) - parameter_nbytes(list(first.values()), parameter_bytes)


def _fetches(model: nn.Module, units: Settings) -> Iterator[tuple[list[nn.Parameter], bool]]:
    """Yield parameters that are gathered together, and whether they are a unit: units, and modules' own parameters."""
    for choice in choose(model, units):
        for chunk in choice.chunks:
            yield [param for expert in chunk for param in expert.parameters()], True
        is_unit = choice.kind == LeafKind.UNIT
        params = [] if choice.kind == LeafKind.INSIDE else list(choice.module.parameters(recurse=is_unit))
        if params:
            yield params, is_unit
