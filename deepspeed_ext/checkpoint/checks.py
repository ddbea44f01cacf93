# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a checkpoint before a load changes anything."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
    PARTITION_COUNT,
)
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from deepspeed_ext.checkpoint import universal
from deepspeed_ext.checkpoint.experts import EXPERT_ORDER, data_before_experts, expert_files, names_outside_experts
from deepspeed_ext.checkpoint.files import CheckpointFiles, holds_parameters_only
from deepspeed_ext.checkpoint.folder import CheckpointError
from deepspeed_ext.comm.agreement import all_reduce_min, raise_together, run_on_all_or_raise
from deepspeed_ext.config.unsupported import deepspeed_moe_layers
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.strategy import hyphenate
from deepspeed_ext.zero.flat.update_gathers import WaitHook
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.saved_states import first_difference

_NO_SAVE_ID = 2**62
_MODULE = "module"
_MODEL_PARALLEL = "mp_world_size"  # in a file of model states: the number of model-parallel ranks


class Check:
    """The checks of one load, run before it.

    Args:
        engine: the engine that will load.
        load_dir, tag: the checkpoint.
        load_states: whether optimizer states are also loaded.
    """

    model_states: Sequence[Mapping[str, Any]] = ()

    def __init__(self, engine: Engine, load_dir: str, tag: str, load_states: bool) -> None:
        self._engine = engine
        self._optimizer: ParoOptimizer = engine.optimizer
        self._files: CheckpointFiles = engine.checkpoint_engine
        self.load_dir, self.tag, self.load_states = load_dir, tag, load_states
        self.folder = Path(load_dir) / tag

    def run(self, strict: bool | None) -> None:
        """Check everything; if one rank finds an error, all ranks raise it. Collective.

        Args:
            strict: DeepSpeed's ``load_module_strict``; None if a user's function loads the module.
        """
        run_on_all_or_raise(
            lambda: self._check(strict), f"{self.folder} is not a valid checkpoint for this run", CheckpointError
        )
        self._check_saves()

    def _check(self, strict: bool | None) -> None:
        all_names = self._engine._get_all_ckpt_names(self.load_dir, self.tag)
        names = [name for name in all_names if not holds_parameters_only(name)]  # expert files have similar names
        if not names:
            expected = self._engine._get_ckpt_name(self.load_dir, self.tag)
            raise CheckpointError(f"{expected} is missing.{self._conversion_advice()}")
        saved = int(self._files.inspect(names[0], _MODULE).get(_MODEL_PARALLEL, len(names)))
        if len(names) != saved:  # DeepSpeed would load it as a checkpoint of fewer model-parallel ranks
            raise CheckpointError(
                f"{self.folder} has {len(names)} files of model-parallel ranks, expected {saved}; the first is "
                f"{names[0]}."
            )
        if len(names) == self._engine.mp_world_size:  # otherwise DeepSpeed merges or splits the files, or refuses
            file = names[self._engine.checkpoint_mp_rank]
            module = self._files.inspect(file, _MODULE)
            if strict is not None:
                self._check_module(file, module, strict)
                # With MoE layers, all layers of a stage are in one file.
                if self._engine.pipeline_parallelism and not self._engine.has_moe_layers:
                    self._check_layers(strict)
            if self.load_states:
                self._check_order(file, module)
            # DeepSpeed refuses another number of ranks, but only the number that shards states matters.
            ranks = {"dp_world_size": self._engine.seq_dp_world_size}
            self._files.amendments[file] = ranks | self._own_frozen_experts(module)
        if self.load_states:
            self._check_states()
        elif self._engine.zero_optimization_partition_weights() and not self._engine.pipeline_parallelism:
            self._check_all_shards()

    def _own_frozen_experts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return frozen parameters that any rank may load.

        DeepSpeed saves one rank's experts among them. They are replaced by this rank's own parameters, which are
        loaded from expert files.
        """
        saved = state.get(FROZEN_PARAM_FRAGMENTS)
        if not saved or self._engine.zero_optimization_partition_weights():
            return {}
        params = dict(self._engine.module.named_parameters())
        experts = params.keys() - set(names_outside_experts(self._engine, params))
        return {FROZEN_PARAM_FRAGMENTS: {**saved, **{name: params[name] for name in experts}}}

    # The module #######################################################################################

    def _check_module(self, file: str, state: Mapping[str, Any], strict: bool) -> None:
        """Compare names and shapes before torch, which reports a mismatch only after it has copied the rest.

        Modules with their own load function are not checked.
        """
        module, saved = self._engine.module, state[_MODULE]
        experts = {
            path: (self._files.inspect(path), expected)
            for path, expected in expert_files(self._engine, self.load_dir, self.tag)
        }
        if saved is None or any(_has_custom_load(part) for part in module.modules()):
            return
        if self._engine.zero_optimization_partition_weights():  # saved partitioned parameters have no elements
            groups = [*(state.get(PARAM_SHAPES) or ()), state.get(FROZEN_PARAM_SHAPES) or {}]
            shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
        else:
            shapes = {name: tuple(value.shape) for name, value in saved.items() if hasattr(value, "shape")}
        model_shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
        model_shapes.update((name, tuple(buffer.shape)) for name, buffer in module.named_buffers())
        for path, (values, expected) in experts.items():
            actual = {name: tuple(value.shape) for name, value in values.items() if hasattr(value, "shape")}
            differing = sorted(name for name in expected.keys() | actual if expected.get(name) != actual.get(name))
            if differing:
                raise CheckpointError(
                    f"{path} does not fit the model's experts: of {len(expected)} names, {len(differing)} are "
                    f"missing, unexpected, or have another shape; the first is {differing[0]!r}."
                )
        model_shapes = {name: model_shapes[name] for name in names_outside_experts(self._engine, model_shapes)}
        self._compare(file, module, model_shapes, shapes, strict, saved.keys())

    def _compare(
        self,
        file: str,
        module: nn.Module,
        model_shapes: Mapping[str, Any],
        shapes: Mapping[str, Any],
        strict: bool,
        names: Iterable[str],
    ) -> None:
        """Compare a module's shapes, and the names that it would save, with those in a file."""
        expected = set(names_outside_experts(self._engine, module.state_dict()))
        differing = sorted(set(names) ^ expected) if strict else []
        differing += [
            name for name in sorted(model_shapes.keys() & shapes.keys()) if model_shapes[name] != shapes[name]
        ]
        if differing:
            raise CheckpointError(
                f"{file} does not fit the model: of {len(expected)} names, {len(differing)} are missing, unexpected, "
                f"or have another shape; the first is {differing[0]!r}."
            )

    def _check_layers(self, strict: bool) -> None:
        """Compare a pipeline's module with the files of its layers."""
        pipeline: PipelineModule = self._engine.module
        for index, layer in enumerate(pipeline.forward_funcs):
            if not isinstance(layer, nn.Module) or any(_has_custom_load(part) for part in layer.modules()):
                continue
            files = pipeline.ckpt_layer_path_list(str(self.folder), index)
            if not files:
                missing = pipeline.ckpt_layer_path(str(self.folder), index)
                raise CheckpointError(
                    f"{missing} is missing; it has the weights of layer {pipeline._local_start + index}."
                )
            saved = [self._files.inspect(file) for file in files]
            layer_shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in layer.named_parameters()}
            if len(saved) == 1:  # DeepSpeed merges or splits several files, one for each tensor-parallel rank
                shapes = {name: tuple(value.shape) for name, value in saved[0].items() if hasattr(value, "shape")}
                self._compare(files[0], layer, layer_shapes, shapes, strict, saved[0].keys())

    def _check_order(self, file: str, state: Mapping[str, Any]) -> None:
        """Compare the order in which DeepSpeed flattened parameters with the order in which it will load them."""
        saved, current = (
            [(name, tuple(shape)) for group in groups for name, shape in group.items()]
            for groups in (state.get(PARAM_SHAPES) or (), self._engine._get_zero_param_shapes())
        )
        if saved and (difference := first_difference(saved, current, self._engine.param_names.values())):
            raise CheckpointError(
                f"{file} belongs to another model, or its parameters have another order (round_robin_gradients, "
                f"parameter groups). DeepSpeed loads optimizer states in this order: "
                f"{difference}.{self._conversion_advice()}"
            )

    # The optimizer's states ###########################################################################

    def _check_states(self) -> None:
        file = self._engine._get_zero_ckpt_name(self.load_dir, self.tag)
        if not Path(file).exists():
            raise CheckpointError(
                f"{file} is missing.{self._precision_advice(Path(file)) or self._conversion_advice()}"
            )
        shard = self._files.inspect(file, OPTIMIZER_STATE_DICT)[OPTIMIZER_STATE_DICT]
        order = data_before_experts(self._engine)
        saved = self._files.headers[file].get(EXPERT_ORDER, order)
        if saved != order:
            raise CheckpointError(
                f"{file} has the states of other experts: it was saved with use_data_before_expert_parallelism "
                f"{saved}, and this run has {order}. Set it to {saved}."
            )
        try:
            self._optimizer.check_states(shard)
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}{self._conversion_advice()}") from error
        except KeyError as error:
            raise CheckpointError(
                f"{file} was not saved by a ZeRO optimizer: it has no {error}.{self._conversion_advice()}"
            ) from error

    def _check_all_shards(self) -> None:
        """Check this rank's share of all shards: weights without optimizer states are loaded from all of them."""
        names = sorted(self.folder.glob("*_optim_states.pt"))
        if not names:
            raise CheckpointError(f"{self.folder} has no files *_optim_states.pt, which contain the weights.")
        count = self._files.inspect(names[0], OPTIMIZER_STATE_DICT)[OPTIMIZER_STATE_DICT][PARTITION_COUNT]
        bf16 = names[0].name.startswith("bf16_")
        for number in range(dist.get_rank(), max(count) if isinstance(count, list) else count, dist.get_world_size()):
            file = self._engine._get_rank_zero_ckpt_name(self.load_dir, self.tag, 0, number, bf16)
            self._files.inspect(file, OPTIMIZER_STATE_DICT)

    # All files ########################################################################################

    def _check_saves(self) -> None:
        """Raise on all ranks unless all files belong to the same save. Collective."""
        ids = {name: int(header.get("save_id", 0)) for name, header in self._files.headers.items()}
        error: CheckpointError | None = None
        if len(set(ids.values())) > 1:
            error = CheckpointError(f"one of these files belongs to another save than the others: {', '.join(ids)}.")
        raise_together(error, CheckpointError)  # on all ranks, or the reduction below would wait for this one
        save_id = next(iter(ids.values()), _NO_SAVE_ID)
        if save_id not in (all_reduce_min(save_id), _NO_SAVE_ID):
            error = CheckpointError(f"{', '.join(ids)} belong to another save than the files that other ranks load.")
        raise_together(error, CheckpointError)

    # Advice ###########################################################################################

    def _precision_advice(self, file: Path) -> str:
        """Return advice if the file exists with, or without, the prefix of bf16; empty if it does not."""
        prefix = "bf16_"
        other = file.name.removeprefix(prefix) if file.name.startswith(prefix) else prefix + file.name
        if not file.with_name(other).exists():
            return ""
        return f" {other} exists: set bf16.enabled to its value at the time of the save."

    def _conversion_advice(self) -> str:
        """Return a message on how the checkpoint was saved, if known, and on its conversion."""
        header = next(filter(None, self._headers()), None)
        saved = " It"
        if header:
            saved = (
                f" The checkpoint was saved with paro_strategy {hyphenate(header['strategy'])} in groups of "
                f"{header['group_size']}, by {header['ranks']} ranks; it"
            )
        strategy, sizes = self._optimizer.strategy, self._optimizer.topology.all_groups.sizes
        return (
            f"{saved} is loaded with paro_strategy {strategy} in groups of {sizes.group_size}, by "
            f"{sizes.ranks} ranks. If these shard the states otherwise, convert it once:\n"
            f"  python -m deepspeed_ext convert --input_folder {self.folder} "
            f"--output_folder {self.folder}_universal\n"
            f'and load it with "checkpoint": {{"load_universal": true}} in the configuration.'
        )

    def _headers(self) -> Iterable[Mapping[str, Any]]:
        yield from self._files.headers.values()
        for name in sorted(self.folder.glob("*mp_rank_*_states.pt")):
            if holds_parameters_only(str(name)):
                continue
            try:
                self._files.inspect(name)
            except CheckpointError:
                continue
            yield self._files.headers[str(name)]
            return


class UniversalCheck(Check):
    """The checks of a load from a universal checkpoint; ranks share the work of checking each parameter's files."""

    def _check(self, strict: bool | None) -> None:
        if layers := deepspeed_moe_layers(self._engine.module):
            raise CheckpointError(
                f"{self.folder} is a universal checkpoint, and DeepSpeed's universal checkpoints do not support "
                f"experts of MoE layers ({', '.join(layers)}). Load the original checkpoint with the strategy, group "
                f"size, and expert-parallel size that saved it, or use AutoEP (expert_parallel)."
            )
        self.model_states = universal.read_model_states(self._engine, self.folder, self._files.inspect)
        universal.check(self._engine, self.folder, self._files.inspect, self.load_states, self.model_states)

    def _check_saves(self) -> None:
        """Do nothing, because files of a conversion do not record a save."""


def _has_custom_load(module: nn.Module) -> bool:
    """Return whether a module may rename, drop or resize entries during a load."""
    overridden = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    hooks = (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())
    return overridden or not all(isinstance(hook, WaitHook) for hook in hooks)
