# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Leaf module parameters that are fetched and released together: one bucket, one entry in DeepSpeed's records.

Note [Units]
    DeepSpeed's coordinator fetches the parameters of a leaf module together, but keeps records of each: sets, states,
    handles, events. A ``Unit`` represents parameters that are always fetched and released together. The coordinator
    gets units, because ``entries`` replaces ``iter_params`` there. For all other code, a parameter is unchanged:
    it has its own chunk (for checkpoints), its own state (GatheredParameters may gather it alone), and its own data.

    A unit is available if all its parameters are. If some have been gathered alone, only the others are gathered.

Note [A linear function without overhead]
    DeepSpeed replaces ``torch.nn.functional.linear`` with an autograd function. It saves the weight itself for the
    backward, not a transposed view, which would keep the gathered data alive. Because that function has a
    ``setup_context``, torch inspects signatures in every call. This takes 0.1 to 0.25 ms on the host, more than the
    product of a small expert. ``UnitLinear`` takes its context in ``forward``, so torch inspects nothing. The
    signatures of DeepSpeed's functions before and after a module's backward are cached.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from deepspeed_ext.deepspeed_types import ZeroChunk, ZeroParameter

UNIT = "paro_unit"  # attribute of a parameter: its unit
_ENTRIES = "paro_entries"  # attribute of a leaf module: units and parameters that the coordinator fetches


class LiveElements:
    """Counts the elements of gathered parameters: current number, and maximum."""

    def __init__(self) -> None:
        self.current = self.peak = 0

    def add(self, numel: int) -> None:
        """Count gathered elements; a negative number counts released ones."""
        self.current += numel
        if numel > 0:
            self.peak = max(self.peak, self.current)


