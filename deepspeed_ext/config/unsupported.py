# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Table of engines, models and optimizers that our optimizers do not support.

Checks that only need the configuration are in ``refused.py``.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.config.keys import GROUP_SIZE, MICRO_BATCHES, MODULES, OUTER, SECTION, STRATEGY, WEIGHTS, our_keys
from deepspeed_ext.config.refused import any_strategy, replicates_parameters, shards_parameters
from deepspeed_ext.strategy import Strategy


@dataclass(frozen=True)
class Unsupported:
    """A type of engine, model or optimizer that a strategy does not support.

    Attributes:
        find: returns a true value if the engine or its argument is of this type.
        reason: clause for the message; ``{}`` is replaced by the value of ``find``.
        applies: whether it is refused with a strategy.
        advice: the remedy, or a function of the engine that returns it.
    """

    find: Callable[[Any, Any], Any]
    reason: str
    applies: Callable[[Strategy], bool] = any_strategy
    advice: str | Callable[[Any], str] = ""


def refuse_unsupported(rows: tuple[Unsupported, ...], strategy: Strategy, engine: Any, target: Any) -> None:
    """Refuse unsupported objects; the result is the same on all ranks.

    Args:
        target: the second argument of ``find``: an optimizer, a model, or a topology.

    Raises:
        ValueError: the strategy does not support the engine, the model or the optimizer.
    """
    for row in rows:
        details = row.applies(strategy) and row.find(engine, target)
        if details:
            advice = row.advice if isinstance(row.advice, str) else row.advice(engine)
            raise ValueError(
                f"{SECTION}.{STRATEGY} {strategy} is not supported here: {row.reason.format(details)}."
                f"{advice and f' {advice}.'}"
            )


def _sharded_experts_advice(engine: Any) -> str:
    keys = " and ".join(our_keys(engine._config._param_dict[SECTION]))
    # Without one of our keys this is a pipeline at stage 2 or 3; DeepSpeed's own pipelines end at stage 1.
    plain = f"Remove {keys}, and set {SECTION}.stage to 1 or 2" if keys else f"Set {SECTION}.stage to 1"
    return f"{plain}; strategies with p = N do not shard experts"


def _has_compiled_modules(model: Any) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # compiling a module imports it
    return dynamo is not None and any(isinstance(module, dynamo.OptimizedModule) for module in model.modules())


def _folding_across_tp_ranks(engine: Any) -> str:
    """Return AutoEP's folding of experts into tensor-parallel ranks if ranks with the same experts are then not
    data-parallel to each other; else empty."""
    spec: Any = getattr(engine, "_autoep_folding_spec", None)
    if spec is None or spec.tp_size == 1 or spec.ep_size % spec.tp_size == 0:
        return ""
    return f"{spec.tp_size} tensor-parallel ranks with autoep_size {spec.ep_size}"


def deepspeed_moe_layers(model: Any) -> dict[str, Any]:
    """Return a model's DeepSpeed MoE layers by name, without layers of AutoEP."""
    layer = sys.modules.get("deepspeed.moe.layer")  # imported if there is such a layer
    return (
        {}
        if layer is None
        else {name: module for name, module in model.named_modules() if isinstance(module, layer.MoE)}
    )


_MUON = "deepspeed.runtime.zero.muon.muon_optimizer"


def _unshardable_moe_layers(engine: Any) -> str:
    """Return why experts of DeepSpeed's MoE layers cannot be sharded; empty if they can, or there are none."""
    if not engine.has_moe_layers or not deepspeed_moe_layers(engine.module):
        return ""
    if engine.pipeline_parallelism:
        return "a pipeline saves the weights of each layer to a file, which cannot contain sharded experts"
    if engine.sequence_parallel_size > 1:
        return "ranks that share a sequence have different experts"
    if engine._has_autoep_layers():
        return "AutoEP layers, which DeepSpeed cannot save together"
    experts = [(name, param) for name, param in engine.module.named_parameters() if hasattr(param, "group_name")]
    frozen = [name for name, param in experts if not param.requires_grad]
    if frozen:
        return f"frozen experts, such as {frozen[0]}, are in no rank's shard"
    init = [name for name, param in experts if hasattr(param, "ds_tensor")]
    return (
        f"deepspeed.zero.Init has sharded experts, such as {init[0]}, over ranks with different experts"
        if init
        else ""
    )


def _own_steps_key(engine: Any) -> str:
    """Return the key with which groups run micro-batches of their own; empty without one."""
    keys = (OUTER, MICRO_BATCHES)
    return next((key for key in keys if getattr(engine._config.zero_config, key, None) is not None), "")


def _tokens_across_ranks(engine: Any) -> str:
    """Return why ranks share the tokens of a loss, if losses are weighted by tokens; else empty."""
    kinds = {"pipelines": engine.pipeline_parallelism, "experts": engine.has_moe_layers}
    kinds["sequence parallelism"] = engine.sequence_parallel_size > 1
    is_used = getattr(engine._config.zero_config, WEIGHTS, None) is not None
    return next((name for name, is_there in kinds.items() if is_used and is_there), "")


def _remove_own_steps_key(engine: Any) -> str:
    return f"Remove {_own_steps_key(engine)}"


def _sequences_across_groups(engine: Any, topology: Any) -> str:
    """Return how separately training groups split the ranks of one sequence; empty if they do not."""
    size = topology.sizes.group_size
    if not _own_steps_key(engine) or size % engine.sequence_parallel_size == 0:
        return ""
    return f"{engine.sequence_parallel_size} ranks share a sequence, and groups have {size}"


