# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The order of parameters in flat optimizer states, which have no names of their own."""

from collections.abc import Container, Sequence

Named = Sequence[tuple[str, object]]


def first_difference(saved: Named, own: Named, names: Container[str]) -> str:
    """Describe the first position at which a checkpoint and a model have different parameters; empty if none.

    A name that the model does not have belongs to a renamed parameter, which only its position identifies. Any other
    name must be at the position where the model has it, since another parameter would get its states.

    Args:
        saved, own: name, and shape or position, of each parameter in the states of the checkpoint and of the model.
        names: names of all parameters of the model, with or without states.
    """
    for number, ((name, layout), (own_name, own_layout)) in enumerate(zip(saved, own, strict=False)):
        if layout != own_layout or (name != own_name and name in names):
            return f"parameter {number} is {name!r} {layout}, expected {own_name!r} {own_layout}"
    return "" if len(saved) == len(own) else f"there are {len(saved)} parameters, expected {len(own)}"