class UnitOwner(Protocol):
    """Gathers parameters and units, and counts their elements."""

    live: LiveElements

    def all_gather_coalesced(self, params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> Any:
        """Start to gather parameters and units."""

    def unit_kind(self, param: ZeroParameter) -> Hashable | None:
        """Return the kind of a parameter. Parameters of one kind share a unit; None keeps a parameter out of units."""


class Unit:
    """Parameters that are fetched and released together. DeepSpeed's coordinator treats them as one parameter.

    Args:
        params: ZeRO parameters of one dtype; either all or none of them stay gathered between steps.
    """

    is_external_param = False
    nvme_swapper = None
    ds_secondary_tensor = None

    def __init__(self, params: Sequence[ZeroParameter], owner: UnitOwner) -> None:
        self.params = tuple(params)
        self.owner = owner
        self.all_gather_coalesced = owner.all_gather_coalesced  # called by DeepSpeed's coordinator
        self.ds_id: int = params[0].ds_id
        self.ds_numel = sum(param.ds_numel for param in params)
        self._chunk_numel = sum(param.partition_numel() for param in params)
        self.ds_shape = torch.Size([self.ds_numel])
        self.ds_persist: bool = params[0].ds_persist
        self.requires_grad = any(param.requires_grad for param in params)
        self.ds_status = ZeroParamStatus.NOT_AVAILABLE
        self.ds_active_sub_modules: set[int] = set()
        for param in params:
            setattr(param, UNIT, self)

    def __deepcopy__(self, memo: object) -> "Unit":
        return self  # belongs to the engine, as the parameters' methods do

    @property
    def ds_tensor(self) -> ZeroChunk:
        """Return the chunk of the first parameter; the chunks of all of them are on the same device."""
        return self.params[0].ds_tensor

    def partition_numel(self) -> int:
        """Return the number of elements of a rank's chunks."""
        return self._chunk_numel

    def ds_summary(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the summary that DeepSpeed prints in its messages."""
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": self.ds_numel,
            "parameters": len(self.params),
            "active_sub_modules": self.ds_active_sub_modules,
        }

    def missing(self) -> list[ZeroParameter]:
        """Return the parameters that are not available."""
        return [param for param in self.params if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]

    def partition(self, *_: Any, **__: Any) -> None:
        """Release the parameters, except those that a module outside the unit still uses."""
        stream = None if get_accelerator().is_synchronized_device() else get_accelerator().current_stream()
        seen: set[int] = set()
        released = 0
        empty = None
        for param in self.params:
            if param.ds_active_sub_modules or param.ds_status != ZeroParamStatus.AVAILABLE:
                continue
            if stream is not None and (storage := param.data.untyped_storage().data_ptr()) not in seen:
                seen.add(storage)
                # The gather's stream allocated this storage: its allocator must not reuse it while this one reads it.
                param.data.record_stream(stream)
            if empty is None:
                empty = torch.empty(0, dtype=param.dtype, device=param.device)
            param.data = empty
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE
            released += param.ds_numel
        self.ds_status = ZeroParamStatus.NOT_AVAILABLE
        self.owner.live.add(-released)


class Gathering(Protocol):
    """Parameters that are being gathered."""

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait until the parameters are available."""


class UnitGather:
    """A unit that is being gathered. ``gather`` is the handle of its missing parameters; None if none was missing."""

    def __init__(self, unit: Unit, gather: Gathering | None) -> None:
        self._unit: Unit | None = unit
        self._gather = gather
        unit.ds_status = ZeroParamStatus.INFLIGHT

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait until the unit is available.

        The coordinator calls this again for other units of the same gather. The unit may be released by then, so
        later calls do nothing.
        """
        if self._unit is None:
            return
        if self._gather is not None:
            self._gather.wait(handle_dependency)
        self._unit.ds_status = ZeroParamStatus.AVAILABLE
        self._unit = None


def make_units(leaves: Iterable[nn.Module], owner: UnitOwner) -> list[Unit]:
    """Combine the parameters of leaf modules into units of parameters of one kind."""
    units: list[Unit] = []
    for leaf in leaves:
        kinds: dict[Hashable, list[ZeroParameter]] = {}
        separate: list[ZeroParameter] = []
        others = [entry for entry in leaf.__dict__.get(_ENTRIES, ()) if isinstance(entry, Unit)]  # of other owners
        in_others = {id(param) for unit in others for param in unit.params}
        for param in cast(Iterable[ZeroParameter], leaf.parameters()):
            if id(param) not in in_others:
                kind = None if hasattr(param, UNIT) else owner.unit_kind(param)
                (separate if kind is None else kinds.setdefault(kind, [])).append(param)
        new_units = [Unit(params, owner) for params in kinds.values() if len(params) > 1]
        separate += [params[0] for params in kinds.values() if len(params) == 1]
        units += new_units
        leaf.__dict__[_ENTRIES] = (*others, *new_units, *separate)
    return units


def exclude_from_fetches(module: nn.Module) -> None:
    """Keep the coordinator from fetching parameters of a leaf module that fetches them itself."""
    module.__dict__[_ENTRIES] = ()


def remove_units(leaves: Iterable[nn.Module], units: Iterable[Unit]) -> None:
    """Undo ``make_units``."""
    for unit in units:
        for param in unit.params:
            delattr(param, UNIT)
    for leaf in leaves:
        leaf.__dict__.pop(_ENTRIES, None)


def entries(iter_params: Callable[..., Iterable[Any]], module: Any, recurse: bool = False) -> Iterable[Any]:
    """Return the coordinator's view of a module's parameters: units, and parameters that are in no unit.

    Args:
        iter_params: DeepSpeed's function of that name.
        module, recurse: its arguments. The coordinator recurses into leaf modules, and into the whole model to release
            everything.
    """
    if not recurse:
        return iter_params(module, recurse)
    listed = module.__dict__.get(_ENTRIES)
    if listed is not None:
        return (*listed, *(p for _, p in module.ds_external_parameters() if getattr(p, UNIT, None) not in listed))
    return _with_units(iter_params(module, recurse))


def _with_units(params: Iterable[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    for param in params:
        unit = getattr(param, UNIT, None)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit
        if unit is None or param.ds_status != unit.ds_status:  # gathered alone
            yield param


def cache_signatures(model: nn.Module) -> None:
    """Cache the signatures of DeepSpeed's functions, so that torch does not inspect them in every call."""
    for module in model.modules():
        for function in (module.__dict__.get("pre_bwd_fn"), module.__dict__.get("post_bwd_fn")):
            if function is not None:
                function.forward.__signature__ = inspect.signature(function.forward)


class UnitLinear(torch.autograd.Function):
    """DeepSpeed's linear function for weights in units. See Note [A linear function without overhead]."""

    @staticmethod
    def forward(ctx: FunctionCtx, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = LinearFunctionForZeroStage3.forward(input, weight, bias)
        LinearFunctionForZeroStage3.setup_context(ctx, (input, weight, bias), output)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        return LinearFunctionForZeroStage3.backward(ctx, *gradients)


def linear(wrapped: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Call ``torch.nn.functional.linear``: DeepSpeed's replacement for weights in no unit, and under torch.func.

    Also under torch.compile, which cannot trace ``UnitLinear``.
    """
    is_eager = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    if is_eager and hasattr(weight, UNIT):
        product: Tensor = UnitLinear.apply(input, weight, bias)
        return product
    return wrapped(input, weight, bias)
