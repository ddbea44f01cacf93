# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""State dicts of stages 1 and 2, in DeepSpeed's order and in ours.

Checkpoints have partitions in DeepSpeed's order, whatever the layout of flat buffers: its tools put them together by
it. So a rank's states are exchanged with those of other ranks where they are saved and loaded. All of it is collective
over the ranks that share the optimizer's states, if flat buffers have stripes.

Note [Own order]
    To exchange states takes 12 bytes of each parameter of a shard over the links between groups, while nobody trains.
    So they may be saved in the order in which ranks hold them: ``"checkpoint": {"zero_order": false}``, which
    asynchronous saves have by default. Such a file says for each flat buffer where its elements are (``Place``), and
    how they would be in DeepSpeed's order, so that files can be put into that without a model
    (``checkpoint/in_order.py``).

    DeepSpeed takes partitions for its own without asking. So they have another name in these files,
    ``OWN_PARTITIONS``, and DeepSpeed, which looks for its own, fails instead.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    PARAM_SLICE_MAPPINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)
from deepspeed.utils import groups
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import all_reduce_max, any_rank
from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.relayout import Relayout
from deepspeed_ext.zero.families import DENSE
from deepspeed_ext.zero.flat.buffers import FlatBuffer
from deepspeed_ext.zero.momentum import of_partition, sharded_otherwise, unscaled, with_momentum
from deepspeed_ext.zero.muon import MOMENTUM
from deepspeed_ext.zero.parameter_order import first_difference

State = Mapping[str, Any]

OWN_ORDER = "paro_own_order"  # in a state dict: a ``Place`` for each flat buffer that is not in DeepSpeed's order
OWN_PARTITIONS = "paro_partition_of_fp32_groups"  # the optimizer's weights then


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


def in_zeros_order(buffer: FlatBuffer, weights: Tensor, states: State) -> tuple[Tensor, dict[str, Any]]:
    """Return the optimizer's weights and states of a partition in DeepSpeed's order, on the host.

    Args:
        buffer: one with stripes.
        weights, states: of this rank's partition.
    """
    to_zeros = Relayout(buffer.layout, buffer.zeros_layout, buffer.group)
    moved = {
        key: to_zeros.move(states[key]).cpu()
        for key in sorted(states)
        if isinstance(states[key], Tensor) and states[key].shape == weights.shape
    }
    return to_zeros.move(weights.detach()).cpu(), {**states, **moved}


def mappings(
    buffers: Iterable[FlatBuffer],
    parents: Sequence[Any],
    names: Mapping[nn.Parameter, str],
    layouts: Mapping[int, FlatLayout] = MappingProxyType({}),
) -> list[Any]:
    """Return DeepSpeed's map of parameters to places in the partition, ``parents``, in the order of files.

    Args:
        buffers: all.
        parents: of each buffer, as it is held.
        names: of parameters.
        layouts: of buffers that files have in an order of their own, by their numbers; others are in DeepSpeed's.
    """
    found = list(parents)
    for buffer in (buffer for buffer in buffers if buffer.striped or buffer.number in layouts):
        layout = layouts.get(buffer.number)
        members = buffer.zeros_members() if layout is None else buffer.members_in(layout)
        found[buffer.number] = OrderedDict(
            (names[member.param], fragment_address(**member.in_shard._asdict())) for member in members
        )
    return found


class Place(TypedDict):
    """Where the elements of a flat buffer are, of which a file has one chunk.

    Attributes:
        layout: fields of the ``FlatLayout``.
        cell: number of the chunk.
        experts: which experts the buffer has: their expert-parallel rank; -1 for other parameters.
        zeros: elements of the buffer in DeepSpeed's order, padding included.
        zeros_padding: how many of this file's chunk are padding then.
        zeros_mapping: where parameters are in it then; as in ``PARAM_SLICE_MAPPINGS``.
    """

    layout: dict[str, Any]
    cell: int
    experts: int
    zeros: int
    zeros_padding: int
    zeros_mapping: Mapping[str, Any]


