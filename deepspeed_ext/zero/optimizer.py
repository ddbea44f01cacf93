# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The contract of our optimizers: what pipelines, checkpoints, LoCo and patches may expect of one, at any stage.

``isinstance(engine.optimizer, ParoOptimizer)`` tells whether an engine has one.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from deepspeed_ext.comm.agreement import largest
from deepspeed_ext.comm.hops import ErrorState, JointErrorState
from deepspeed_ext.strategy import full_bucket
from deepspeed_ext.zero.crossing_spans import CrossingSpan
from deepspeed_ext.zero.families import DENSE, Families
from deepspeed_ext.zero.filing import Filing
from deepspeed_ext.zero.flat_shards import FlatShards
from deepspeed_ext.zero.muon import Muon
from deepspeed_ext.zero.whole_updates import WholeUpdates


class ParoOptimizer(FlatShards, ZeROOptimizer):
    """A ZeRO optimizer with model states placed by a strategy; DeepSpeed's own class of a stage comes after it.

    Attributes:
        strategy: where model states are.
        families: of parameters, with their process groups and hops; see Note [Families] in ``families.py``.
        gradients: on their way to the optimizer's shard: of each family, by its name.
        filing: which ranks write files of optimizer states.
        complete_gradients: called at the accumulation boundary, when gradients are where the optimizer's states are:
            adds what else belongs to them.
        overlaps_micro_steps: whether the last buckets of a micro-step may stay on the wire under the next one: where
            nobody reads gradients between the two.
        flush_follows: whether the backward that runs is the last one before a boundary that somebody else declares.
    """

    complete_gradients: Callable[[], None] = staticmethod(lambda: None)
    overlaps_micro_steps = False
    flush_follows = False

    families: Families
    gradients: Mapping[str, Any]  # a stage says of which kind
    whole: WholeUpdates
    filing: Filing
    _bucket: int  # elements of a full one
    _least_numel: int  # elements that a trained parameter has at least
    _stepping = False
    _scale_of_step = 1.0  # DeepSpeed's loss scale, when the step began
    _last_was_known = False  # whether the last micro-batch of an accumulation was known before its backward
    _autocast_scale: float | None = None  # of torch's scaler in this step, once it has been asked for
    _over_replicas = False  # whether what is reduced over the parts is so over the replicas as well
    _put_off: bool | None = None  # whether a sum over the parts was asked for; None where it is taken at once

    # Where optimizer states and gradients are #########################################################

    @abstractmethod
    def owned_span(self, param: nn.Parameter) -> tuple[int, int]:
        """Return the elements (start, end) of a trained parameter whose optimizer states this rank has, if any."""

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

    # The accumulation boundary ########################################################################

    @abstractmethod
    def _sync_gradients(self) -> None:
        """Complete the gradients of the optimizer's shard: g -> os, all parameters on all ranks, used or not."""

    @property
    def _is_last_backward(self) -> bool:
        """Whether the last backward of an accumulation runs, as far as the engine knows. A backward that a forward
        runs inside is none, and comes before the engine has told."""
        return self.flush_follows or (self._backward_active_depth > 0 and self.is_gradient_accumulation_boundary())

    @staticmethod
    def _boundary_taken_back() -> RuntimeError:
        """Return the error for a backward that was the last one of an accumulation, and is not when it ends."""
        return RuntimeError(
            "The accumulation boundary was taken back during a backward: gradients are already on their way between "
            "groups. Set it before the backward, or zero_optimization.overlap_comm to false."
        )

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
        with self._reduction_stream():
            for gradients in self.gradients.values():
                gradients.drain()
        self._wait_for_reductions()

    @property
    def _has_left(self) -> bool:
        """Whether gradients of this accumulation are on their way as if they were complete."""
        return any(gradients.has_left for gradients in self.gradients.values())

    def _learn_from_first_step(self) -> None:
        """Learn which parameters rest, once the last micro-batch of an accumulation was known. Collective, once."""
        if self._last_was_known:
            for gradients in self.gradients.values():
                gradients.learn(partial(largest, group=self.topology.world))

    @abstractmethod
    def send_whole(self) -> None:
        """Have all ranks hold the optimizer's weights, rounded to the parameters' dtype, where they may not.

        See Note [Whole updates] in ``whole_updates.py``. Collective.

        Raises:
            RuntimeError: parameters are offloaded.
        """

    def _require_parameters(self) -> None:
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            raise RuntimeError(
                "Parameters are offloaded, and with zero_optimization.paro_quantized_updates all ranks are sent them "
                "before a checkpoint is saved, and behind a load. Call engine.reload_states() before."
            )

    @abstractmethod
    def _reduction_stream(self) -> AbstractContextManager[None]:
        """Run on the stream of reductions, behind everything on the current one."""

    @abstractmethod
    def _wait_for_reductions(self) -> None:
        """Have the current stream wait for that of reductions."""

    def finalize_gradient_accumulation_boundary(self) -> None:
        """End an accumulation that the caller owns (``managed_gradient_accumulation`` false): at ``engine.step()``."""
        self.set_gradient_accumulation_boundary(True)
        self._sync_gradients()

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        """Take DeepSpeed's step, and tell what keeps errors whether it was skipped."""
        self._stepping, self._scale_of_step = True, float(self.loss_scale)
        self.whole.vote()
        try:
            done = super().step(closure)
        finally:
            self._stepping = False
            self.muon.finish_step(False)  # where it has not been told otherwise
        if self._autocast_scale is not None:  # in use: the host asks the device for it here, not for each message
            self._autocast_scale = None
            self.gradient_scale()
        self.error_state.finish_step(not self.overflow)
        for family in self.families.values():
            family.gather.finish_step()
        return done

    def gradients_dropped(self) -> None:
        """Hear that what was reduced will not be applied, outside of a step, which tells itself."""
        if not self._stepping:
            self.error_state.finish_step(False)

    # What takes the place of gradients, in a step ######################################################

    @cached_property
    def muon(self) -> Muon:
        """What Muon's step needs whole."""
        return Muon(self)

    def _update_factor(self, number: int, unscaled: set[int]) -> float:
        """Serve ``take_update``; ``unscaled`` is DeepSpeed's record of updates that its loss scale has to multiply.

        It does not multiply what is on the host.
        """
        if self.updates_on_host:
            return self.gradient_scale()
        unscaled.add(number)
        return self.gradient_scale() / self._scale_of_step

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

    def _take_families(self, families: Families) -> None:
        """Take the families, whose hops are this optimizer's from now on."""
        self.families = families
        self.topology = families[DENSE].topology
        gathers = [family.gather for family in families.values()]
        self.whole = WholeUpdates(self.strategy, self.topology, gathers)
        for family in families.values():
            family.reduce.inter.scale = self.gradient_scale

    def gradient_scale(self) -> float:
        """Return what gradients are multiplied with in this step: by DeepSpeed's loss scale, and by torch's."""
        if self._autocast_scale is None:
            scaler = self.torch_autocast_gradscaler
            self._autocast_scale = float(scaler.get_scale()) if scaler else 1.0
        # In a step DeepSpeed's may have changed for the next ones.
        return (self._scale_of_step if self._stepping else float(self.loss_scale)) * self._autocast_scale

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Offload DeepSpeed's states, and the errors that are kept."""
        super().offload_states(*args, **kwargs)
        self.error_state.offload()

    def destroy(self) -> None:
        """Destroy DeepSpeed's optimizer, and forget errors."""
        for family in self.families.values():
            family.reduce.inter.errors = family.reduce.inter.sums.errors = ErrorState()
        super().destroy()

    # Norm and overflow: decided alike by all that must act alike ######################################

    @property
    def _replicas(self) -> Any:
        """The ranks with the same optimizer states, None if there is one.

        They see the same gradients, unless a backend rounds differently in two groups. One of them skipping a step, or
        clipping by another norm, would let them drift apart for good.
        """
        return self.topology.replica_group(self.strategy.os)

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether one of the replicas has found an overflow. The host asks the device once for all of them."""
        self._over_replicas = True
        try:
            return bool(super().has_overflow(partition_gradients))
        finally:
            self._over_replicas = False

    def _global_norm(self, norm_of_this: Callable[[], Tensor]) -> Tensor:
        """Return the norm over all parts of the model, the largest of all replicas.

        It is -1, as DeepSpeed marks an invalid one, if it is invalid in one part or for one replica.

        Args:
            norm_of_this: gives the norm over the data-parallel ranks of this part, in which what other parts have as
                well counts in one of them.
        """
        norm = self._norm_of_all_parts(norm_of_this)
        norm = torch.where(norm < 0, torch.inf, norm)
        if self._replicas is not None:
            norm = largest(norm, self._replicas)
        return torch.where(norm.isinf(), -1.0, norm)

    def _norm_of_all_parts(self, norm_of_this: Callable[[], Tensor]) -> Tensor:
        """Return the norm over all parts of the model: stages of a pipeline, slices of tensors.

        DeepSpeed takes a sum over the parts for each parameter group or sub-group, of which stages of a pipeline have
        different numbers: ranks would wait for each other forever. So it is one sum.
        """
        self._put_off = False
        try:
            norm = norm_of_this()
            others = self._put_off  # not where the data-parallel ranks are those of all parts
        finally:
            self._put_off = None
        invalid = ~torch.isfinite(norm) | (norm < 0)
        total = torch.stack([torch.where(invalid, 0.0, norm).square(), invalid.to(norm.dtype)])
        total = total.to(get_accelerator().current_device_name())
        if others:
            self._model_parallel_all_reduce(total, dist.ReduceOp.SUM)
        return torch.where(total[1] > 0, -1.0, total[0].sqrt()).to(norm.device)

    def _model_parallel_all_reduce(self, tensor: Tensor, op: dist.ReduceOp) -> None:
        if self._put_off is None:
            super()._model_parallel_all_reduce(tensor, op)
        else:
            self._put_off = True
        if self._over_replicas and self._replicas is not None:
            dist.all_reduce(tensor, op=op, group=self._replicas)


def is_replica(param: Tensor) -> bool:
    """Whether another stage of the pipeline has the parameter as well, and counts it."""
    return bool(getattr(param, PIPE_REPLICATED, False))


@contextmanager
def ordered_by_streams() -> Iterator[None]:
    """Keep DeepSpeed from having the host wait for the device in this context: streams order it enough.

    It does so at the end of a micro-step, before buffers that a stream of reductions reads are given back. Ours are
    recorded on that stream, and what has been reduced is read behind it; the host, which may read it in its own
    memory, waits where it does.
    """
    if get_accelerator().resolves_data_dependency():
        yield
        return
    with mock.patch.object(get_accelerator(), "resolves_data_dependency", lambda: True):
        yield
