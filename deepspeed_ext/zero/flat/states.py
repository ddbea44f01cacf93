# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""State dicts of stages 1 and 2, whose order is DeepSpeed's whatever the layout of flat buffers.

DeepSpeed's tools put partitions together by it. So a rank's states are exchanged with those of other ranks where they
are saved and loaded. All of it is collective over the ranks that share the optimizer's states, if flat buffers have
stripes. An asynchronous save exchanges later, by the threads that write (``SendsLater``).

Note [Own order]
    Asynchronous saves of versions before 2026-11-29 have partitions in the order in which ranks held them, under the
    name ``OWN_PARTITIONS``, and say where their elements are (``OWN_ORDER``). Loads under p = N and ``convert`` read
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
from deepspeed_ext.comm.relayout import Relayout, SendsLater
from deepspeed_ext.zero.flat.buffers import FlatBuffer
from deepspeed_ext.zero.momentum import MOMENTUM_SCALE, of_partition, sharded_otherwise, unscaled, with_momentum
from deepspeed_ext.zero.muon import MOMENTUM, uses_muon
from deepspeed_ext.zero.parameter_order import first_difference

State = Mapping[str, Any]
_Layouts = Mapping[int, FlatLayout]  # of flat buffers that a file has in an order of its own, by their numbers

OWN_ORDER = "paro_own_order"  # in a state dict: for each flat buffer None, or its layout and more
OWN_PARTITIONS = "paro_partition_of_fp32_groups"  # the optimizer's weights then


class Partitioned(Protocol):
    """An optimizer of stage 1 or 2. Its attributes are DeepSpeed's, except for ``buffers`` and ``sends_later``."""

    buffers: list[FlatBuffer]
    dp_process_group: Any
    optimizer: Any
    param_names: dict[nn.Parameter, str]
    partition_count: Any
    sends_later: SendsLater | None
    single_partition_of_fp32_groups: list[Any]  # the optimizer's weights
    _param_slice_mappings: list[Any]


