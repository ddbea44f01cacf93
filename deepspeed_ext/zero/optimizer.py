# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Interface of our optimizers of all stages, for pipelines, checkpoints, LoCo, and patches.

``isinstance(engine.optimizer, ParoOptimizer)`` is true if an engine has one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from deepspeed_ext.comm.hops import ErrorState
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.comm.relayout import DeferredExchange
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.overrides import override, replace_attributes
from deepspeed_ext.strategy import Strategy
from deepspeed_ext.zero.checkpoint_ranks import CheckpointWriters
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import Families, error_state_of
from deepspeed_ext.zero.loss_scale import LossScale
from deepspeed_ext.zero.micro_steps import MicroSteps
from deepspeed_ext.zero.muon import Muon
from deepspeed_ext.zero.norms import Norms
from deepspeed_ext.zero.outer import OuterHooks
from deepspeed_ext.zero.resync import Resync
from deepspeed_ext.zero.sample_weights import SampleWeights
from deepspeed_ext.zero.saved_states import keep_state_dtypes
from deepspeed_ext.zero.shards import InterGroupSpan
from deepspeed_ext.zero.streams import ReductionStream


class GradientTerm(Protocol):
    """A change of gradients after their reduction: the addition of gradients of tied weights or of other groups, or
    a factor."""

    def complete_gradients(self) -> None:
        """Change the gradients in the optimizer's shard. Collective."""


