# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""States of a stage-1/2 optimizer of ours that leave the device: into checkpoints and to the host, and back.

Checkpoints have partitions in ZeRO's order, whatever the layout of flat buffers: DeepSpeed's tools put them together
by it. So a rank's states are exchanged with those of other ranks where they are saved and loaded.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    PARAM_SLICE_MAPPINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from deepspeed_ext.comm.agreement import largest
from deepspeed_ext.comm.redistribution import Redistribution
from deepspeed_ext.zero.flat_gradients import FlatGradients
from deepspeed_ext.zero.momentum import MOMENTUM_SCALE, Touched, of_partition, unscaled, with_momentum
from deepspeed_ext.zero.muon import MOMENTUM, uses_muon
from deepspeed_ext.zero.regroup import sharded_otherwise
from deepspeed_ext.zero.stage12_stripes import StripedPartitions
from deepspeed_ext.zero.updates import Updates


class Stage12States(StripedPartitions):
    """Such an optimizer, ``Stage12Optimizer``."""

    gradients: Mapping[str, FlatGradients]
    updates: Updates

    # Of parameters ################################################################################

    def _link_all_hp_params(self) -> None:
        """Have parameters know their states again: the parent links these only behind the first step, so after a load
        or a return from the host ``safe_get_full_optimizer_state`` would not find any."""
        super()._link_all_hp_params()
        self._link_states()

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Link states as soon as a parameter group has some: the parent links all groups when the first has."""
        if not self._hp_optimizer_states_linked and any(self._states_by_group):
            self._link_states()

    @property
    def _states_by_group(self) -> list[Any]:
        """The optimizer's states of each parameter group; empty where there are none yet."""
        return [self.optimizer.state.get(partition) or {} for partition in self.single_partition_of_fp32_groups]

    def _link_states(self) -> None:
        """Link what there is: who asks for a state that there is not is told so, as the parent does behind a step."""
        held = self._states_by_group
        groups = zip(self.bit16_groups, self.single_partition_of_fp32_groups, held, strict=True)
        for params, partition, states in groups:
            lazy_init_hp_params_optimizer_state(params, partition, {partition: states})
        self._hp_optimizer_states_linked = all(held)

    # In ZeRO's order ################################################################################

    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's, in ZeRO's order. Collective over the ranks that share the optimizer's states, if flat
        buffers have stripes; what is exchanged is on the host then."""
        with self._in_zeros_order():
            saved = dict(super().state_dict())
        return {**saved, MOMENTUM_SCALE: 1.0} if uses_muon(self.optimizer) else saved

    @contextmanager
    def _in_zeros_order(self) -> Iterator[None]:
        """Have the parent see, in this context, partitions as they are in ZeRO's order."""
        striped = self._striped
        for group in striped:
            held = self.single_partition_of_fp32_groups[group]
            _require_one_value_per_element(self.optimizer.state[held], {held.numel()})
        weights, paddings = list(self.single_partition_of_fp32_groups), list(self.groups_padding)
        with ExitStack() as stack:
            for group in striped:
                to_zeros = Redistribution(
                    self.layouts[group], self.zeros_layouts[group], self.real_dp_process_group[group]
                )
                held = self.single_partition_of_fp32_groups[group]
                weights[group] = to_zeros.move(held.detach()).cpu()
                paddings[group] = self._zeros_padding(group)
                states = self.optimizer.state[held]
                moved = {
                    key: to_zeros.move(states[key]).cpu()
                    for key in sorted(states)
                    if isinstance(states[key], Tensor) and states[key].shape == held.shape
                }
                # Another dict: those that are given out must not change when this context ends.
                stack.enter_context(mock.patch.dict(self.optimizer.state, {held: {**states, **moved}}))
            if striped:
                stack.enter_context(mock.patch.object(self, "single_partition_of_fp32_groups", weights))
                stack.enter_context(mock.patch.object(self, "groups_padding", paddings))
                stack.enter_context(mock.patch.object(self, "_param_slice_mappings", self._zeros_mappings()))
            yield

    @property
    def _striped(self) -> list[int]:
        return [group for group in range(len(self.layouts)) if self.is_striped(group)]

    def _zeros_padding(self, group: int) -> int:
        """Return how many elements at the end of this rank's partition are padding, in ZeRO's order."""
        chunk = self.zeros_layouts[group].chunk
        end = (self._shard_number(group) + 1) * chunk
        return max(0, min(chunk, end - self.layouts[group].numel))

    def _zeros_mappings(self) -> list[Any]:
        """Return the parent's map of parameters to places in the partition, in ZeRO's order."""
        found = list(self._param_slice_mappings)
        for group in self._striped:
            found[group] = OrderedDict(
                (self.param_names[param], fragment_address(start=one.column, numel=one.numel))
                for param, one in self._zeros_touched(group)
            )
        return found

    def _zeros_chunk(self, group: int) -> int:
        """Return the elements of this rank's partition, in ZeRO's order."""
        return self.zeros_layouts[group].chunk if self.is_striped(group) else int(self.partition_size[group])

    def _zeros_touched(self, group: int) -> Iterator[tuple[nn.Parameter, Touched]]:
        """Yield the parameters of which this rank's partition has elements, in ZeRO's order."""
        chunk = self._zeros_chunk(group)
        begin = self._shard_number(group) * chunk
        offsets = zip(self.round_robin_bit16_groups[group], self.round_robin_bit16_offsets[group], strict=True)
        for param, offset in offsets:
            start, end = max(offset, begin), min(offset + param.numel(), begin + chunk)
            if start < end:
                yield param, Touched(param.numel(), start - offset, end - start, start - begin)

    def _from_zeros_order(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's state dict with partitions of this optimizer's layout. Collective as ``state_dict``."""
        base = state[BASE_OPTIMIZER_STATE]  # elastic ones have a list
        weights, paddings = list(state[SINGLE_PARTITION_OF_FP32_GROUPS]), list(state[GROUP_PADDINGS])
        states = dict(enumerate(base)) if not isinstance(base, dict) else dict(base["state"])
        for group in self._striped:
            layout = self.zeros_layouts[group]
            from_zeros = Redistribution(layout, self.layouts[group], self.real_dp_process_group[group])
            number = group if not isinstance(base, dict) else base["param_groups"][group]["params"][0]
            whole = {layout.chunk, weights[group].numel()}
            _require_one_value_per_element(states.get(number, {}), whole)
            weights[group], paddings[group] = from_zeros.move(_filled(weights[group], layout.chunk)), 0
            mine = states.get(number, {})
            states[number] = {
                key: from_zeros.move(_filled(value, layout.chunk))
                if isinstance(value, Tensor) and value.dim() and value.numel() in whole
                else value
                for key, value in sorted(mine.items())
            }
        moved: Any = [states[group] for group in range(len(base))] if not isinstance(base, dict) else None
        return {
            **state,
            SINGLE_PARTITION_OF_FP32_GROUPS: weights,
            GROUP_PADDINGS: paddings,
            BASE_OPTIMIZER_STATE: moved if moved is not None else {**base, "state": states},
        }

    def _with_own_momentum(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's state dict with the momentum of its partition, in ZeRO's order; see
        Note [Momentum of DeepSpeed's stages]. Collective over the ranks that share the optimizer's states.

        Raises:
            ValueError: on all of them, if it is that of other elements.
        """
        base = state[BASE_OPTIMIZER_STATE]
        muon = [number for number, group in enumerate(self.optimizer.param_groups) if group.get("use_muon", False)]
        if not muon or not isinstance(base, dict):
            return dict(state)
        numbers = [base["param_groups"][group]["params"][0] for group in muon]
        saved = [base["state"].get(number, {}).get(MOMENTUM) for number in numbers]
        touched = [[one for _, one in self._zeros_touched(group)] for group in muon]
        chunks = [self._zeros_chunk(group) for group in muon]
        lengths = [chunk if one is None else one.numel() for one, chunk in zip(saved, chunks, strict=True)]
        # On some ranks both may be as long, and DeepSpeed has none where a rank has nothing of a parameter group.
        others = [length != chunk for length, chunk in zip(lengths, chunks, strict=True)]
        wrong = [
            other and length != sum(one.whole for one in parts)
            for other, length, parts in zip(others, lengths, touched, strict=True)
        ]
        alike = largest(
            torch.tensor([[one is not None for one in saved], others, wrong]).float(), self.dp_process_group
        ).bool()
        if alike[2].any():
            raise sharded_otherwise(f"for Muon's momentum of {lengths} elements", f"are for {chunks} elements")
        momenta = {}
        for place, (held, whole) in enumerate(alike[:2].T.tolist()):
            if held:
                one = saved[place] if saved[place] is not None else torch.zeros(lengths[place])
                one = unscaled(state, one, offloaded=not whole and one.dtype == torch.float32)
                momenta[numbers[place]] = of_partition(one, touched[place], chunks[place]) if whole else one
        return {**state, BASE_OPTIMIZER_STATE: {**base, "state": with_momentum(base["state"], momenta)}}

    # Loading ########################################################################################

    def check_states(self, state: Mapping[str, Any]) -> None:
        """Refuse a rank's state dict that is sharded otherwise: the parent would pad a shard that is too short.

        Raises:
            ValueError: it is of another stage, sharded over another number of ranks, or of parameters elsewhere.
        """
        stage, saved = int(state.get(ZERO_STAGE, 1)), state[PARTITION_COUNT]
        if stage > 2 or saved != self.partition_count:
            raise sharded_otherwise(
                f"of stage {stage} and sharded over {saved} ranks",
                f"are of stage 1 or 2 and sharded over {self.partition_count} ranks (an entry for each parameter "
                f"group)",
            )
        if PARAM_SLICE_MAPPINGS not in state:  # of an older DeepSpeed
            return
        # By place, whatever the names: it is how the parent takes them.
        saved, own = (
            [[(piece.start, piece.numel) for piece in group.values()] for group in mappings]
            for mappings in (state[PARAM_SLICE_MAPPINGS], self._zeros_mappings())
        )
        if saved != own:
            raise sharded_otherwise(
                "in another order", "go by round_robin_gradients, the parameter groups and the sizes of parameters"
            )

    def _load_legacy_checkpoint(
        self, state_dict_list: list[Any], load_optimizer_states: bool = True, load_from_fp32_weights: bool = False
    ) -> None:
        """Refuse optimizer states that are sharded otherwise.

        Raises:
            ValueError: see ``check_states``.
        """
        rank, states = dist.get_rank(group=self.dp_process_group), list(state_dict_list)
        problem: ValueError | None = None
        try:
            self.check_states(states[rank])
        except ValueError as error:
            problem = error
        together = bool(self._striped) or uses_muon(self.optimizer)
        if together:  # what follows is collective: nobody may be left alone
            failed = bool(largest(torch.tensor([float(problem is not None)]), self.dp_process_group).item())
            problem = problem or (sharded_otherwise("otherwise on another rank", "are not") if failed else None)
        if problem is not None:
            raise problem
        if load_optimizer_states:
            states[rank] = self._with_own_momentum(states[rank])
        if self._striped and (load_optimizer_states or load_from_fp32_weights):
            states[rank] = self._from_zeros_order(states[rank])
        super()._load_legacy_checkpoint(states, load_optimizer_states, load_from_fp32_weights)

    # To the host and back ###########################################################################

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Offload DeepSpeed's states, and with its gradients our slices."""
        self.updates.drain()
        self._finish_buckets()
        super().offload_states(*args, **kwargs)
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            for gradients in self.gradients.values():
                gradients.to("cpu")

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Bring back what ``offload_states`` has moved."""
        super().reload_states(*args, **kwargs)
        # The parent links before it makes new tensors of states on the device: those of the host would stay linked.
        self._link_states()
        for gradients in self.gradients.values():
            gradients.to(get_accelerator().current_device_name())


def _require_one_value_per_element(states: Mapping[str, Any], whole: Container[int]) -> None:
    """Refuse states that cannot be exchanged between ranks element by element.

    Raises:
        ValueError: there are some, such as the scales of blocks.
    """
    for key, value in states.items():
        if isinstance(value, Tensor) and value.numel() > 1 and value.numel() not in whole:
            raise ValueError(
                f"The optimizer's state {key!r} has {value.numel()} elements, where each element of a parameter must "
                f"have one of its own, for checkpoints to keep ZeRO's order. Set "
                f"zero_optimization.round_robin_gradients to true: then the shards are ZeRO's own."
            )


def _filled(chunk: Tensor, numel: int) -> Tensor:
    return torch.nn.functional.pad(chunk, (0, numel - chunk.numel())) if chunk.numel() < numel else chunk