class FlatStates:
    """The state dicts of an optimizer of stage 1 or 2.

    Args:
        optimizer: of a strategy.
    """

    def __init__(self, optimizer: Partitioned) -> None:
        self._optimizer = optimizer

    @property
    def _striped(self) -> list[FlatBuffer]:
        return [buffer for buffer in self._optimizer.buffers if buffer.striped]

    def in_zeros_order(self, state: State) -> dict[str, Any]:
        """Return a state dict with partitions, on the host, in DeepSpeed's order. Collective, unless they are sent
        later.

        Args:
            state: of DeepSpeed's ``state_dict``, with partitions as they are held.

        Raises:
            ValueError: states cannot be exchanged element by element.
        """
        scale = {MOMENTUM_SCALE: 1.0} if uses_muon(self._optimizer.optimizer) else {}
        if not self._striped:
            return {**state, **scale}
        base, held = state[BASE_OPTIMIZER_STATE], self._optimizer.single_partition_of_fp32_groups
        paddings, states = list(state[GROUP_PADDINGS]), dict(base["state"])
        parameters = {buffer: base["param_groups"][buffer.number]["params"][0] for buffer in self._striped}
        for buffer, parameter in parameters.items():
            require_one_value_per_element(states.get(parameter, {}), {held[buffer.number].numel()})
        weights = list(state[SINGLE_PARTITION_OF_FP32_GROUPS])
        for buffer, parameter in parameters.items():
            number, padding = buffer.number, buffer.zeros_padding
            moved, states[parameter] = self._moved(buffer, held[number], states.get(parameter, {}))
            weights[number], paddings[number] = moved[: moved.numel() - padding], padding
        return {
            **state,
            BASE_OPTIMIZER_STATE: {**base, "state": states},
            SINGLE_PARTITION_OF_FP32_GROUPS: weights,
            GROUP_PADDINGS: paddings,
            PARAM_SLICE_MAPPINGS: self._mappings(),
            **scale,
        }

    def _moved(self, buffer: FlatBuffer, weights: Tensor, states: State) -> tuple[Tensor, dict[str, Any]]:
        """Return the optimizer's weights and states of a partition with stripes in DeepSpeed's order, on the host."""
        relayout, later = Relayout(buffer.layout, buffer.zeros_layout, buffer.group), self._optimizer.sends_later

        def moved(chunk: Tensor) -> Tensor:
            return relayout.move(chunk).cpu() if later is None else later.send_later(chunk, relayout)

        of_elements = {
            key: moved(states[key])
            for key in sorted(states)
            if isinstance(states[key], Tensor) and states[key].shape == weights.shape
        }
        return moved(weights.detach()), {**states, **of_elements}

    def _mappings(self, layouts: _Layouts = MappingProxyType({})) -> list[Any]:
        """Return DeepSpeed's map of parameters to places in the partition, in the order of files."""
        found, names = list(self._optimizer._param_slice_mappings), self._optimizer.param_names
        for buffer in self._optimizer.buffers:
            if buffer.striped or buffer.number in layouts:
                layout = layouts.get(buffer.number)
                members = buffer.zeros_members() if layout is None else buffer.members_in(layout)
                found[buffer.number] = OrderedDict(
                    (names[member.param], fragment_address(**member.in_shard._asdict())) for member in members
                )
        return found

    # Loads ########################################################################################

    def check(self, state: State) -> None:
        """Refuse a rank's state dict that is sharded otherwise: DeepSpeed would pad a shard that is too short.

        Raises:
            ValueError: it is of another stage, sharded over another number of ranks, or of parameters elsewhere.
        """
        stage, count = int(state.get(ZERO_STAGE, 1)), state[PARTITION_COUNT]
        wanted, buffers = self._optimizer.partition_count, self._optimizer.buffers
        if stage > 2 or count != wanted:
            raise sharded_otherwise(
                f"of stage {stage} and sharded over {count} ranks",
                f"are of stage 1 or 2 and sharded over {wanted} ranks (an entry for each parameter group)",
            )
        if PARAM_SLICE_MAPPINGS not in state:  # of an older DeepSpeed
            return
        layouts = _own_layouts(state)
        for number, layout in layouts.items():
            numel = buffers[number].numel if number < len(buffers) else 0
            if layout.numel != numel:
                raise sharded_otherwise(
                    f"of {layout.numel} elements in parameter group {number}", f"have {numel} in that group"
                )
        saved, own = _described(state[PARAM_SLICE_MAPPINGS]), _described(self._mappings(layouts))
        if difference := first_difference(saved, own, set(self._optimizer.param_names.values())):
            raise sharded_otherwise(
                f"in another order ({difference})",
                "go by round_robin_gradients, the parameter groups and the sizes of parameters",
            )

    def as_held(self, states: Sequence[State], optimizer_states: bool, fp32_weights: bool) -> list[State]:
        """Return state dicts of all ranks with this rank's as it holds its partitions, whatever its file's order.

        Args:
            states: of a checkpoint.
            optimizer_states, fp32_weights: whether these are loaded.

        Raises:
            ValueError: see ``check``.
        """
        optimizer, group = self._optimizer, self._optimizer.dp_process_group
        rank, shown = dist.get_rank(group=group), list(states)
        own_order = OWN_ORDER in shown[rank]
        self._check_together(shown[rank], own_order)
        if optimizer_states and not own_order:
            groups = zip(optimizer.buffers, optimizer.optimizer.param_groups, strict=True)
            muon = [buffer for buffer, row in groups if row.get("use_muon", False)]
            shown[rank] = with_own_momentum(muon, shown[rank], group)
        if own_order or (self._striped and (optimizer_states or fp32_weights)):
            shown[rank] = _as_held(optimizer.buffers, shown[rank])
        return shown

    def _check_together(self, state: State, own_order: bool) -> None:
        """Refuse a state dict on all ranks if one does, where the rest of the load is collective."""
        problem: ValueError | None = None
        try:
            self.check(state)
        except ValueError as error:
            problem = error
        together = bool(self._striped) or own_order or uses_muon(self._optimizer.optimizer)
        elsewhere = together and any_rank(problem is not None, self._optimizer.dp_process_group)
        if problem is not None or elsewhere:
            raise problem or sharded_otherwise("otherwise on another rank", "are not")


def require_one_value_per_element(states: State, whole: Container[int]) -> None:
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


def under_deepspeeds_names(state: State) -> dict[str, Any]:
    """Return a rank's state dict without what DeepSpeed does not know, in whatever order it is: for readers that go by
    ``PARAM_SLICE_MAPPINGS``, which say where parameters are in that order."""
    named = ((SINGLE_PARTITION_OF_FP32_GROUPS if key == OWN_PARTITIONS else key, state[key]) for key in state)
    return {key: value for key, value in named if key != OWN_ORDER}


def _own_layouts(state: State) -> dict[int, FlatLayout]:
    """Return the layouts of flat buffers that a file has in its own order, by their numbers."""
    places = enumerate(state.get(OWN_ORDER) or ())
    return {number: FlatLayout(**place["layout"]) for number, place in places if place is not None}


