# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What of the gradients of sharded parameters crosses together at the accumulation boundary, and what leaves when.

See Note [Leaving early] in ``static_order.py``; here a unit is a bucket of parameters.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.zero.static_order import StaticOrder, idle

BoundaryUnit = list[ZeroParameter]


def units_of(
    params: Iterable[ZeroParameter], bucket: int, dtype_of: Callable[[ZeroParameter], torch.dtype]
) -> list[BoundaryUnit]:
    """Divide parameters into units of one dtype, in the order in which they leave: the model's last ones first.

    Args:
        params: all, those of one unit in this order.
        bucket: elements (of whole parameters) of a unit at most, unless one parameter has more.
        dtype_of: dtype on the wire.
    """
    place = {param.ds_id: number for number, param in enumerate(params)}
    units: list[BoundaryUnit] = []
    filling: dict[torch.dtype, tuple[BoundaryUnit, float]] = {}
    for param in sorted(params, key=lambda param: -param.ds_id):
        unit, numel = filling.get(dtype_of(param), ([], math.inf))
        if numel + param.ds_numel > bucket:
            unit, numel = [], 0
            units.append(unit)
        unit.append(param)
        filling[dtype_of(param)] = unit, numel + param.ds_numel
    units.sort(key=lambda unit: -unit[-1].ds_id)  # the one that is complete first, where gradients come last to first
    return [sorted(unit, key=lambda param: place[param.ds_id]) for unit in units]


class BoundaryUnits:
    """Tells which units leave, as gradients of the last micro-batch get complete.

    A parameter may get several gradients in one backward: one that modules share, each of which is checkpointed
    reentrantly. It must not leave before the last one, of which nothing tells. So in the first step of a run nothing
    leaves early; a parameter that has had several then holds its unit back until the boundary ever after.

    A parameter that no rank has used in that step would hold back all that comes behind it: from then on its unit is
    among the last. That changes the order of units, and not what they hold: no sum depends on it, and no kept error.

    Args:
        units: of ``units_of``.
        name: gives the name of a parameter.
    """

    def __init__(self, units: Sequence[BoundaryUnit], name: Callable[[ZeroParameter], str]) -> None:
        self._name = name
        self._had: set[int] = set()  # ds_ids with a gradient of this backward ...
        self._several: set[int] = set()  # ... and with several ones, ever
        self._used: set[int] = set()  # with one in the first step
        self._learned = False
        self._arrange(units)

    def _arrange(self, units: Iterable[BoundaryUnit]) -> None:
        self._units = list(units)
        self._order = StaticOrder([param.ds_id for param in unit if param.ds_numel] for unit in self._units)

    @property
    def begun(self) -> bool:
        """Whether a unit has left."""
        return self._order.begun

    def ready(self, params: Iterable[ZeroParameter]) -> list[BoundaryUnit]:
        """Take parameters that have got a gradient of the last micro-batch; return the units that leave now.

        Raises:
            RuntimeError: one of them has left before.
        """
        left: list[int] = []
        for param in params:
            if self._order.has_left(param.ds_id):
                raise RuntimeError(
                    f"The parameter {self._name(param)} got another gradient in the last backward of a step, after it "
                    f"was reduced between groups, and in the first step of this run it got one only. Set "
                    f"zero_optimization.overlap_comm to false: then nothing is reduced between groups before a "
                    f"backward has ended."
                )
            if param.ds_id in self._had:
                self._several.add(param.ds_id)
            self._had.add(param.ds_id)
            if not self._learned:
                self._used.add(param.ds_id)
            if self._learned and param.ds_id not in self._several:
                left += self._order.ready(param.ds_id)
        return [self._units[number] for number in left]

    def rest(self) -> list[BoundaryUnit]:
        """Return the units that have not left, in order, and begin anew: the backward has ended."""
        self._had.clear()
        return [self._units[number] for number in self._order.rest()]

    def learn(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Take the first step as it was; from now on units leave early.

        Args:
            largest: gives the largest of all ranks' values, each by itself.
        """
        if self._learned or not self._units:
            return
        members = [param.ds_id for unit in self._units for param in unit if param.ds_numel]
        resting = idle(members, self._used, largest)
        self._arrange(sorted(self._units, key=lambda unit: any(param.ds_id in resting for param in unit)))
        self._learned = True
        self._used.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._had.clear()
        self._order.clear()
