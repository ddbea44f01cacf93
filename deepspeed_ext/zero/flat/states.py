# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""State dicts of stages 1 and 2, in DeepSpeed's order for every layout of flat buffers.

DeepSpeed's tools merge partitions in this order. So ranks exchange states in saves and loads, collectively over the
ranks that share the optimizer's states, if flat buffers are striped. An asynchronous save exchanges later, in its
writer threads (``DeferredExchange``).

Note [Own order]
    Asynchronous saves of versions before 2026-11-29 have partitions in the order of the ranks' memory, under the name
    ``OWN_PARTITIONS``, with the positions of their elements (``OWN_ORDER``). Loads under p = N and ``convert`` read
    them for one release.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    PARAM_SLICE_MAPPINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import all_reduce_max, any_rank
from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.relayout import DeferredExchange, Relayout
from deepspeed_ext.zero.flat.buffers import FlatBuffer
from deepspeed_ext.zero.muon import MOMENTUM, uses_muon
from deepspeed_ext.zero.saved_states import (
    MOMENTUM_SCALE,
    first_difference,
    partition_momentum,
    sharding_mismatch,
    unscaled_momentum,
    with_momentum,
)

State = Mapping[str, Any]
_Layouts = Mapping[int, FlatLayout]  # layouts of flat buffers that a file has in its own order, by number

OWN_ORDER = "paro_own_order"  # in a state dict: for each flat buffer None, or its layout and more
OWN_PARTITIONS = "paro_partition_of_fp32_groups"  # the optimizer's weights in that order


class PartitionedOptimizer(Protocol):
    """An optimizer of stage 1 or 2. Its attributes are DeepSpeed's, except ``buffers`` and ``deferred_exchange``."""

    buffers: list[FlatBuffer]
    dp_process_group: Any
    optimizer: Any
    param_names: dict[nn.Parameter, str]
    partition_count: Any
    deferred_exchange: DeferredExchange | None
    single_partition_of_fp32_groups: list[Any]  # the optimizer's weights
    _param_slice_mappings: list[Any]