def in_own_order(
    state: State, buffers: Iterable[FlatBuffer], zeros_mappings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a rank's state dict as a file has it in own order; see Note [Own order].

    Args:
        state: DeepSpeed's, with partitions as they are held.
        buffers: all, some with stripes.
        zeros_mappings: of this rank, as they would be in DeepSpeed's order.
    """
    places: list[Place | None] = [
        Place(
            layout=asdict(buffer.layout),
            cell=buffer.rank,
            experts=-1 if buffer.family.name == DENSE else groups._get_expert_parallel_rank(buffer.family.name),
            zeros=buffer.zeros_layout.numel,
            zeros_padding=buffer.zeros_padding,
            zeros_mapping=mapping,
        )
        if buffer.striped
        else None
        for buffer, mapping in zip(buffers, zeros_mappings, strict=True)
    ]
    named = {OWN_PARTITIONS if key == SINGLE_PARTITION_OF_FP32_GROUPS else key: state[key] for key in state}
    weights = zip(named[OWN_PARTITIONS], places, strict=True)
    plain = [one if place is None else one.detach() for one, place in weights]  # as in DeepSpeed's order
    return {**named, OWN_PARTITIONS: plain, OWN_ORDER: places}


def under_deepspeeds_names(state: State) -> dict[str, Any]:
    """Return a rank's state dict without what DeepSpeed does not know, in whatever order it is: for readers that go by
    ``PARAM_SLICE_MAPPINGS``, which say where parameters are in that order."""
    named = ((SINGLE_PARTITION_OF_FP32_GROUPS if key == OWN_PARTITIONS else key, state[key]) for key in state)
    return {key: value for key, value in named if key != OWN_ORDER}


def own_layouts(state: State) -> dict[int, FlatLayout]:
    """Return the layouts of flat buffers that a file has in its own order, by their numbers."""
    return {
        number: FlatLayout(**place["layout"])
        for number, place in enumerate(state.get(OWN_ORDER) or ())
        if place is not None
    }


def check(
    state: State,
    partition_count: Any,
    buffers: Sequence[FlatBuffer],
    own_mappings: Callable[..., Sequence[Any]],
    names: Container[str],
) -> None:
    """Refuse a rank's state dict that is sharded otherwise: DeepSpeed would pad a shard that is too short.

    Args:
        state: of a checkpoint.
        partition_count: over how many ranks states are sharded here: an entry for each parameter group.
        buffers: all.
        own_mappings: gives those of this rank, with given ``layouts``; see ``mappings``.
        names: of all parameters.

    Raises:
        ValueError: it is of another stage, sharded over another number of ranks, or of parameters elsewhere.
    """
    stage, count = int(state.get(ZERO_STAGE, 1)), state[PARTITION_COUNT]
    if stage > 2 or count != partition_count:
        raise sharded_otherwise(
            f"of stage {stage} and sharded over {count} ranks",
            f"are of stage 1 or 2 and sharded over {partition_count} ranks (an entry for each parameter group)",
        )
    if PARAM_SLICE_MAPPINGS not in state:  # of an older DeepSpeed
        return
    layouts = own_layouts(state)
    for number, layout in layouts.items():
        if number >= len(buffers) or layout.numel != buffers[number].numel:
            wanted = buffers[number].numel if number < len(buffers) else 0
            raise sharded_otherwise(
                f"of {layout.numel} elements in parameter group {number}", f"have {wanted} in that group"
            )
    saved, own = (
        [
            (name, f"at {piece.start} of group {number}, {piece.numel} elements")
            for number, group in enumerate(mapping)
            for name, piece in group.items()
        ]
        for mapping in (state[PARAM_SLICE_MAPPINGS], own_mappings(layouts))
    )
    if difference := first_difference(saved, own, names):
        raise sharded_otherwise(
            f"in another order ({difference})",
            "go by round_robin_gradients, the parameter groups and the sizes of parameters",
        )


def raise_if_any(problem: ValueError | None, group: ProcessGroup | None) -> None:
    """Raise on all ranks of a group if one of them has found a problem. Collective.

    Raises:
        ValueError: this rank's, or that another one has one.
    """
    if any_rank(problem is not None, group):
        raise problem or sharded_otherwise("otherwise on another rank", "are not")


def as_held(buffers: Iterable[FlatBuffer], state: State) -> dict[str, Any]:
    """Return this rank's state dict with partitions as they are here, whatever the order of its file."""
    layouts = own_layouts(state)
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