def _described(mappings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [
        (name, f"at {piece.start} of group {number}, {piece.numel} elements")
        for number, group in enumerate(mappings)
        for name, piece in group.items()
    ]


def _as_held(buffers: Iterable[FlatBuffer], state: State) -> dict[str, Any]:
    """Return this rank's state dict with partitions as they are here, whatever the order of its file."""
    layouts = _own_layouts(state)
    base = state[BASE_OPTIMIZER_STATE]  # elastic ones have a list
    weights = list(state[OWN_PARTITIONS if OWN_ORDER in state else SINGLE_PARTITION_OF_FP32_GROUPS])
    paddings = list(state[GROUP_PADDINGS])
    states = dict(enumerate(base)) if not isinstance(base, dict) else dict(base["state"])
    for buffer in (buffer for buffer in buffers if buffer.striped or buffer.number in layouts):
        group, source = buffer.number, layouts.get(buffer.number, buffer.zeros_layout)
        number = group if not isinstance(base, dict) else base["param_groups"][group]["params"][0]
        moved = _moved(buffer, source, weights[group], states.get(number, {}))
        weights[group], states[number] = moved
        paddings[group] = 0 if buffer.striped else buffer.zeros_padding
    moved_base: Any = [states[group] for group in range(len(base))] if not isinstance(base, dict) else None
    return {
        **under_deepspeeds_names(state),
        SINGLE_PARTITION_OF_FP32_GROUPS: weights,
        GROUP_PADDINGS: paddings,
        BASE_OPTIMIZER_STATE: moved_base if moved_base is not None else {**base, "state": states},
    }


def _moved(
    buffer: FlatBuffer, source: FlatLayout, weights: Tensor, states: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return weights and states of a partition as they are here. Collective, unless they are so already."""
    whole = {source.chunk, weights.numel()}
    require_one_value_per_element(states, whole)
    if source == buffer.layout:
        return weights, dict(states)
    from_saved = Relayout(source, buffer.layout, buffer.group)
    moved = from_saved.move(_filled(weights, source.chunk))
    return moved, {
        key: from_saved.move(_filled(value, source.chunk))
        if isinstance(value, Tensor) and value.dim() and value.numel() in whole
        else value
        for key, value in sorted(states.items())
    }


def with_own_momentum(buffers: Sequence[FlatBuffer], state: State, group: ProcessGroup | None) -> dict[str, Any]:
    """Return this rank's state dict with the momentum of its partition, in DeepSpeed's order; see Note [Momentum of
    DeepSpeed's stages].

    Args:
        buffers: those of Muon.
        state: of this rank.
        group: the ranks that share the optimizer's dense states. Those that share experts' are among them, and the
            others have experts of the same shapes, saved alike.

    Raises:
        ValueError: on all of them, if it is that of other elements.
    """
    base = state[BASE_OPTIMIZER_STATE]
    if not buffers or not isinstance(base, dict):
        return dict(state)
    numbers = [base["param_groups"][buffer.number]["params"][0] for buffer in buffers]
    saved = [base["state"].get(number, {}).get(MOMENTUM) for number in numbers]
    members = [list(buffer.zeros_members()) for buffer in buffers]
    chunks = [buffer.zeros_chunk for buffer in buffers]
    lengths = [chunk if one is None else one.numel() for one, chunk in zip(saved, chunks, strict=True)]
    # On some ranks both may be as long, and DeepSpeed has none where a rank has nothing of a parameter group.
    others = [length != chunk for length, chunk in zip(lengths, chunks, strict=True)]
    wrong = [
        other and length != sum(member.param.numel() for member in some)
        for other, length, some in zip(others, lengths, members, strict=True)
    ]
    alike = all_reduce_max(torch.tensor([[one is not None for one in saved], others, wrong]).float(), group).bool()
    if alike[2].any():
        raise sharded_otherwise(f"for Muon's momentum of {lengths} elements", f"are for {chunks} elements")
    momenta = {}
    for place, (held, whole) in enumerate(alike[:2].T.tolist()):
        if held:
            one = saved[place] if saved[place] is not None else torch.zeros(lengths[place])
            one = unscaled(state, one, offloaded=not whole and one.dtype == torch.float32)
            momenta[numbers[place]] = of_partition(one, members[place], chunks[place]) if whole else one
    return {**state, BASE_OPTIMIZER_STATE: {**base, "state": with_momentum(base["state"], momenta)}}


def _filled(chunk: Tensor, numel: int) -> Tensor:
    return torch.nn.functional.pad(chunk, (0, numel - chunk.numel())) if chunk.numel() < numel else chunk