class FlatStates:
    """The state dicts of an optimizer of stage 1 or 2."""

    def __init__(self, optimizer: PartitionedOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def _striped(self) -> list[FlatBuffer]:
        return [buffer for buffer in self._optimizer.buffers if buffer.striped]

    def in_stock_order(self, state: State) -> dict[str, Any]:
        """Return a state dict with partitions in DeepSpeed's order, on the host. Collective, unless they are sent
        later.

        Args:
            state: result of DeepSpeed's ``state_dict``, with partitions in the order of memory.

        Raises:
            ValueError: states cannot be exchanged element by element.
        """
        scale = {MOMENTUM_SCALE: 1.0} if uses_muon(self._optimizer.optimizer) else {}
        if not self._striped:
            return {**state, **scale}
        base, partitions = state[BASE_OPTIMIZER_STATE], self._optimizer.single_partition_of_fp32_groups
        paddings, states = list(state[GROUP_PADDINGS]), dict(base["state"])
        parameters = {buffer: base["param_groups"][buffer.number]["params"][0] for buffer in self._striped}
        for buffer, parameter in parameters.items():
            require_one_value_per_element(states.get(parameter, {}), {partitions[buffer.number].numel()})
        weights = list(state[SINGLE_PARTITION_OF_FP32_GROUPS])
        for buffer, parameter in parameters.items():
            number, padding = buffer.number, buffer.stock_padding
            reordered, states[parameter] = self._to_stock_order(buffer, partitions[number], states.get(parameter, {}))
            weights[number], paddings[number] = reordered[: reordered.numel() - padding], padding
        return {
            **state,
            BASE_OPTIMIZER_STATE: {**base, "state": states},
            SINGLE_PARTITION_OF_FP32_GROUPS: weights,
            GROUP_PADDINGS: paddings,
            PARAM_SLICE_MAPPINGS: self._mappings(),
            **scale,
        }

    def _to_stock_order(self, buffer: FlatBuffer, weights: Tensor, states: State) -> tuple[Tensor, dict[str, Any]]:
        """Return the optimizer's weights and states of a striped partition in DeepSpeed's order, on the host."""
        relayout, later = Relayout(buffer.layout, buffer.stock_layout, buffer.group), self._optimizer.deferred_exchange

        def reorder(chunk: Tensor) -> Tensor:
            return relayout.exchange(chunk).cpu() if later is None else later.exchange_later(chunk, relayout)

        reordered = {
            key: reorder(states[key])
            for key in sorted(states)  # the same order of collectives on all ranks
            if isinstance(states[key], Tensor) and states[key].shape == weights.shape
        }
        return reorder(weights.detach()), {**states, **reordered}

    def _mappings(self, layouts: _Layouts = MappingProxyType({})) -> list[Any]:
        """Return DeepSpeed's map of parameters to positions in the partition, in the order of files."""
        mappings, names = list(self._optimizer._param_slice_mappings), self._optimizer.param_names
        for buffer in self._optimizer.buffers:
            if buffer.striped or buffer.number in layouts:
                layout = layouts.get(buffer.number)
                members = buffer.stock_members() if layout is None else buffer.members_in(layout)
                mappings[buffer.number] = OrderedDict(
                    (names[member.param], fragment_address(**member.in_shard._asdict())) for member in members
                )
        return mappings

    # Loads ########################################################################################

    def check(self, state: State) -> None:
        """Reject a rank's state dict that is sharded differently: DeepSpeed would pad a shard that is too short.

        Raises:
            ValueError: it has another stage, another number of ranks, or other positions of parameters.
        """
        stage, count = int(state.get(ZERO_STAGE, 1)), state[PARTITION_COUNT]
        expected, buffers = self._optimizer.partition_count, self._optimizer.buffers
        if stage > 2 or count != expected:
            raise sharding_mismatch(
                f"of stage {stage}, sharded over {count} ranks",
                f"stage 1 or 2, sharded over {expected} ranks (an entry for each parameter group)",
            )
        if PARAM_SLICE_MAPPINGS not in state:  # from an older DeepSpeed
            return
        layouts = _own_layouts(state)
        for number, layout in layouts.items():
            numel = buffers[number].numel if number < len(buffers) else 0
            if layout.numel != numel:
                raise sharding_mismatch(
                    f"of {layout.numel} elements in parameter group {number}", f"{numel} elements in that group"
                )
        saved, own = _position_texts(state[PARAM_SLICE_MAPPINGS]), _position_texts(self._mappings(layouts))
        if difference := first_difference(saved, own, set(self._optimizer.param_names.values())):
            raise sharding_mismatch(
                f"in another order ({difference})",
                "the order that round_robin_gradients, the parameter groups, and the sizes of parameters give",
            )

    def in_memory_order(self, states: Sequence[State], optimizer_states: bool, fp32_weights: bool) -> list[State]:
        """Return state dicts of all ranks, with this rank's partitions in the order of memory.

        Args:
            states: state dicts of a checkpoint.
            optimizer_states, fp32_weights: whether these are loaded.

        Raises:
            ValueError: see ``check``.
        """
        optimizer, group = self._optimizer, self._optimizer.dp_process_group
        rank, result = dist.get_rank(group=group), list(states)
        own_order = OWN_ORDER in result[rank]
        self._check_together(result[rank], own_order)
        if optimizer_states and not own_order:
            groups = zip(optimizer.buffers, optimizer.optimizer.param_groups, strict=True)
            muon = [buffer for buffer, row in groups if row.get("use_muon", False)]
            result[rank] = with_partition_momentum(muon, result[rank], group)
        if own_order or (self._striped and (optimizer_states or fp32_weights)):
            result[rank] = _in_memory_order(optimizer.buffers, result[rank])
        return result

    def _check_together(self, state: State, own_order: bool) -> None:
        """Reject a state dict on all ranks if any rank does: where the rest of a load is collective, it would hang."""
        problem: ValueError | None = None
        try:
            self.check(state)
        except ValueError as error:
            problem = error
        is_collective = bool(self._striped) or own_order or uses_muon(self._optimizer.optimizer)
        fails_elsewhere = is_collective and any_rank(problem is not None, self._optimizer.dp_process_group)
        if problem is not None or fails_elsewhere:
            raise problem or sharding_mismatch("with other sharding on another rank", "one sharding")


def require_one_value_per_element(states: State, lengths: Container[int]) -> None:
    """Reject states that cannot be exchanged between ranks element by element.

    Raises:
        ValueError: there are such states, for example the scales of blocks.
    """
    for key, value in states.items():
        if isinstance(value, Tensor) and value.numel() > 1 and value.numel() not in lengths:
            raise ValueError(
                f"The optimizer state {key!r} has {value.numel()} elements, but saving in ZeRO's order needs one "
                f"element per parameter element. Set zero_optimization.round_robin_gradients to true, so that the "
                f"shards are ZeRO's own."
            )


def with_stock_names(state: State) -> dict[str, Any]:
    """Return a rank's state dict without keys unknown to DeepSpeed, in any order, for readers of
    ``PARAM_SLICE_MAPPINGS``, which have the positions of parameters in that order."""
    renamed = ((SINGLE_PARTITION_OF_FP32_GROUPS if key == OWN_PARTITIONS else key, state[key]) for key in state)
    return {key: value for key, value in renamed if key != OWN_ORDER}


def _own_layouts(state: State) -> dict[int, FlatLayout]:
    """Return the layouts of flat buffers that a file has in its own order, by number."""
    entries = enumerate(state.get(OWN_ORDER) or ())
    return {number: FlatLayout(**entry["layout"]) for number, entry in entries if entry is not None}


def _position_texts(mappings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [
        (name, f"at {piece.start} of group {number}, {piece.numel} elements")
        for number, group in enumerate(mappings)
        for name, piece in group.items()
    ]


def _in_memory_order(buffers: Iterable[FlatBuffer], state: State) -> dict[str, Any]:
    """Return this rank's state dict with partitions in the order of memory, for any order of its file."""
    layouts = _own_layouts(state)
    base = state[BASE_OPTIMIZER_STATE]  # a list in elastic checkpoints
    weights = list(state[OWN_PARTITIONS if OWN_ORDER in state else SINGLE_PARTITION_OF_FP32_GROUPS])
    paddings = list(state[GROUP_PADDINGS])
    states = dict(enumerate(base)) if not isinstance(base, dict) else dict(base["state"])
    for buffer in (buffer for buffer in buffers if buffer.striped or buffer.number in layouts):
        group, source = buffer.number, layouts.get(buffer.number, buffer.stock_layout)
        number = group if not isinstance(base, dict) else base["param_groups"][group]["params"][0]
        reordered = _to_memory_order(buffer, source, weights[group], states.get(number, {}))
        weights[group], states[number] = reordered
        paddings[group] = 0 if buffer.striped else buffer.stock_padding
    new_base: Any = [states[group] for group in range(len(base))] if not isinstance(base, dict) else None
    return {
        **with_stock_names(state),
        SINGLE_PARTITION_OF_FP32_GROUPS: weights,
        GROUP_PADDINGS: paddings,
        BASE_OPTIMIZER_STATE: new_base if new_base is not None else {**base, "state": states},
    }


def _to_memory_order(
    buffer: FlatBuffer, source: FlatLayout, weights: Tensor, states: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return weights and states of a partition in the order of memory. Collective, unless they already have it."""
    lengths = {source.chunk, weights.numel()}
    require_one_value_per_element(states, lengths)
    if source == buffer.layout:
        return weights, dict(states)
    from_saved = Relayout(source, buffer.layout, buffer.group)
    new_weights = from_saved.exchange(_padded(weights, source.chunk))
    return new_weights, {
        key: from_saved.exchange(_padded(value, source.chunk))
        if isinstance(value, Tensor) and value.dim() and value.numel() in lengths
        else value
        for key, value in sorted(states.items())
    }


def with_partition_momentum(buffers: Sequence[FlatBuffer], state: State, group: ProcessGroup | None) -> dict[str, Any]:
    """Return this rank's state dict with the momentum of its partition, in DeepSpeed's order; see Note [Momentum of
    DeepSpeed's stages].

    Args:
        buffers: Muon's flat buffers.
        group: the ranks that share the optimizer's dense states. They include the ranks that share the states of this
            rank's experts; the other ranks have experts of the same shapes, saved in the same way.

    Raises:
        ValueError: on all these ranks, if the momentum has other elements.
    """
    base = state[BASE_OPTIMIZER_STATE]
    if not buffers or not isinstance(base, dict):
        return dict(state)
    numbers = [base["param_groups"][buffer.number]["params"][0] for buffer in buffers]
    saved = [base["state"].get(number, {}).get(MOMENTUM) for number in numbers]
    members = [list(buffer.stock_members()) for buffer in buffers]
    chunks = [buffer.stock_chunk for buffer in buffers]
    lengths = [chunk if tensor is None else tensor.numel() for tensor, chunk in zip(saved, chunks, strict=True)]
    # On some ranks both lengths may be equal. DeepSpeed has no momentum if a rank has no part of a parameter group.
    is_full = [length != chunk for length, chunk in zip(lengths, chunks, strict=True)]
    wrong = [
        full and length != sum(member.param.numel() for member in buffer_members)
        for full, length, buffer_members in zip(is_full, lengths, members, strict=True)
    ]
    flags = all_reduce_max(torch.tensor([[part is not None for part in saved], is_full, wrong]).float(), group).bool()
    if flags[2].any():
        raise sharding_mismatch(f"with {lengths} elements of Muon's momentum", f"{chunks} elements")
    momenta = {}
    for index, (present, full) in enumerate(flags[:2].T.tolist()):
        if present:
            momentum = saved[index] if saved[index] is not None else torch.zeros(lengths[index])
            momentum = unscaled_momentum(state, momentum, offloaded=not full and momentum.dtype == torch.float32)
            momenta[numbers[index]] = partition_momentum(momentum, members[index], chunks[index]) if full else momentum
    return {**state, BASE_OPTIMIZER_STATE: {**base, "state": with_momentum(base["state"], momenta)}}


def _padded(chunk: Tensor, numel: int) -> Tensor:
    return torch.nn.functional.pad(chunk, (0, numel - chunk.numel())) if chunk.numel() < numel else chunk