def _parameter_sharded_by_init(model: Any) -> str:
    """Return the first parameter that ``deepspeed.zero.Init`` has sharded; else empty."""
    return next((name for name, param in model.named_parameters() if hasattr(param, "ds_tensor")), "")


def _unsupported_muon(optimizer: object) -> str:
    """Return the class of an optimizer that is a Muon, but not DeepSpeed's; else empty."""
    kind = type(optimizer)
    is_supported = any((base.__module__, base.__name__) == (_MUON, "MuonWithAuxAdam") for base in kind.__mro__)
    return kind.__name__ if "muon" in kind.__name__.lower() and not is_supported else ""


def _parameter_without_matrix(engine: Any, optimizer: Any) -> str:
    """Return a parameter that is no matrix in a parameter group for Muon; else empty."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    groups = getattr(optimizer, "param_groups", ())
    for param in (param for group in groups if group.get("use_muon", False) for param in group["params"]):
        shape = tuple(getattr(param, "ds_shape", param.shape))
        if len(shape) < 2:
            return f"the parameter {names.get(id(param), '')} of shape {shape}"
    return ""


def _parameter_dtypes(engine: Any, optimizer: Any) -> str:
    """Return the first trained parameter of each dtype; empty if all have the same."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    first: dict[Any, str] = {}
    for param in (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"]):
        if param.requires_grad and getattr(param, "ds_numel", param.numel()):
            first.setdefault(param.dtype, names.get(id(param), "a parameter outside of the model"))
    return " and ".join(f"{name} in {dtype}" for dtype, name in first.items()) if len(first) > 1 else ""


UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        lambda engine, optimizer: _folding_across_tp_ranks(engine),
        "AutoEP folds experts into {}, so ranks with the same experts have different tensor-parallel ranks and share "
        "no data-parallel group",
        advice="Set expert_parallel.autoep_size to a multiple of tensor_parallel.autotp_size",
    ),
    Unsupported(
        lambda engine, optimizer: engine.pipeline_parallelism and _own_steps_key(engine),
        "all stages of a pipeline run the same micro-batches, but with {} groups of ranks run their own",
        advice=_remove_own_steps_key,
    ),
    Unsupported(
        lambda engine, optimizer: (
            MODULES if engine.pipeline_parallelism and getattr(engine._config.zero_config, MODULES, None) else ""
        ),
        "{} names modules of the model, and stages of a pipeline have different ones",
        advice=f"Remove {MODULES}",
    ),
    Unsupported(
        lambda engine, optimizer: _tokens_across_ranks(engine),
        "losses are weighted by the tokens of each rank, but ranks share tokens with {}",
        advice=f"Remove {WEIGHTS}",
    ),
    Unsupported(
        lambda engine, optimizer: engine.has_moe_layers and _own_steps_key(engine),
        "tokens and gradients of experts may be sent between groups, which run their own micro-batches with {}",
        advice=_remove_own_steps_key,
    ),
    Unsupported(
        lambda engine, optimizer: (
            engine.has_moe_layers and engine.pipeline_parallelism and not deepspeed_moe_layers(engine.module)
        ),
        "DeepSpeed's pipelines do not support AutoEP yet",
        advice="Use DeepSpeed MoE layers, or no pipeline",
    ),
    Unsupported(
        lambda engine, optimizer: _unshardable_moe_layers(engine),
        "the model has DeepSpeed MoE layers, and {}",
        shards_parameters,
        _sharded_experts_advice,
    ),
    Unsupported(
        lambda engine, optimizer: _unsupported_muon(optimizer),
        "{} needs whole matrices, but a rank has shards of them",
        advice=(
            f"Use DeepSpeed's: set optimizer.type to Muon, or pass MuonWithAuxAdam of {_MUON} to deepspeed.initialize"
        ),
    ),
    Unsupported(
        lambda engine, optimizer: _parameter_without_matrix(engine, optimizer),
        "Muon orthogonalizes matrices, and a parameter group with use_muon true has {}",
        advice="Move it to a parameter group with use_muon false",
    ),
    Unsupported(
        lambda engine, optimizer: _parameter_sharded_by_init(engine.module),
        "it replicates parameters, but the model was built under deepspeed.zero.Init, which has sharded {}",
        replicates_parameters,
        f"Build the model without zero.Init, or set {STRATEGY} to one with p = I or G",
    ),
    Unsupported(
        _parameter_dtypes,
        "ZeRO-3 keeps all trained parameters in one buffer of one dtype, but the optimizer has {}",
        shards_parameters,
        f"Convert the model to one dtype, or set {STRATEGY} to one with p = N",
    ),
    Unsupported(
        lambda engine, optimizer: _has_compiled_modules(engine.module),
        "the model was compiled with torch.compile, but ZeRO-3 sets attributes on modules, which compiled ones refuse",
        shards_parameters,
        "Pass the model itself to deepspeed.initialize, and call engine.compile() after it",
    ),
)

# With the topology, which has the default group size, too.
UNSUPPORTED_GROUPS = (
    Unsupported(
        _sequences_across_groups,
        "{}, so ranks with parts of one sequence would run other micro-batches",
        advice=f"Set {SECTION}.{GROUP_SIZE} to a multiple of the sequence-parallel size",
    ),
)
