# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Collectives whose results arrive late, with virtual other ranks; for the CPU and for one GPU.

Note [How the wire works]
    One process is a rank of a world in which all other ranks are virtual: torch's "fake" backend makes its process
    groups, and a ``Wire`` replaces their collectives. The others send the same data as this rank: an all-gather
    returns its shard several times, a sum is a multiple of its part. Such training learns nothing, but it runs the
    real optimizers, and its bits are the same each time.

    Until a collective arrives, its output holds bytes 0xFF: NaN in every floating-point type.

    - On the CPU, it arrives when code waits for it, and reads its input only then. Code that reads the result
      before that gets NaN; code that overwrites the input before that sends something else.
    - On a GPU, it runs after the current stream, on a stream of its group, which first sleeps for a while. ``wait``
      makes the current stream wait, as with NCCL. Code that reads on another stream, or before that, gets NaN.

    A *prompt* wire does the same arithmetic at once, with a synchronized device. Its bits are the expected ones.
"""

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import deepspeed
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tests.harness import networks
from tests.harness.training import DTYPES, SMALL, Job, make_engine, whole_weights

CYCLES = 1_500_000  # of a GPU in a millisecond, about
WITHOUT_TIMER = {"timers": {"throughput": {"enabled": False}}}  # it synchronizes the device in each micro-step
# Little is gathered ahead, and nothing kept from forward to backward, but what the backward begins with.
FEW_AT_A_TIME = {"stage3_prefetch_bucket_size": 100, "stage3_max_reuse_distance": 0}
JOB = Job(networks.SQUARE, network=networks.Mixture, accumulation=2, empty=False, zero=SMALL | FEW_AT_A_TIME)


@dataclass(eq=False)
class Late:
    """A collective on its way."""

    name: str  # name of the method of the process group
    ranks: int  # ranks of the group
    wire: "Wire"
    arrive: Callable[[], None] = lambda: None
    tensors: list[Tensor] = field(default_factory=list)  # kept alive until somebody has waited, as NCCL does
    began: Any = None  # in seconds, on the CPU
    ended: Any = None  # events on a GPU
    arrived: bool = False

    def wait(self, timeout: Any = None) -> bool:
        """On the CPU have it arrive; on a GPU have the current stream wait for it."""
        self.wire.finish(self)
        return True

    def is_completed(self) -> bool:
        return self.arrived if self.wire.cpu else bool(self.ended.query())


@dataclass
class Wire:
    """Carries the collectives. See Note [How the wire works]."""

    device: str = "cpu"  # "cpu" or "cuda"
    prompt: bool = False  # whether results arrive at once
    # Shortest and longest time in milliseconds that a collective takes, on a GPU.
    delay: tuple[float, float] = (1.0, 5.0)
    keep: bool = False  # whether to keep everything that was sent, to inspect its times
    sent: list[Late] = field(default_factory=list)  # messages, in the order in which they have begun

    def __post_init__(self) -> None:
        self._random = random.Random(0)
        self._streams: dict[str, Any] = {}  # by name of the group
        self._under_way: list[Late] = []

    @property
    def cpu(self) -> bool:
        return self.device == "cpu"

    def send(self, group: Any, name: str, plan: Callable[[], "Plan"]) -> Late:
        """Start a collective; ``plan``, called when it runs, returns its outputs, inputs, and arithmetic."""
        late = Late(name, group.size(), self)
        if self.keep:
            self.sent.append(late)
        if self.cpu:
            late.began = time.perf_counter()
            self._begin(late, plan)
            if self.prompt:
                self.finish(late)
        else:
            self._launch(group, late, plan)
        return late

    def _begin(self, late: Late, plan: Callable[[], "Plan"]) -> None:
        written, read, late.arrive = plan()
        late.tensors = [*written, *read]
        for tensor in written if not self.prompt else ():
            if tensor.numel():
                tensor.detach().view(-1).view(torch.uint8).fill_(255)

    def _launch(self, group: Any, late: Late, plan: Callable[[], "Plan"]) -> None:
        self._under_way = [item for item in self._under_way if not item.is_completed()]  # the others may be freed
        if group.group_name not in self._streams:
            self._streams[group.group_name] = torch.cuda.Stream()
        stream = self._streams[group.group_name]
        late.began, late.ended = (torch.cuda.Event(enable_timing=self.keep) for _ in range(2))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late.began.record()
            self._begin(late, plan)
            if not self.prompt:
                torch.cuda._sleep(int(self._random.uniform(*self.delay) * CYCLES))
            late.arrive()
            late.ended.record()
        self._under_way.append(late)
        if self.prompt:
            torch.cuda.synchronize()

    def finish(self, late: Late) -> None:
        if not self.cpu:
            torch.cuda.current_stream().wait_event(late.ended)
        elif not late.arrived:
            late.arrive()
            late.ended = time.perf_counter()
        late.arrived = True
        late.tensors.clear()
        late.arrive = lambda: None

    @contextlib.contextmanager
    def connected(self) -> Iterator["Wire"]:
        """In this context collectives of all process groups go over this wire."""
        with contextlib.ExitStack() as patches:
            for name, collective in _COLLECTIVES.items():
                if not hasattr(ProcessGroup, name):
                    continue

                def start(group: Any, *args: Any, name: str = name, collective: Any = collective) -> Any:
                    with torch.no_grad():
                        return self.send(group, name, lambda: collective(group, *args))

                patches.enter_context(mock.patch.object(ProcessGroup, name, start))
            yield self


# What each collective writes, what it reads, and how it arrives. A tensor that is both is read before it is spoiled.
Plan = tuple[Sequence[Tensor], Sequence[Tensor], Callable[[], None]]


def _total(part: Tensor, ranks: int, op: Any) -> Tensor:
    """The sum of a number of equal parts."""
    return part * ranks if op == ReduceOp.SUM else part


def _all_gather_single(group: Any, out: Tensor, shard: Tensor, opts: Any = None) -> Plan:
    other_ranks = [part for part in out.view(-1).chunk(group.size()) if part.data_ptr() != shard.data_ptr()]

    def arrive() -> None:
        for part in other_ranks:
            part.copy_(shard.view(-1))

    return other_ranks, [out, shard], arrive


def _all_gather(group: Any, outs: list[list[Tensor]], shards: list[Tensor], opts: Any = None) -> Plan:
    def arrive() -> None:
        for subset, shard in zip(outs, shards, strict=True):
            for out in subset:
                out.copy_(shard)

    return [out for subset in outs for out in subset], shards, arrive


def _reduce_scatter_single(group: Any, out: Tensor, flat: Tensor, opts: Any) -> Plan:
    def arrive() -> None:
        out.view(-1).copy_(_total(flat.view(-1).chunk(group.size())[group.rank()], group.size(), opts.reduceOp))

    return [out], [flat], arrive


def _all_reduce(group: Any, tensors: list[Tensor], opts: Any) -> Plan:
    sent = [tensor.clone() for tensor in tensors]

    def arrive() -> None:
        for tensor, value in zip(tensors, sent, strict=True):
            tensor.copy_(_total(value, group.size(), opts.reduceOp))

    return tensors, sent, arrive


def _reduce(group: Any, tensors: list[Tensor], opts: Any) -> Plan:
    return _all_reduce(group, tensors if opts.rootRank == group.rank() else [], opts)


def _all_to_all_single(
    group: Any, out: Tensor, sent: Tensor, out_splits: list[int], splits: list[int], opts: Any = None
) -> Plan:
    equal = [sent.shape[0] // group.size()] * group.size()

    def arrive() -> None:
        own = sent.split(splits or equal)[group.rank()]
        for part in out.split(out_splits or equal):
            part.copy_(own)

    return [out], [sent], arrive


class _Kept:
    """Options of a broadcast: the others have the same."""

    reduceOp = ReduceOp.MAX


# By method of a process group; releases of torch have different ones.
_COLLECTIVES: dict[str, Callable[..., Plan]] = {
    **dict.fromkeys(("all_gather_single", "_allgather_base"), _all_gather_single),
    **dict.fromkeys(("reduce_scatter_single", "_reduce_scatter_base"), _reduce_scatter_single),
    **dict.fromkeys(("all_to_all_single", "alltoall_base"), _all_to_all_single),
    "allgather": _all_gather,
    "allreduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": lambda group, tensors, opts=None: _all_reduce(group, tensors, _Kept),
}


def enter_virtual_world(ranks: int, rank: int = 0) -> None:
    """Make this process a rank of a world in which all other ranks are virtual."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        deepspeed.comm.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    deepspeed.init_distributed()


Trained = tuple[str, bool]  # a digest of the weights, and whether all of them are finite


def train_over(wire: Wire, job: Job, zero: dict[str, Any], look: Callable[[Any], None] | None = None) -> Trained:
    """Train over a wire, with a look at one parameter and a change of another between forward and backward; return the
    weights. ``look`` sees the engine before it is destroyed."""
    generator = torch.Generator().manual_seed(3)
    with wire.connected():
        engine, model = make_engine(job, zero)
        for _ in range(job.steps * job.accumulation):
            x, y = (torch.randn(2, width, generator=generator) for width in (job.sizes[0], job.sizes[-1]))
            x, y = (batch.to(engine.device, DTYPES[job.dtype]) for batch in (x, y))
            loss = ((engine(x) - y) ** 2).float().mean()
            with deepspeed.zero.GatheredParameters([model.unused]):
                loss = loss + model.unused.sum().detach() * 0
            with deepspeed.zero.GatheredParameters([model.layers[0].weight], modifier_rank=0):
                model.layers[0].weight.data.mul_(1.01)
            engine.backward(loss)
            engine.step()
        if look is not None:
            look(engine)
        weights = whole_weights(model).cpu()
        engine.destroy()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16], bool(torch.isfinite(weights).all())
