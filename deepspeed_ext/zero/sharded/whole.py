# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters that stay whole on every rank with p = I or G (``paro_modules``).

Note [Whole modules]
    A rank runs a whole module without communication, so ranks may differ in whether they run it. Three things follow:

    - The parameters are gathered when they change: at the start, after each step, and after a load. All ranks start
      these gathers together; the first module that uses a whole parameter waits for them.
    - ZeRO-3's record of the order of modules, which ranks compare, has no modules of which all parameters are whole.
    - Gradients stay on the rank until its backward ends. Then they are reduced to g in one order on all ranks, with
      zeros for those that this rank does not have.

    Everything else is as for other parameters: each rank also has its shard, from which whole parameters are gathered
    and which an optimizer step changes, so checkpoints do not depend on ``paro_modules``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.overrides import replace_attributes
from deepspeed_ext.zero.module_placements import is_whole
from deepspeed_ext.zero.sharded.gathers import Gathers


class WholeParameters:
    """The whole parameters of a model. See Note [Whole modules].

    Args:
        params: all parameters of the model.
        gathers: gathers of dense parameters.
    """

    def __init__(self, params: Iterable[ZeroParameter], gathers: Gathers) -> None:
        self._params = [param for param in params if is_whole(param)]
        # Once: an optimizer also changes shards of parameters that are frozen later.
        self._trained = [param for param in self._params if param.requires_grad]
        self._gathers = gathers
        gathers.whole = self
        self._handles: list[Any] = []
        for param in self._params:
            param.ds_persist = True  # a module that has used it does not release it

    @property
    def in_flight(self) -> bool:
        """Whether a gather has been started that nothing has waited for."""
        return bool(self._handles)

    def gather_trained(self) -> None:
        """Start to gather the parameters that a step has changed. Collective."""
        self.gather(self._trained)

    def gather(self, params: Sequence[ZeroParameter] | None = None) -> None:
        """Start to gather parameters, by default all, after their shards have changed. Collective."""
        self.wait()
        changed = self._params if params is None else params
        self._drop(changed)
        self._handles = self._gathers.start_batches(changed)

    def wait(self) -> None:
        """Make the parameters available on the current stream."""
        while self._handles:
            self._handles[0].wait()
            self._handles.pop(0)

    def release(self) -> None:
        """Drop the whole parameters, and keep their shards."""
        self.wait()
        self._drop(self._params)

    def _drop(self, params: Iterable[ZeroParameter]) -> None:
        available = [param for param in params if param.ds_status == ZeroParamStatus.AVAILABLE]
        if available:
            self._gathers.drop(available)

    def keep_in(self, release_all: Callable[[], None]) -> Callable[[], None]:
        """Return DeepSpeed's function that releases the parameters of a model, changed to keep these."""

        def release_others() -> None:
            with ExitStack() as stack:
                for module in (partitioned_param_coordinator, parameter_offload):
                    others = partial(_without_whole, module.iter_params)
                    stack.enter_context(replace_attributes(module, iter_params=others))
                release_all()

        return release_others if self._params else release_all


def _without_whole(iter_params: Any, module: nn.Module, recurse: bool = False) -> Iterator[Any]:
    return (param for param in iter_params(module, recurse) if not is_whole(param))