class ParoOptimizer(ZeROOptimizer, ABC):
    """A ZeRO optimizer with model states placed by a strategy. DeepSpeed's class of a stage follows it in the MRO.

    It provides its flat shards to ``Muon`` (``FlatShards``) and to ``OuterOptimizer`` (``OuterShards``).
    """

    context: Context  # constants that all parts share
    strategy: Strategy  # placements of model states
    families: Families  # parameter families; see Note [Families] in ``families.py``
    topology: Topology  # process groups of dense parameters
    reductions: ReductionStream  # stream of gradient reductions
    gradients: Mapping[str, Any] = MappingProxyType({})  # gradients that are being reduced to the shard, by family
    micro_steps: MicroSteps  # backwards of an accumulation
    gradient_scale: LossScale  # loss scale of this step's gradients
    sample_weights: SampleWeights  # weights of micro-batches
    norms: Norms  # global norm and overflow
    resync: Resync  # decides which updates are sent in full
    outer = OuterHooks()  # outer optimizer between groups
    on_step: Callable[[], None] | None = None  # called at the end of each step
    gradient_terms: list[GradientTerm]  # changes of gradients at the accumulation boundary, in this order
    writers: CheckpointWriters  # ranks that write files of optimizer states
    unscaled_updates: set[int] | None  # DeepSpeed's record of flat shards whose gradient is an update without the loss
    # scale; None with optimizer offload
    deferred_exchange: DeferredExchange | None = None  # sends parts of ``state_dict`` later; None: at once
    is_saved = False  # whether a checkpoint is being saved, which changes no model state
    _has_begun_step = False  # whether ``finalize_gradient_accumulation_boundary`` has already begun the next step

    # Attributes of DeepSpeed's optimizers of both stages.
    optimizer: Any  # the torch optimizer that steps on the shards
    loss_scale: float  # factor of the loss in the next backward
    overflow: bool  # whether the latest step was skipped
    offloaded_states: set[OffloadStateTypeEnum]  # states that ``offload_states`` has moved to the host
    torch_autocast_gradscaler: Any  # torch's scaler under fp16 ``torch.autocast``, or None
    _backward_active_depth: int  # nested backwards that run now

    def _attach_parts(self, context: Context) -> None:
        """Create the parts that all stages share. The families' hops now belong to this optimizer."""
        self.context = context
        self.strategy, self.families = context.strategy, context.families
        self.topology, self.reductions = context.topology, context.reductions
        self.gradient_scale = LossScale(self)
        self.micro_steps = MicroSteps(context, self)
        self.norms = Norms(context)
        self.resync = Resync(context)
        self.sample_weights = SampleWeights(self)
        self.gradient_terms = [self.sample_weights]
        for family in context.families.values():
            family.reduce.inter.use_scale(self.sample_weights)

    @cached_property
    def muon(self) -> Muon:
        """Muon's part of a step, which needs complete matrices."""
        return Muon(self.context, self)

    # Placement of optimizer states and gradients ######################################################

    @abstractmethod
    def owned_span(self, param: nn.Parameter) -> Span:
        """Return the elements of a trained parameter whose optimizer states this rank has, if any."""

    @abstractmethod
    def owned_gradient(self, param: nn.Parameter) -> Tensor:
        """Return the gradient of ``owned_span``, 1D, at the accumulation boundary; a view."""

    @abstractmethod
    def owned_gradients(self) -> list[Tensor]:
        """Return all gradients in the optimizer's shard, 1D, at the accumulation boundary; they may be written."""

    @abstractmethod
    def inter_group_spans(self) -> list[InterGroupSpan]:
        """Return the spans of each trained parameter among the gradients that this rank sends between groups."""

    @abstractmethod
    def check_states(self, state: Mapping[str, Any]) -> None:
        """Check that a rank's state dict is sharded as this optimizer's.

        Raises:
            ValueError: it is sharded differently.
        """

    @contextmanager
    def saving(self, deferred_exchange: DeferredExchange | None) -> Iterator[None]:
        """Mark calls of ``state_dict`` in this context as part of a save."""
        self.is_saved, self.deferred_exchange = True, deferred_exchange
        try:
            yield
        finally:
            self.is_saved, self.deferred_exchange = False, None

    # The accumulation boundary ########################################################################

    @abstractmethod
    def sync_gradients(self) -> None:
        """Reduce gradients g -> os into the optimizer's shard: all parameters on all ranks, used or not."""

    def complete_gradients(self) -> None:
        """Change the reduced gradients; see ``GradientTerm``. Collective."""
        for term in self.gradient_terms:
            term.complete_gradients()

    def resync_parameters(self) -> None:
        """Send the optimizer's weights in full to all ranks, rounded to the parameters' dtype, if updates are
        quantized.

        See Note [Resync] in ``resync.py``. Collective.

        Raises:
            RuntimeError: parameters are offloaded.
        """
        if not self.resync.always_in_full:
            self.send_parameters()

    @abstractmethod
    def send_parameters(self) -> None:
        """Send the optimizer's weights, which were set outside of a step, to all ranks. Collective.

        Raises:
            RuntimeError: parameters are offloaded.
        """

    def _require_parameters(self) -> None:
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            raise RuntimeError(
                "Parameters are offloaded, but with zero_optimization.paro_quantized_updates or paro_outer_optimizer "
                "they are sent to all ranks before a checkpoint is saved and after a load. Call "
                "engine.reload_states() first."
            )

    @override
    def scale_if_loss(self, value: Any) -> Any:
        """Multiply a loss by the weight of its micro-batch, and by the loss scale."""
        return super().scale_if_loss(self.sample_weights.weigh(value))

    @override
    def needs_scaler(self) -> bool:
        """Whether a loss needs ``engine.backward`` or ``engine.scale``, as with weights."""
        return self.sample_weights.are_used or bool(super().needs_scaler())

    @override
    def enter_backward(self) -> None:
        """Record that a backward has begun."""
        super().enter_backward()
        self.micro_steps.has_begun = True

    @override
    def finalize_gradient_accumulation_boundary(self) -> None:
        """End an accumulation that the caller owns (``managed_gradient_accumulation`` false): at ``engine.step()``."""
        self.context.before_step()
        self.set_gradient_accumulation_boundary(True)
        self.sync_gradients()
        self._has_begun_step = True

    # The step #########################################################################################

    @override
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        """Step, and notify stateful parts whether the step was skipped."""
        self._begin_step()
        try:
            result = super().step(closure)
        finally:
            self.gradient_scale.end_step()
            self.sample_weights.finish_step()
            self.muon.finish_step(False)  # drops the momentum of a skipped step; an applied step has committed it
        self._finish_step()
        return result

    def _begin_step(self) -> None:
        if not self._has_begun_step:  # it may raise, which is too late after gradients were reduced for this step
            self.context.before_step()
        self._has_begun_step = False
        self.outer.begin_step()
        self.gradient_scale.begin_step()
        self.resync.reduce_requests()

    def _finish_step(self) -> None:
        self.gradient_scale.refresh()
        self.error_state.finish_step(not self.overflow)
        self.outer.finish_step(not self.overflow)
        for family in self.families.values():
            family.gather.finish_step()
        if self.on_step is not None:
            self.on_step()

    def gradients_dropped(self) -> None:
        """Called outside of a step when reduced gradients will not be applied."""
        if not self.gradient_scale.stepping:
            self.error_state.finish_step(False)
            self.sample_weights.finish_step()

    # Errors of lossy reductions #######################################################################

    @property
    def error_state(self) -> ErrorState:
        """Error feedback of the hops between groups."""
        return error_state_of(self.families, self.family_of_buffer)

    @abstractmethod
    def family_of_buffer(self, buffer: int) -> str:
        """Return the family of a flat buffer, by the number that hops between groups use."""

    # States that are moved or replaced ################################################################

    @override
    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Offload error feedback and outer states with DeepSpeed's states."""
        self.context.before_change()
        super().offload_states(*args, **kwargs)
        self.error_state.offload()
        self.outer.offload()

    @override
    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Reload outer states with DeepSpeed's states."""
        self.context.before_change()
        super().reload_states(*args, **kwargs)
        self.outer.reload()

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load states after readers of the old ones have finished, and keep the dtypes of states."""
        self.context.before_change()
        with keep_state_dtypes(self.optimizer):
            super().load_state_dict(*args, **kwargs)
        self.sample_weights.reset()

    @override
    def refresh_fp32_params(self) -> None:
        """Replace the optimizer's weights by the model's after readers of the old ones have finished."""
        self.context.before_change()
        super().refresh_fp32_params()

    @override
    def destroy(self) -> None:
        """Drop error feedback and outer transfers with DeepSpeed's optimizer."""
        self.context.before_change()
        self.outer.drop()
        for family in self.families.values():
            family.reduce.inter.drop_errors()
        super().destroy()

    # Norm and overflow: the same decision on all ranks ################################################

    @override
    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Reduce overflow over all replicas of the optimizer."""
        local_overflow = super().has_overflow
        return self.norms.overflow(lambda: local_overflow(partition_gradients))

    @override
    def _model_parallel_all_reduce(self, tensor: Tensor, op: dist.ReduceOp) -> None:
        """Reduce norms over all pipeline stages."""
        self.norms.reduce(tensor, op, super()._model_parallel_all_reduce)

    def _global_norm(self, local_norm: Callable[[], Tensor]) -> Tensor:
        """Return the norm over all parts of the model; see ``Norms.norm``."""
        return self.norms.norm(local_norm, super()._model_parallel_all_reduce)


def is_replica(param: Tensor) -> bool:
    """Whether another pipeline stage also has the parameter, and counts it."""
    return bool(getattr(param, PIPE_REPLICATED, False))


@contextmanager
def without_host_synchronization() -> Iterator[None]:
    """Disable DeepSpeed's host synchronization in this context, because streams order these operations.

    DeepSpeed synchronizes at the end of a micro-step, before it frees buffers that the reduction stream reads. Our
    buffers are recorded on that stream, and reduced gradients are read after it. With offload the host waits before it
    reads them.
    """
    if get_accelerator().resolves_data_dependency():
        yield
        return
    with replace_attributes(get_accelerator(), resolves_data_dependency=lambda: True):
        yield
