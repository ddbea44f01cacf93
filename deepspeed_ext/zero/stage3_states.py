# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""States of a stage-3 optimizer of ours that leave it: into checkpoints, to the host and to the user, and back."""

from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARTITION_COUNT, ZERO_STAGE
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.utils import get_norm_dtype
from torch import Tensor, nn

from deepspeed_ext.comm.owners import Cells
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.zero.crossing_spans import CrossingSpan
from deepspeed_ext.zero.families import family_of, name_in_all
from deepspeed_ext.zero.flat_shards import FlatShard, Member
from deepspeed_ext.zero.momentum import MOMENTUM_SCALE, saved_scale, unscaled, with_momentum
from deepspeed_ext.zero.muon import MOMENTUM, uses_muon
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.parameters import PartitionedParameters
from deepspeed_ext.zero.partitioned_gradients import PartitionedGradients
from deepspeed_ext.zero.regroup import check_groups, regroup, sharded_otherwise

_HELD_BY_US = {OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads}
_OF_OPTIMIZER = {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states}
_PLACEMENT = "ds_zero_partition_groups"  # in a state dict with AutoEP: who shares each sub-group


class Stage3States(ParoOptimizer):
    """Such an optimizer, ``Stage3Optimizer``; DeepSpeed's class comes after it."""

    sub_group_size: int  # the parent's
    _gathers: dict[str, Any]  # bucket, sequential: as of ``PartitionedParameters``
    parameters: Mapping[str, PartitionedParameters]  # of each family, by its name
    gradients: Mapping[str, PartitionedGradients]
    _held: Tensor  # what is held of all families' gradients, 1D
    averaged_gradients: dict[int, list[Tensor]]  # the parent's, by sub-group
    _waiting: bool  # whether a micro-step has ended since gradients moved to os; the same on all ranks

    fp16_groups: list[list[ZeroParameter]]  # the parent's
    persistent_parameters: list[ZeroParameter]

    @property
    @abstractmethod
    def _gradient_shards(self) -> dict[int, Tensor]:
        """The gradient of the optimizer's shard of each parameter by ds_id, 1D."""

    @abstractmethod
    def _finish_for_host(self) -> None:
        """Have the host wait for all buckets if it will read, or write, where they are added."""

    def _parameters_of(self, sub_group: Sequence[ZeroParameter]) -> PartitionedParameters:
        """The parameters of the family of a sub-group, which is of one family."""
        return self.parameters[family_of(sub_group[0])]

    def _gradients_of(self, param: ZeroParameter) -> PartitionedGradients:
        """The gradients of the family of a parameter."""
        return self.gradients[family_of(param)]

    def drain_parameters(self) -> None:
        """Wait for the gathers of all updated parameters."""
        for parameters in self.parameters.values():
            parameters.drain()

    def _forget_gradients(self) -> None:
        """Drop what has been accumulated."""
        for gradients in self.gradients.values():
            gradients.forget()

    @property
    def _sliced(self) -> bool:
        """Whether parameters of a family are held as slices of several rows."""
        return any(parameters.sliced for parameters in self.parameters.values())

    def _create_fp16_sub_groups(self, params_group: list[ZeroParameter]) -> list[list[ZeroParameter]]:
        """Make sub-groups; where slices are completed after the step, each is one all-gather of at most a bucket."""
        configured = self.sub_group_size
        if self._sliced:
            self.sub_group_size = min(configured, max(1, self._gathers["bucket"] // self.topology.sizes.ranks))
        try:
            return super()._create_fp16_sub_groups(params_group)
        finally:
            self.sub_group_size = configured

    def _show_gradients(self) -> None:
        """Have the parent's step read them where they are."""
        self.averaged_gradients = {
            i: [self._gradient_shards[param.ds_id] for param in group] for i, group in enumerate(self.fp16_groups)
        }

    def family_of_buffer(self, buffer: int) -> str:
        """Return the family of what a hop is told to be of a flat buffer; see ``ParoOptimizer``."""
        return list(self.families)[buffer]

    def crossing_spans(self) -> list[CrossingSpan]:
        """Return them; see ``ParoOptimizer``."""
        return [
            span
            for group in self.fp16_groups
            for param in group
            for span in self._gradients_of(param).crossing_spans(param, name_in_all(param, self.param_names[param]))
        ]

    def owned_span(self, param: Any) -> tuple[int, int]:
        """Return the elements whose optimizer states this rank has; see ``ParoOptimizer``."""
        chunk = param.ds_tensor.ds_numel
        start = min(dist.get_rank(group=param.ds_process_group) * chunk, param.ds_numel)
        return start, min(start + chunk, param.ds_numel)

    def owned_gradient(self, param: Any) -> Tensor:
        """Return the gradient of these elements; see ``ParoOptimizer``."""
        start, end = self.owned_span(param)
        return self._gradient_shards[param.ds_id][: end - start]

    def flat_shards(self) -> list[FlatShard]:
        """Return what is in this rank's flat partitions; see ``FlatShards``."""
        found = []
        for number, params in enumerate(self.fp16_groups):
            members, column = [], 0
            for param in params:
                start, end = self.owned_span(param)
                chunk = param.ds_tensor.ds_numel
                members.append(Member(param, tuple(param.ds_shape), Cells(0, chunk), start, end - start, column))
                column += chunk
            found.append(FlatShard(number, self.sub_group_to_group_id[number], tuple(members)))
        return found

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return this rank's partition of the optimizer's weights; see ``FlatShards``."""
        weights: nn.Parameter = self.fp32_partitioned_groups_flat[number]
        return weights

    def shard_gradient(self, number: int) -> Tensor:
        """Return its gradient; see ``FlatShards``."""
        if self.offload_optimizer:
            gradient: Tensor = self.fp32_partitioned_groups_flat[number].grad
            return gradient
        params = self.fp16_groups[number]
        return self._gradients_of(params[0]).shard_of(params)

    # What takes the place of gradients ################################################################

    @property
    def updates_on_host(self) -> bool:
        """Whether they are: with optimizer offload."""
        return bool(self.offload_optimizer)

    def take_update(self, number: int) -> float:
        """Prepare for an update; see ``FlatShards``."""
        return self._update_factor(number, self.sub_groups_lacking_loss_scale)

    def updates_taken(self, shards: Sequence[FlatShard]) -> None:
        """Have the offloaded optimizer read their norms; see ``FlatShards``."""
        for shard in shards if self.offload_optimizer else ():
            update = self.shard_gradient(shard.number)
            for member in shard.members:
                norm = update.narrow(0, member.column, member.numel).to(get_norm_dtype()).norm(2)
                self.norm_for_param_grads[self.get_param_id(member.param)] = norm

    # Into checkpoints and back ########################################################################

    def check_states(self, state: Mapping[str, Any]) -> None:
        """Refuse a rank's state dict that is sharded otherwise, except for sub-groups, which are divided anew.

        Raises:
            ValueError: it is of another stage, sharded over another number of ranks, or of other parameter groups.
        """
        stage, saved = int(state[ZERO_STAGE]), state[PARTITION_COUNT]
        if (stage, saved) != (3, self.partition_count):
            raise sharded_otherwise(
                f"of stage {stage} and sharded over {saved} ranks",
                f"are of stage 3 and sharded over {self.partition_count}",
            )
        placed = state.get(_PLACEMENT)
        if placed is not None and placed != self._zero3_partition_group_metadata():
            raise sharded_otherwise(
                f"of {len(placed)} sub-groups of experts and others, over the ranks "
                f"{[group['partition_ranks'] for group in placed]}",
                "are of others, which DeepSpeed refuses with AutoEP (sub_group_size, allgather_bucket_size and "
                "expert_parallel.autoep_size must be as they were)",
            )
        check_groups(state, self._sub_group_numels())

    def load_state_dict(self, state_dict_list: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
        """Also refuse states that are sharded otherwise, and divide sub-groups anew.

        Raises:
            ValueError: see ``check_states``.
        """
        if not kwargs.get("checkpoint_folder"):
            rank = dist.get_rank(group=self.dp_process_group)
            self.check_states(state_dict_list[rank])
            state = regroup(state_dict_list[rank], self._sub_group_numels())
            state_dict_list[rank] = self._with_own_momentum(state)
        super().load_state_dict(state_dict_list, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's, with momentum as its stage 3 has it; see Note [Momentum of DeepSpeed's stages]."""
        if not uses_muon(self.optimizer):
            return dict(super().state_dict())
        scale = 1.0 if self.updates_on_host else saved_scale(float(self.loss_scale))
        saved = {**super().state_dict(), MOMENTUM_SCALE: scale}
        return saved if scale == 1 else _with_momentum_of(saved, lambda momentum: (momentum * scale).cpu())

    def _with_own_momentum(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's state dict with momentum as this optimizer has it.

        DeepSpeed does not save whether it has offloaded the optimizer: it is taken to have done as this run does.
        """
        return _with_momentum_of(state, lambda momentum: unscaled(state, momentum, self.updates_on_host))

    def _get_sub_group_partition_ranks(self, sub_group_id: int) -> list[int]:
        """Return which ranks share a sub-group, as DeepSpeed's stage 3 notes and compares it with AutoEP."""
        return self.filing.as_written(super()._get_sub_group_partition_ranks(sub_group_id))

    def _sub_group_numels(self) -> list[list[int]]:
        """Return for each parameter group the elements of this rank's sub-groups."""
        numels: list[list[int]] = [[] for _ in self.optimizer.param_groups]
        for sub_group, flat in enumerate(self.fp32_partitioned_groups_flat):
            numels[self.sub_group_to_group_id[sub_group]].append(flat.numel())
        return numels

    def checkpoint_event_prologue(self) -> None:
        """Prepare for a checkpoint that is saved or loaded."""
        self.drain_parameters()
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        """Complete slices after it: what was loaded is in this rank's rows only."""
        for parameters in self.parameters.values():
            parameters.complete()
        super().checkpoint_event_epilogue()

    # Parameters: os -> p ##############################################################################

    def _post_step(self, timer_names: set[str]) -> None:
        """Move updated parameters os -> p, after the step.

        The parent gathers persistent parameters here. They are in every block, so that would wait for all gathers
        between groups: where there are any, the modules of the next forward gather them, which then persist.
        """
        if not self._starts_updates_early:
            self._gather_updates()
        persistent = self.persistent_parameters
        if self._sliced:
            self.persistent_parameters = []
        try:
            super()._post_step(timer_names)
        finally:
            self.persistent_parameters = persistent

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Also send what a step has written to the other groups, at once if the next sub-group's step takes long."""
        if self._stepping and sub_group_id == 0:  # not before the step is known to be applied
            self.whole.begin(stepping=True)
        parameters = self._parameters_of(self.fp16_groups[sub_group_id])
        if self.whole.now or parameters.always_whole:
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        else:
            held = self.fp16_partitioned_groups_flat[sub_group_id]
            weights = self.fp32_partitioned_groups_flat[sub_group_id].detach()
            parameters.change(sub_group_id, weights, held)
        if self._starts_updates_early:
            parameters.gather_updates_of(sub_group_id)

    def _gather_updates(self) -> None:
        """Start to move updated parameters os -> p: those of one family after the other, on all ranks."""
        for parameters in self.parameters.values():
            parameters.gather_updates()

    @property
    def _starts_updates_early(self) -> bool:
        return self._stepping and bool(self.offload_optimizer)

    def send_whole(self) -> None:
        """Have all ranks hold the optimizer's weights, where they may hold something else; see ``ParoOptimizer``."""
        if self.whole.always:
            return
        self._require_parameters()
        self.drain_parameters()  # what the last step has sent is written to the rows that are written here
        for parameters in self.parameters.values():
            parameters.forget_changes()
        self.whole.begin(stepping=False)
        for sub_group in range(len(self.fp16_partitioned_groups_flat)):
            self._reassign_or_swap_out_partitioned_parameters(sub_group)
        self._gather_updates()
        self.drain_parameters()

    def set_full_hp_param(self, value: Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Serve DeepSpeed's safe_set_full_fp32_param and its like.

        Where ranks do not divide a parameter, DeepSpeed's own reads behind its end: the last rank alone raises.
        """
        self.whole.ask()
        if not param.requires_grad or value.numel() != param.ds_numel:
            super().set_full_hp_param(value, param, optim_state_key)
            return
        held, _ = self._get_fp32_opt_state_partition(
            param, release_swap_buffers=False, optim_state_key=optim_state_key
        )
        start = held.numel() * self._get_param_partition_rank(param)
        mine = value.flatten()[start : start + held.numel()]
        held.data[: mine.numel()].copy_(mine)

    def set_local_hp_param(self, *args: Any, **kwargs: Any) -> None:
        """Serve DeepSpeed's safe_set_local_fp32_param and its like."""
        self.whole.ask()
        super().set_local_hp_param(*args, **kwargs)

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        **kwargs: Any,
    ) -> None:
        """Offload DeepSpeed's states, with parameters and gradients as we hold them."""
        self.drain_parameters()
        self._finish_buckets()
        wanted = set(OffloadStateTypeEnum if include is None else include) - self.offloaded_states
        held = _HELD_BY_US | (_OF_OPTIMIZER if uses_muon(self.optimizer) else set())
        super().offload_states(wanted - held, device, pin_memory, **kwargs)

        def move(tensor: Tensor) -> Tensor:
            moved = tensor.to(device.value)
            return get_accelerator().pin_memory(moved) if pin_memory else moved

        if OffloadStateTypeEnum.lp_params in wanted:
            self._hold_parameters(move(self.lp_param_buffer))
            self.fp16_partitioned_groups_flat.clear()
            for parameters in self.parameters.values():
                parameters.forget_blocks()
        if OffloadStateTypeEnum.lp_grads in wanted:
            self._place_gradients(move(self._held))
            self.averaged_gradients = {}
        self._move_optimizer(wanted & held, move)
        self.offloaded_states |= wanted & held

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Bring back what ``offload_states`` has moved."""
        device = get_accelerator().current_device_name()
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            self._hold_parameters(self.lp_param_buffer.to(device))
            self._set_fp16_partitioned_groups_flat()
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            self._place_gradients(self._held.to(device))
            self._show_gradients()
        self.offloaded_states -= _HELD_BY_US
        if uses_muon(self.optimizer):  # DeepSpeed moves no others
            self._move_optimizer(self.offloaded_states, lambda tensor: tensor.to(device))
            self.offloaded_states -= _OF_OPTIMIZER
        super().reload_states(*args, **kwargs)

    def _move_optimizer(self, wanted: Container[OffloadStateTypeEnum], move: Callable[[Tensor], Tensor]) -> None:
        """Move weights and states of the optimizer, where DeepSpeed's stage 3 knows only those of its FusedAdam."""
        if OffloadStateTypeEnum.hp_params in wanted:
            for weights in self.fp32_partitioned_groups_flat:
                weights.data = move(weights.data)
        if OffloadStateTypeEnum.optim_states in wanted:
            for states in self.optimizer.state.values():
                # Step counts stay on the host, where they are read.
                held = {key: one for key, one in states.items() if isinstance(one, Tensor) and one.dim()}
                states.update({key: move(one) for key, one in held.items()})

    def _hold_parameters(self, buffer: Tensor) -> None:
        self.lp_param_buffer, offset = buffer, 0
        for group in self.fp16_groups:
            offset = self._parameters_of(group).place(buffer, offset, group)

    def _get_fp32_grad_state_partition(self, *args: Any, **kwargs: Any) -> Any:
        """Serve DeepSpeed's safe_get_full_grad and its like."""
        self._refuse_unfinished_gradients()
        return super()._get_fp32_grad_state_partition(*args, **kwargs)

    def update_fp32_grad_for_param_vectorized(self, *args: Any, **kwargs: Any) -> None:
        """Serve DeepSpeed's safe_update_full_grad_vectorized."""
        self._refuse_unfinished_gradients()
        super().update_fp32_grad_for_param_vectorized(*args, **kwargs)

    def _refuse_unfinished_gradients(self) -> None:
        self._finish_buckets()
        self._finish_for_host()
        if self._waiting and self.strategy.g != self.strategy.os:
            raise RuntimeError(
                f"Gradients can be read and changed at the accumulation boundary only: with paro_strategy "
                f"{self.strategy.name} (g = {self.strategy.g.name}, os = {self.strategy.os.name}) they are not summed "
                f"over all ranks before it."
            )


def _with_momentum_of(state: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a rank's state dict with momentum that ``change`` returns for that of each sub-group."""
    optimizer = state[OPTIMIZER_STATE_DICT]
    muon = [group["params"] for group in optimizer["param_groups"] if group.get("use_muon", False)]
    momenta = {
        number: change(optimizer["state"][number][MOMENTUM])
        for numbers in muon
        for number in numbers
        if MOMENTUM in optimizer["state"].get(number, {})
    }
    return {**state, OPTIMIZER_STATE_DICT: {**optimizer, "state": with_momentum(optimizer["state"], momenta)}}
