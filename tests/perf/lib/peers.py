# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training methods behind one interface, for benchmarks that compare them. A group is a node of
consecutive ranks. The model returns its own loss, and its ``blocks`` are gathered as one. All methods train with the
same optimizer and average over micro-batches and ranks; each is set up as its documentation proposes for gradient
accumulation (``Method.setup``). They train in fp32, or compute in bf16 and update fp32 masters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from deepspeed_ext.model_bytes import measure_state_bytes, storage_bytes
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import Placement, StateBytes, parse_strategy
from deepspeed_ext.zero.sharded.coordinator import drop_references
from deepspeed_ext.zero.updates_in_flight import wait_for_updates
from tests.perf.lib.rings import RingReduceScatter, ring_reductions
from tests.perf.lib.settings import HSDP_REDUCTIONS, MUON, NATIVE, RINGS, SHIPPED

ADAMW: dict[str, Any] = {"eps": 1e-4, "weight_decay": 0.01}
# Adam's part is for what is no matrix: models here have nothing of that.
MUON_RATE = 1e-2
MUON_PARAMETERS = {"muon_lr": MUON_RATE, "weight_decay": 0.01}
# As a model that fills memory needs it: gathered for forward and again for backward, and nothing stays whole. Blocks
# are leaf modules besides: each is gathered as one, as FSDP2 does it, which takes half of the time.
LEAN = {f"stage3_{key}": 0 for key in ("max_reuse_distance", "max_live_parameters", "param_persistence_threshold")}
# ZeRO-1 and ZeRO-2, what matters on gloo: with a reduce to each rank in place of an all-reduce, ranks receive 22 % and
# 27 % less from other nodes. The norm of the gradients is there for clipping only.
WHOLE = {"use_multi_rank_bucket_allreduce": False, "compute_grad_norm": False}
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """The model, its data, and the settings that all methods share."""

    accumulation: int  # micro-batches in a step
    group_size: int  # ranks in a node, m
    make_model: Callable[[], nn.Module]  # makes the same model on every call and every rank
    # Elements in a bucket of a strategy, which overlaps the hops of consecutive buckets, and of a stage. Stages are
    # fastest with one bucket, which their default of 500 M would be here: a smaller one belongs to few ranks.
    bucket: int = 5_000_000
    stage_bucket: int = 50_000_000
    ddp_mib: float = 25.0  # MiB of a bucket of DDP
    # zero, config: additional keys of ``zero_optimization``, and of the configuration, for all DeepSpeed methods.
    zero: Mapping[str, Any] = field(default_factory=dict)
    stages: Mapping[str, Any] = field(default_factory=dict)  # additional keys of ZeRO-1 and ZeRO-2, in rings
    # Keys for methods that gather parameters for each use, see ``LEAN``.
    lean: Mapping[str, Any] = field(default_factory=lambda: LEAN)
    optimizer: str = "AdamW"  # "AdamW" or "Muon"
    config: Mapping[str, Any] = field(default_factory=dict)
    # Returns all full parameters of a model, in an order that all methods share, as one 1D tensor.
    whole: Callable[[nn.Module], Tensor] = lambda model: torch.cat([part.flatten() for part in gathered(model)])
    dtype: torch.dtype = torch.float32  # dtype of compute, fp32 or bf16; masters are in fp32
    rate: float = 1e-3  # AdamW's learning rate
    # Whether FSDP2 gathers a block while the previous one runs, as it does on a device, whose host runs ahead.
    prefetch: bool = False

    @property
    def adamw(self) -> dict[str, Any]:
        return {**ADAMW, "lr": self.rate}

    @property
    def mixed(self) -> bool:
        """Whether compute has fewer bits than the masters."""
        return self.dtype != torch.float32

    @classmethod
    def overlapping(cls, steps: int, group_size: int, make_model: Callable[[], nn.Module], block: int) -> "Workload":
        """Return a workload with buckets of the size of a model's block, and all overlap that DeepSpeed has. A block
        is gathered while the previous one runs, and sub-groups are as small as buckets. Those of ZeRO-1 and ZeRO-2
        have a matrix of each rank, half a block each."""
        live = {"stage3_max_live_parameters": 3 * block, "stage3_prefetch_bucket_size": block, "sub_group_size": block}
        buckets: dict[str, Any] = {"bucket": block, "stage_bucket": block, "ddp_mib": 4 * block / 2**20}
        stages = {"round_robin_gradients": True, **dict.fromkeys(BUCKETS, dist.get_world_size() * block // 2)}
        keys: dict[str, Any] = {"zero": {"overlap_comm": True}, "stages": stages, "lean": LEAN | live}
        return cls(steps, group_size, make_model, **buckets, **keys, prefetch=True)


class Method(ABC):
    """A training method; ``setup`` describes its configuration."""

    def __init__(self, name: str, setup: str) -> None:
        self.name, self.setup = name, setup
        self._most = StateBytes(0, 0, 0)

    def step(self, batches: Sequence[Batch], watch: bool = False) -> None:
        """Take one optimizer step over these micro-batches; with ``watch``, record the memory of model states."""
        if watch:
            self._most = StateBytes(0, 0, 0)
        for number, (inputs, targets) in enumerate(batches, 1):
            self._micro_step(inputs, targets, number == len(batches), self._look if watch else lambda: None)

    def held(self) -> StateBytes:
        """Return the bytes of model states on this rank, at their peak in the last recorded step. They are counted
        from storages after each forward and each backward, without communication buckets."""
        return self._most

    def finish(self) -> None:  # noqa: B027 (most have nothing to do)
        """Wait for the work in flight of the last step, which would end in the next one."""

    @abstractmethod
    def weights(self) -> Tensor:
        """Return all full parameters, in the model's order, as one 1D tensor. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Release the model and its states."""

    @abstractmethod
    def _micro_step(self, inputs: Tensor, targets: Tensor, last: bool, look: Callable[[], None]) -> None:
        """Train on one micro-batch; the last one ends with the optimizer's step."""

    @abstractmethod
    def _states(self) -> StateBytes:
        """Return the bytes held now."""

    def _look(self) -> None:
        self._most = max(self._most, self._states(), key=lambda states: states.total)


@torch.no_grad()
def gathered(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    """Return copies of a module's full parameters. Collective."""
    parameters = list(module.parameters(recurse))
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in parameters]


def _count(
    parameters: Iterable[Any], gradients: Iterable[Any], optimizer: torch.optim.Optimizer, masters: Iterable[Any] = ()
) -> StateBytes:
    """Return the bytes of storages; a storage with two states counts as the first of them."""
    seen: set[tuple[str, int]] = set()
    moments = [*masters, *(value for state in optimizer.state.values() for value in state.values())]
    states = ([t.to_local() if isinstance(t, DTensor) else t for t in s] for s in (parameters, gradients, moments))
    return StateBytes(*(storage_bytes(state, seen) for state in states))


# PyTorch ##########################################################################################


class TorchMethod(Method):
    """A wrapped model with PyTorch's optimizer."""

    def __init__(self, name: str, setup: str, workload: Workload, model: nn.Module) -> None:
        super().__init__(name, setup)
        self._accumulation, self._whole = workload.accumulation, workload.whole
        self._model: Any = model
        self._autocast = nullcontext  # FSDP2 casts by itself
        self._optimizer: Any = torch.optim.AdamW(model.parameters(), **workload.adamw)

    @abstractmethod
    def _begin(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch."""

    def _end_step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _micro_step(self, inputs: Tensor, targets: Tensor, last: bool, look: Callable[[], None]) -> None:
        with self._begin(last):
            with self._autocast():
                loss = self._model(inputs, targets)
            look()
            (loss / self._accumulation).backward()
        look()
        if last:
            self._end_step()

    def weights(self) -> Tensor:
        return self._whole(getattr(self._model, "module", self._model))  # DDP wraps it

    def close(self) -> None:
        self._model = self._optimizer = None


class DDP(TorchMethod):
    def __init__(self, workload: Workload) -> None:
        setup = "no_sync() until the last micro-batch, gradient_as_bucket_view; gradients are zeroed in their buckets"
        setup += "; autocast and bf16_compress_hook" * workload.mixed
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": workload.ddp_mib}
        model = DistributedDataParallel(workload.make_model(), **options)
        super().__init__("DDP", setup, workload, model)
        if workload.mixed:
            model.register_comm_hook(None, _reduce_in_bf16)
            self._autocast = partial(torch.autocast, "cpu", workload.dtype)

    def _begin(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else cast(AbstractContextManager[Any], self._model.no_sync())

    def _end_step(self) -> None:
        self._optimizer.step()
        # Gradients that were set to None would be made beside the buckets, which DDP never frees, by no_sync().
        self._optimizer.zero_grad(set_to_none=False)

    def _states(self) -> StateBytes:
        parameters = list(self._model.parameters())
        return _count(parameters, [p.grad for p in parameters], self._optimizer)


def _reduce_in_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce like PyTorch's hook. DDP refuses that hook by name without NCCL, although gloo can add bf16."""
    return bf16_compress_hook(cast(dist.ProcessGroup, group), bucket)


class FSDP2(TorchMethod):
    """``fully_shard`` on each block and on the root.

    Args:
        nodes, apart: whether parameters are sharded inside the node only (HSDP); whether each node trains separately.
        between: storage of parameters from forward to backward: "cut"; cut in the "node"; or "whole", with unsharded
            gradients until the last micro-batch.
        reduce: dtype of gradient reductions; by default the workload's.
        native: whether gloo's own reduce-scatter is used.
    """

    def __init__(
        self,
        workload: Workload,
        name: str,
        nodes: bool = False,
        between: str = "cut",
        apart: bool = False,
        reduce: torch.dtype | None = None,
        native: bool = False,
    ) -> None:
        reshard = {"cut": True, "node": workload.group_size, "whole": False}[between]
        model, mesh = workload.make_model(), _mesh(workload.group_size if nodes or apart else None)
        mesh = mesh["ranks"] if apart else mesh
        reduce = reduce or workload.dtype
        policy = MixedPrecisionPolicy(workload.dtype, reduce) if workload.mixed else MixedPrecisionPolicy()
        units = list[FSDPModule]()
        for module in [*cast(nn.ModuleList, model.blocks), model]:
            # The backward of the root comes at once: FSDP2's default is not to cut it before.
            cut = None if module is model and reshard is True else reshard
            units.append(fully_shard(module, mesh=mesh, reshard_after_forward=cut, mp_policy=policy))
            if not native:
                units[-1].set_custom_reduce_scatter(RingReduceScatter())
        if workload.prefetch:
            units[-1]._set_unshard_async_op(True)  # of all units; otherwise the host waits for a gather
            for unit, following in pairwise(units[:-1]):
                unit.set_modules_to_forward_prefetch([following])
        self._kept, self._nodes = between == "whole", nodes
        setup = f"fully_shard of blocks and root, mesh {tuple(mesh.shape)}, reshard_after_forward {reshard}, reduce "
        where = "last micro-batch" if self._kept else "node"
        setup += f"{reduce} in the {where}" + "; set_custom_reduce_scatter: ring" * (not native)
        setup += "; prefetches a block" * workload.prefetch
        super().__init__(name, setup, workload, model)

    def _begin(self, last: bool) -> AbstractContextManager[Any]:
        self._model.set_is_last_backward(last)
        if self._kept:
            self._model.set_requires_gradient_sync(last)
            self._model.set_reshard_after_backward(last)
        elif self._nodes:
            self._model.set_requires_all_reduce(last)
        return nullcontext()

    def _states(self) -> StateBytes:
        # FSDP registers either whole or cut parameters with the module: the others are known to its internals only.
        modules = (m for m in self._model.modules() if isinstance(m, FSDPModule))
        states = [vars(module._get_fsdp_state()) for module in modules]
        # In torch 2.11 a module has one unit, and no list.
        units = [u for state in states for u in state.get("_fsdp_param_groups", [state.get("_fsdp_param_group")])]
        params = [param for unit in units for param in unit.fsdp_params]
        cuts = [param.sharded_param for param in params]
        wholes = [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]
        in_node = [getattr(param, "_sharded_post_forward_param_data", None) for param in params]
        gradients = [p.grad for p in (*cuts, *wholes)] + [param.unsharded_accumulated_grad for param in params]
        gradients += [unit._partial_reduce_output for unit in units]
        return _count([*cuts, *wholes, *in_node], gradients, self._optimizer)


class OuterFSDP2(FSDP2):
    """``fully_shard`` in each node, and DiLoCo between nodes every H steps, by PyTorch's SGD, in fp32. It uses one
    all-reduce of weight changes; each rank has the outer states of its part, as with torchft's DiLoCo."""

    def __init__(self, workload: Workload, name: str, every: int, outer: Mapping[str, Any]) -> None:
        super().__init__(workload, name, apart=True)
        self.setup += f"; an outer step every {every} steps, SGD, {', '.join(f'{k} {v}' for k, v in outer.items())}"
        self._every, self._taken, self._ranks = every, 0, _mesh(workload.group_size).get_group("nodes")
        self._anchors = [p.to_local().detach().clone() for p in self._model.parameters()]
        self._outer = torch.optim.SGD(self._anchors, **outer)

    def _end_step(self) -> None:
        super()._end_step()
        self._taken += 1
        if self._taken % self._every == 0:
            self._take_outer_step([p.to_local() for p in self._model.parameters()])

    @torch.no_grad()
    def _take_outer_step(self, parts: Sequence[Tensor]) -> None:
        pairs = list(zip(self._anchors, parts, strict=True))
        change = torch.cat([(anchor - part).flatten() for anchor, part in pairs])
        dist.all_reduce(change, group=self._ranks)
        means = change.div_(self._ranks.size()).split([part.numel() for part in parts])
        for (anchor, part), mean in zip(pairs, means, strict=True):
            anchor.grad = mean.view_as(part)
        self._outer.step()
        torch._foreach_copy_(list(parts), self._anchors)

    def _states(self) -> StateBytes:
        outer = _count((), (), self._outer, self._anchors).optimizer
        states = super()._states()
        return replace(states, optimizer=states.optimizer + outer)


@cache
def _mesh(group_size: int | None) -> DeviceMesh:
    """Return a mesh of all ranks, or 2D: (nodes, ranks of a node). Created once: it has process groups."""
    ranks, device = dist.get_world_size(), get_accelerator().device_name()
    if group_size is None:
        return init_device_mesh(device, (ranks,))
    return init_device_mesh(device, (ranks // group_size, group_size), mesh_dim_names=("nodes", "ranks"))


# DeepSpeed ########################################################################################


class Engine(Method):
    """DeepSpeed with any section ``zero_optimization``; it divides gradients by the number of micro-batches itself. It
    reduces through rings, or, if ``native``, with its own collectives."""

    def __init__(
        self, workload: Workload, name: str, zero: dict[str, Any], lean: bool = False, native: bool = False
    ) -> None:
        model, self._whole = workload.make_model(), workload.whole
        if lean:
            leaves = sorted({type(block).__name__ for block in cast(nn.ModuleList, model.blocks)})
            zero = {**workload.lean, "leaf_module": {"classes": leaves}, **zero}
        stages = workload.stages if zero.get("stage") in (1, 2) and not native else {}
        zero = {**dict.fromkeys(BUCKETS, workload.stage_bucket), **workload.zero, **stages, **zero}
        muon = workload.optimizer == MUON
        if muon and zero.get("stage") == 3:
            zero["reduce_scatter"] = False  # DeepSpeed's stage 3 wants it so
        in_rings = not native and zero.get("reduce_scatter", True)
        self._reductions = ring_reductions if in_rings else nullcontext
        setup = [f"{key} {value}" for key, value in zero.items()] + ["torch's compiler disabled"] * muon
        super().__init__(name, ", ".join(setup + ["reductions through rings"] * in_rings))
        if muon:  # compiling its kernels takes minutes here
            torch._dynamo.config.disable = True
        params = MUON_PARAMETERS if muon else {**workload.adamw, "torch_adam": True}
        config = {
            "train_micro_batch_size_per_gpu": 1,  # not known here; used for reports of throughput only
            "gradient_accumulation_steps": workload.accumulation,
            "optimizer": {"type": workload.optimizer, "params": params},
            "gradient_clipping": 0.0,  # the default is 1.0, and the methods of PyTorch do not clip
            "steps_per_print": 1_000_000,
            "zero_optimization": zero,
            "bf16": {"enabled": workload.mixed},
            **workload.config,
        }
        # By name, for DeepSpeed divides groups with experts.
        trainable = {"name": "all", "params": [p for p in model.parameters() if p.requires_grad]}
        before = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
        try:
            self._engine, *_ = deepspeed.initialize(model=model, model_parameters=[trainable], config=config)
        finally:
            # hpZ leaves its group here, where every later ZeRO-3 would take it for its own. Nothing reads it later.
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = before

    def _micro_step(self, inputs: Tensor, targets: Tensor, last: bool, look: Callable[[], None]) -> None:
        with self._reductions():
            loss = self._engine(inputs, targets)
            look()
            self._engine.backward(loss)
            look()
            self._engine.step()

    def _states(self) -> StateBytes:
        optimizer, parameters = self._engine.optimizer, list(self._engine.module.parameters())
        names = ("ds_tensor", "ds_secondary_tensor")  # cut by ZeRO-3, and in the node by hpZ
        cut = [getattr(p, name, None) for p in parameters for name in names]
        gradients = [getattr(p, name, None) for p in parameters for name in ("grad", "grad_accum")]
        for name in ("averaged_gradients", "all_grad_tensors"):  # lists by parameter group
            gradients += [grad for grads in getattr(optimizer, name, {}).values() for grad in grads or ()]
        gradients.append(getattr(optimizer, "grad_partitions_flat_buffer", None))  # ZeRO-3
        masters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        masters += getattr(optimizer, "fp32_partitioned_groups_flat", [])  # ZeRO-3 shows a sub-group at a time
        gradients += [master.grad for master in masters]
        return _count([*(p.data for p in parameters), *cut], gradients, optimizer.optimizer, masters)

    def weights(self) -> Tensor:
        return self._whole(self._engine.module)

    @property
    def engine(self) -> Any:
        return self._engine

    def close(self) -> None:
        module = self._engine.module
        self._engine.destroy()
        self._engine = None
        drop_references(module)  # that of DeepSpeed's own ZeRO-3 would stay


class Ours(Engine):
    """A strategy, with any other keys."""

    def __init__(self, workload: Workload, zero: dict[str, Any], name: str = "") -> None:
        self.strategy = parse_strategy(zero["paro_strategy"])
        self.sent = Compression.parse(zero.get("zeropp_loco_param"), zero.get("paro_quantized_updates"))
        self.modules: Mapping[str, str] = zero.get("paro_modules", {})
        zero = self.keys(workload, zero)
        super().__init__(workload, name or zero["paro_strategy"], zero, self.strategy.p > Placement.N, native=True)

    @staticmethod
    def keys(workload: Workload, zero: dict[str, Any]) -> dict[str, Any]:
        replicated = parse_strategy(zero["paro_strategy"]).p == Placement.N
        return {
            **dict.fromkeys(BUCKETS, workload.bucket),
            **({"compute_grad_norm": False} if replicated else {}),
            **zero,
        }

    def finish(self) -> None:
        if hasattr(self._engine.optimizer, "parameters"):
            self._engine.optimizer.drain_parameters()
        wait_for_updates()

    def _states(self) -> StateBytes:
        states, families = measure_state_bytes(self._engine), self._engine.optimizer.families.values()
        # Errors of gradients, and of sums that come back, are kept from step to step, too.
        hops = [family.reduce.inter for family in families]
        errors = sum(getattr(part, "nbytes", lambda: 0)() for hop in hops for part in (hop.errors, hop.sums.errors))
        outer = getattr(self._engine.optimizer.outer, "fragments", ())
        memory = sum(t.nbytes for fragment in outer for t in (fragment.anchor, fragment.weights, fragment.momentum))
        return replace(states, optimizer=states.optimizer + errors + memory)


PEERS: dict[str, Callable[..., Method]] = {
    "DDP": DDP,
    "FSDP2": partial(FSDP2, name="FSDP2"),
    "FSDP2 node": partial(FSDP2, name="FSDP2 node", between="node"),
    "FSDP2 kept": partial(FSDP2, name="FSDP2 kept", between="whole"),
    "HSDP": partial(FSDP2, name="HSDP", nodes=True),
    "HSDP kept": partial(FSDP2, name="HSDP kept", nodes=True, between="whole"),
    **{
        name: partial(FSDP2, name=name, nodes=True, between=between, reduce=getattr(torch, dtype))
        for name, (between, dtype) in HSDP_REDUCTIONS.items()
    },
    "ZeRO-1": partial(Engine, name="ZeRO-1", zero={"stage": 1, **WHOLE}),
    SHIPPED: partial(  # whose all-reduces are rings
        Engine, name=SHIPPED, zero={"stage": 1, **WHOLE, "use_multi_rank_bucket_allreduce": True}, native=True
    ),
    "ZeRO-2": partial(Engine, name="ZeRO-2", zero={"stage": 2, **WHOLE}),
    "ZeRO-3": partial(Engine, name="ZeRO-3", zero={"stage": 3}, lean=True),
    "ZeRO-3 defaults": partial(Engine, name="ZeRO-3 defaults", zero={"stage": 3}),
    "hpZ": lambda it, name="hpZ", native=False: Engine(
        it, name, {"stage": 3, "zero_hpz_partition_size": it.group_size}, lean=True, native=native
    ),
}
PEERS |= {name + NATIVE: partial(PEERS[name], name=name + NATIVE, native=True) for name in RINGS}
