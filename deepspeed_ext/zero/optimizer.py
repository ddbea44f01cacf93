# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The contract of our optimizers: what pipelines, checkpoints, LoCo and patches may expect of one, at any stage.

``isinstance(engine.optimizer, ParoOptimizer)`` tells whether an engine has one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any
from unittest import mock

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from deepspeed_ext.comm.agreement import all_reduce_max
from deepspeed_ext.comm.hops import ErrorState, JointErrorState
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.comm.relayout import SendsLater
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.overrides import override
from deepspeed_ext.strategy import Strategy, full_bucket
from deepspeed_ext.zero.families import DENSE, Families
from deepspeed_ext.zero.muon import Muon
from deepspeed_ext.zero.norms import Norms
from deepspeed_ext.zero.outer import InnerStepsOnly
from deepspeed_ext.zero.resync import Resync
from deepspeed_ext.zero.shards import CrossingSpan
from deepspeed_ext.zero.state_dtypes import keep_state_dtypes
from deepspeed_ext.zero.streams import ReductionStream
from deepspeed_ext.zero.writers import CheckpointWriters


class ParoOptimizer(ZeROOptimizer, ABC):
    """A ZeRO optimizer with model states placed by a strategy; DeepSpeed's own class of a stage comes after it.

    It is what ``Muon`` is told of flat shards by (``FlatShards``).

    Attributes:
        strategy: where model states are.
        families: of parameters, with their process groups and hops; see Note [Families] in ``families.py``.
        gradients: on their way to the optimizer's shard: of each family, by its name.
        reductions: the stream on which these move.
        norms: how ranks agree on norms and overflows.
        resync: tells when updated parameters travel as they are.
        writers: which ranks write files of optimizer states.
        outer: what happens between groups beside that.
        complete_gradients: called at the accumulation boundary, when gradients are where the optimizer's states are:
            adds what else belongs to them.
        overlaps_micro_steps: whether the last buckets of a micro-step may stay on the wire under the next one: where
            nobody reads gradients between the two.
        flush_follows: whether the backward that runs is the last one before a boundary that somebody else declares.
        sends_later: sends what ``state_dict`` has of other ranks later; None to do so at once.
        is_saved: whether a checkpoint is being saved, for which nobody changes what ranks hold.
        before_step: called when a step begins, on all ranks; may raise: then nothing has been done.
        before_change: called before the optimizer's states are changed or moved otherwise: somebody may read them.
    """

    sends_later: SendsLater | None = None
    is_saved = False
    before_step: Callable[[], None] = staticmethod(lambda: None)
    before_change: Callable[[], None] = staticmethod(lambda: None)
    complete_gradients: Callable[[], None] = staticmethod(lambda: None)
    outer = InnerStepsOnly()
    overlaps_micro_steps = False
    flush_follows = False

    strategy: Strategy
    families: Families
    topology: Topology  # of dense parameters
    gradients: Mapping[str, Any] = MappingProxyType({})  # a stage says of which kind
    reductions: ReductionStream
    norms: Norms
    resync: Resync
    writers: CheckpointWriters
    _bucket: int  # elements of a full one
    _least_numel: int  # elements that a trained parameter has at least
    _scale_of_step: float | None = None  # DeepSpeed's loss scale when the step began that runs; None outside of steps
    _autocast_scale: float | None = None  # of torch's scaler in this step, once it has been asked for
    _begun = False  # whether the step that comes has begun by the end of an accumulation that the caller owns
    _last_was_known = False  # whether the last micro-batch of an accumulation was known before its backward

    # Attributes of DeepSpeed's, of both stages.
    optimizer: Any
    loss_scale: float
    overflow: bool
    offloaded_states: set[OffloadStateTypeEnum]
    reduce_bucket_size: int
    torch_autocast_gradscaler: Any
    _backward_active_depth: int

    # Where optimizer states and gradients are #########################################################

    @abstractmethod
    def owned_span(self, param: nn.Parameter) -> Span:
        """Return the elements of a trained parameter whose optimizer states this rank has, if any."""

    @abstractmethod
    def owned_gradient(self, param: nn.Parameter) -> Tensor:
        """Return the gradient of these elements, 1D, at the accumulation boundary; a view."""

    @abstractmethod
    def crossing_spans(self) -> list[CrossingSpan]:
        """Return where each trained parameter's elements are among the gradients of this rank that cross."""

    @abstractmethod
    def check_states(self, state: Mapping[str, Any]) -> None:
        """Refuse a rank's state dict that is sharded otherwise.

        Raises:
            ValueError: it is.
        """

    @contextmanager
    def being_saved(self, sends_later: SendsLater | None) -> Iterator[None]:
        """Let ``state_dict`` be for a checkpoint in this context."""
        self.is_saved, self.sends_later = True, sends_later
        try:
            yield
        finally:
            self.is_saved, self.sends_later = False, None

    # The accumulation boundary ########################################################################

    @abstractmethod
    def _sync_gradients(self) -> None:
        """Complete the gradients of the optimizer's shard: g -> os, all parameters on all ranks, used or not."""

    @property
    def _is_last_backward(self) -> bool:
        """Whether the last backward of an accumulation runs, as far as the engine knows. A backward that a forward
        runs inside is none, and comes before the engine has told."""
        return self.flush_follows or (self._backward_active_depth > 0 and self.is_gradient_accumulation_boundary())

    def _end_micro_step(self) -> None:
        """End a micro-step whose buckets have been flushed; at the accumulation boundary move g to os.

        Raises:
            RuntimeError: the backward was the last one of an accumulation, and is not when it ends.
        """
        boundary = self.is_gradient_accumulation_boundary()
        self._last_was_known = boundary or self.flush_follows
        if boundary:
            self._sync_gradients()
        elif self._has_left and not self.flush_follows:
            raise RuntimeError(
                "The accumulation boundary was taken back during a backward: gradients are already on their way "
                "between groups. Set it before the backward, or zero_optimization.overlap_comm to false."
            )
        elif not self.overlaps_micro_steps:
            self._finish_buckets()

    def _is_full(self, bucket: Any) -> bool:
        """Whether no other parameter fits into a bucket of DeepSpeed's, which would keep it until one does not: for as
        long as the backward of another layer takes."""
        return bool(bucket.elements and bucket.elements + self._least_numel > self._bucket)

    def _measure_buckets(self, numels: Iterable[int]) -> None:
        """Decide when buckets are full, from the elements of all trained parameters, of which empty ones do not
        count."""
        filled = [numel for numel in numels if numel]
        self._bucket = full_bucket(self.reduce_bucket_size, sum(filled))
        self._least_numel = min(filled, default=1)

    def _finish_buckets(self) -> None:
        """Wait for the buckets that are on the wire, in order on the current stream."""
        with self.reductions.after_current():
            for gradients in self.gradients.values():
                gradients.drain()
        self.reductions.wait()

    @property
    def _has_left(self) -> bool:
        """Whether gradients of this accumulation are on their way as if they were complete."""
        return any(gradients.has_left for gradients in self.gradients.values())

    def _learn_from_first_step(self) -> None:
        """Learn which parameters rest, once the last micro-batch of an accumulation was known. Collective, once."""
        if self._last_was_known:
            for gradients in self.gradients.values():
                gradients.learn(partial(all_reduce_max, group=self.topology.world))

    def send_whole(self) -> None:
        """Make all ranks hold the optimizer's weights, rounded to the parameters' dtype, where they may not.

        See Note [Resync] in ``resync.py``. Collective.

        Raises:
            RuntimeError: parameters are offloaded.
        """
        if not self.resync.always:
            self.send_parameters()

    @abstractmethod
    def send_parameters(self) -> None:
        """Make all ranks hold the optimizer's weights, which somebody has set. Collective.

        Raises:
            RuntimeError: parameters are offloaded.
        """

    def _require_parameters(self) -> None:
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            raise RuntimeError(
                "Parameters are offloaded, and with zero_optimization.paro_quantized_updates or paro_outer_optimizer "
                "all ranks are sent them before a checkpoint is saved, and after a load. Call engine.reload_states() "
                "before."
            )

    @override
    def finalize_gradient_accumulation_boundary(self) -> None:
        """End an accumulation that the caller owns (``managed_gradient_accumulation`` false): at ``engine.step()``."""
        self.before_step()
        self.set_gradient_accumulation_boundary(True)
        self._sync_gradients()
        self._begun = True

    @override
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        """Tell reductions that remember whether a step was skipped."""
        self._begin_step()
        try:
            done = super().step(closure)
        finally:
            self._scale_of_step = None
            self.muon.finish_step(False)  # where it has not been told otherwise
        self._finish_step()
        return done

    def _begin_step(self) -> None:
        if not self._begun:  # it may raise, which is too late once gradients have been reduced for this step
            self.before_step()
        self._begun = False
        self.outer.begin_step()
        self._scale_of_step = float(self.loss_scale)
        self.resync.vote()

    def _finish_step(self) -> None:
        if self._autocast_scale is not None:  # in use: the host asks the device for it here, not for each message
            self._autocast_scale = None
            self.gradient_scale()
        self.error_state.finish_step(not self.overflow)
        self.outer.finish_step(not self.overflow)
        for family in self.families.values():
            family.gather.finish_step()

    @property
    def _stepping(self) -> bool:
        """Whether a step runs."""
        return self._scale_of_step is not None

    def gradients_dropped(self) -> None:
        """Called when what was reduced will not be applied, outside of a step, which tells itself."""
        if not self._stepping:
            self.error_state.finish_step(False)

    # What takes the place of gradients, in a step ######################################################

    @cached_property
    def muon(self) -> Muon:
        """What Muon's step needs whole."""
        return Muon(self)

    def _update_factor(self, number: int, unscaled: set[int] | None) -> float:
        """Serve ``begin_replacing_gradient``.

        Args:
            number: of the flat shard.
            unscaled: DeepSpeed's record of updates that its loss scale has to multiply; None on the host, where it
                multiplies none.
        """
        if unscaled is None:
            return self.gradient_scale()
        unscaled.add(number)
        return self.gradient_scale() / (float(self.loss_scale) if self._scale_of_step is None else self._scale_of_step)

    # What a lossy reduction keeps #####################################################################

    @property
    def error_state(self) -> ErrorState:
        """What the hops between groups keep."""
        several = len(self.families) > 1
        kept = {
            (("families", name) if several else ()) + place: state
            for name, family in self.families.items()
            for place, state in family.reduce.inter.error_states().items()
        }
        if kept.keys() == {()}:
            return kept[()]
        return JointErrorState(kept, lambda buffer: ("families", self.family_of_buffer(buffer)) if several else ())

    @abstractmethod
    def family_of_buffer(self, buffer: int) -> str:
        """Return the family of what a hop between groups is told to be of flat buffer number ``buffer``."""

    def _take(self, strategy: Strategy, families: Families, reductions: ReductionStream) -> None:
        """Take the parts that both stages have. The families' hops are this optimizer's from now on."""
        self.strategy, self.families, self.reductions = strategy, families, reductions
        self.topology = families[DENSE].topology
        self.norms = Norms(self.topology.replica_group(strategy.os))
        self.resync = Resync(strategy, self.topology, [family.gather for family in families.values()])
        for family in families.values():
            family.reduce.inter.scale = self.gradient_scale

    def gradient_scale(self) -> float:
        """Return what gradients are multiplied with in this step: by DeepSpeed's loss scale, and by torch's."""
        if self._autocast_scale is None:
            scaler = self.torch_autocast_gradscaler
            self._autocast_scale = float(scaler.get_scale()) if scaler else 1.0
        # In a step DeepSpeed's may have changed for the next ones.
        scale = float(self.loss_scale) if self._scale_of_step is None else self._scale_of_step
        return scale * self._autocast_scale

    @override
    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Offload the errors that are kept with DeepSpeed's states."""
        self.before_change()
        super().offload_states(*args, **kwargs)
        self.error_state.offload()
        self.outer.offload()

    @override
    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Move back what an outer optimizer has, too."""
        self.before_change()
        super().reload_states(*args, **kwargs)
        self.outer.reload()

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Wait for whoever reads the states that are replaced, and keep the dtypes of states."""
        self.before_change()
        with keep_state_dtypes(self.optimizer):
            super().load_state_dict(*args, **kwargs)

    @override
    def refresh_fp32_params(self) -> None:
        """Wait for whoever reads the weights that are replaced by the model's."""
        self.before_change()
        super().refresh_fp32_params()

    @override
    def destroy(self) -> None:
        """Forget errors with DeepSpeed's optimizer."""
        self.before_change()
        self.outer.drop()
        for family in self.families.values():
            family.reduce.inter.errors = family.reduce.inter.sums.errors = ErrorState()
        super().destroy()

    # Norm and overflow: decided alike by all that must act alike ######################################

    @override
    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Make replicas of the optimizer agree on overflow."""
        of_this = super().has_overflow
        return self.norms.overflow(lambda: of_this(partition_gradients))

    @override
    def _model_parallel_all_reduce(self, tensor: Tensor, op: dist.ReduceOp) -> None:
        """Take one norm over all stages."""
        self.norms.reduce(tensor, op, super()._model_parallel_all_reduce)

    def _global_norm(self, norm_of_this: Callable[[], Tensor]) -> Tensor:
        """Return the norm over all parts of the model; see ``Norms.norm``."""
        return self.norms.norm(norm_of_this, super()._model_parallel_all_reduce)


def is_replica(param: Tensor) -> bool:
    """Whether another stage of the pipeline has the parameter as well, and counts it."""
    return bool(getattr(param, PIPE_REPLICATED, False))


@contextmanager
def without_host_synchronization() -> Iterator[None]:
    """Keep DeepSpeed's host from waiting for the device in this context: streams order enough.

    It waits at the end of a micro-step, before buffers that a stream of reductions reads are given back. Ours are
    recorded on that stream, and what has been reduced is read after it; where the host reads it in its own memory, it
    waits there.
    """
    if get_accelerator().resolves_data_dependency():
        yield
        return
    with mock.patch.object(get_accelerator(), "resolves_data_dependency", lambda: True):
        yield
