# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Small pipelines and their training; everything here runs inside rank processes. ``compare_pipelines`` trains
strategies, DeepSpeed's own ZeRO-1 and plain torch, without a pipeline and without DeepSpeed, on the same data from the
same weights, in the same processes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.nn import functional

from tests.harness.training import DTYPES

VOCABULARY, WIDTH, ROWS, LENGTH = 23, 13, 2, 3


@dataclass(frozen=True)
class Pipe:
    """A training of a pipeline."""

    stages: int = 2  # stages of the pipeline
    micro_batches: int = 3  # in each step
    steps: int = 3
    widths: Sequence[int] = (29, 7, 17, 11)  # widths of the middle layers, in which each adds to its input
    tied: bool = True  # whether embedding and head share a weight
    frozen: Sequence[int] = ()  # layers, by number, without gradients
    groups: int = 1  # parameter groups: matrices and the rest
    two: int | None = None  # number of a layer after which two tensors are sent from stage to stage
    experts: int = 0  # into how many ranks the experts of mixtures are divided; 0 for no mixtures
    mixtures: Sequence[int] = (1, 3)  # numbers of the middle layers behind which they are, in rising order
    method: str = "uniform"  # how layers are dealt to stages
    # Interval of activation checkpointing; negative for the non-reentrant kind. The reentrant kind leaves out the
    # embedding, since DeepSpeed's has no gradients of it with any ZeRO.
    checkpointing: int = 0
    dtype: str = "fp32"
    optimizer: str = "SGD"
    clipping: float = 0.5
    overflow: Sequence[tuple[int, int]] = ()  # (step, rank): where the loss becomes infinite
    # zero, config: further keys of ``zero_optimization`` and of the configuration.
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class Seeded(nn.Module):
    """A module with weights that depend only on its number, on whatever stage it is made."""

    def __init__(self, number: int, frozen: bool, make: Callable[[], dict[str, nn.Module]]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(100 + number)
            for name, module in make().items():
                self.add_module(name, module)
        self.requires_grad_(not frozen)


class Embedding(Seeded):
    """Tokens to vectors; ``head`` goes back, with the same weight."""

    def __init__(self, number: int, frozen: bool = False) -> None:
        super().__init__(number, frozen, lambda: {"table": nn.Embedding(VOCABULARY, WIDTH)})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)

    @staticmethod
    def head(embedding: "Embedding", x: Tensor) -> Tensor:
        return functional.linear(x, embedding.table.weight)


class Middle(Seeded):
    """Adds something to its input, and may send it on as two tensors; takes either."""

    def __init__(self, number: int, width: int, frozen: bool = False, two: bool = False) -> None:
        super().__init__(number, frozen, lambda: {"up": nn.Linear(WIDTH, width), "down": nn.Linear(width, WIDTH)})
        self.two = two

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Any:
        x = x[0] + x[1] if isinstance(x, tuple) else x
        added = self.down(torch.tanh(self.up(x)))
        return (x, added) if self.two else x + added


class Mixture(nn.Module):
    """Adds the output of one of four experts to its input: DeepSpeed's layer."""

    def __init__(self, number: int, ranks: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(200 + number)
            keys = {"min_capacity": 0, "drop_tokens": False, "use_rts": False}
            self.layer = MoE(WIDTH, self.make_expert(), num_experts=4, ep_size=ranks, k=1, **keys)
            experts = [self.make_expert() for _ in range(4)]
        own = self.layer.deepspeed_moe.experts.deepspeed_experts
        first = dist.get_rank() % ranks * len(own)
        for expert, full in zip(own, experts[first:], strict=False):
            expert.load_state_dict(full.state_dict())

    @staticmethod
    def make_expert() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)[0]


class Head(Seeded):
    """Vectors to scores."""

    def __init__(self, number: int, frozen: bool = False) -> None:
        super().__init__(number, frozen, lambda: {"scores": nn.Linear(WIDTH, VOCABULARY, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


def layers_of(pipe: Pipe) -> list[Any]:
    middles = [
        LayerSpec(Middle, i, width, frozen=i in pipe.frozen, two=i == pipe.two)
        for i, width in enumerate(pipe.widths, start=1)
    ]
    if pipe.experts:
        for i in reversed(pipe.mixtures):
            middles.insert(i, LayerSpec(Mixture, i, pipe.experts))
    last = len(pipe.widths) + 1
    if not pipe.tied:
        head = LayerSpec(Head, last, frozen=last in pipe.frozen)
        return [LayerSpec(Embedding, 0, frozen=0 in pipe.frozen), *middles, head]
    names = {"tied_weight_attr": "table.weight"}
    return [
        TiedLayerSpec("embedding", Embedding, 0, **names),
        *middles,
        TiedLayerSpec("embedding", Embedding, 0, forward_fn=Embedding.head, **names),
    ]


class Whole(nn.Module):
    """The same layers in one process."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        specs = layers_of(pipe)
        self.tied = pipe.tied
        self.layers = nn.ModuleList([spec.build() for spec in (specs[:-1] if pipe.tied else specs)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return Embedding.head(self.layers[0], x) if self.tied else x

    def named(self) -> dict[str, Tensor]:
        first = "tied_modules.embedding" if self.tied else "0"
        named = {}
        for name, param in self.layers.named_parameters():
            number, _, rest = name.partition(".")
            named[f"{first if number == '0' else number}.{rest}"] = param.detach()
        return named


def configuration(pipe: Pipe, zero: dict[str, Any]) -> dict[str, Any]:
    learning: dict[str, Any] = {"lr": 0.5, "momentum": 0.9}
    if pipe.optimizer == "Muon":
        learning = {"lr": 2e-2, "adam_lr": 1e-2, "eps": 1e-3, "torch_adam": True}
    elif pipe.optimizer != "SGD":
        # In 16 bits, small gradients have no sign to rely on: with a large eps their steps are small, too.
        learning = {"lr": 1e-2, "eps": 1e-3 if pipe.dtype == "fp32" else 0.1, "torch_adam": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": pipe.micro_batches,
        "optimizer": {"type": pipe.optimizer, "params": learning},
        "gradient_clipping": pipe.clipping,
        "zero_optimization": {**pipe.zero, **zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if pipe.dtype != "fp32":
        config[pipe.dtype] = {"enabled": True}
    if pipe.dtype == "fp16":
        config["fp16"].update(initial_scale_power=8, hysteresis=1, loss_scale_window=1000)
    if pipe.checkpointing < 0:
        config["pipeline"] = {"use_reentrant": False}
    return {**config, **pipe.config}


def groups_of(parameters: Sequence[nn.Parameter], count: int) -> list[dict[str, Any]]:
    """Matrices and the rest, or all; without those that are frozen. Stages may have none of a kind."""
    trained = [p for p in parameters if p.requires_grad]
    if count == 1:
        return [{"params": trained}]
    kinds = ([p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2])
    return [{"params": params, "lr": lr} for params, lr in zip(kinds, (0.5, 0.25), strict=True)]


def make_pipeline(pipe: Pipe, zero: dict[str, Any], topology: Any = None) -> Any:
    if pipe.dtype == "fp16":
        get_accelerator().is_fp16_supported = lambda: True
    if pipe.optimizer == "Muon":
        torch._dynamo.config.disable = True  # a compiler takes minutes for what runs for milliseconds here
    module = PipelineModule(
        layers_of(pipe),
        num_stages=pipe.stages if topology is None else None,
        topology=topology,
        loss_fn=_loss(pipe),
        partition_method=pipe.method,
        activation_checkpoint_interval=abs(pipe.checkpointing),
        checkpointable_layers=["Middle"] if pipe.checkpointing > 0 else None,
    )
    groups = groups_of(list(module.parameters()), pipe.groups)
    named = [{"name": str(at), **group} for at, group in enumerate(groups)]  # as DeepSpeed divides groups with experts
    engine, *_ = deepspeed.initialize(model=module, model_parameters=named, config=configuration(pipe, zero))
    return engine


def start(pipe: Pipe, zero: dict[str, Any], topology: Any = None) -> tuple[Any, Iterator[tuple[Tensor, Tensor]]]:
    engine = make_pipeline(pipe, zero, topology)
    return engine, batches(engine.grid.get_data_parallel_rank())


def _loss(pipe: Pipe) -> Callable[[Tensor, Tensor], Tensor]:
    calls = [0]

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        step = calls[0] // pipe.micro_batches
        calls[0] += 1
        infinite = (step, dist.get_rank()) in pipe.overflow
        return loss_of(scores, targets) * (torch.inf if infinite else 1.0)

    return loss


def batches(data_rank: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of a data-parallel rank, which all of its stages see."""
    generator = torch.Generator().manual_seed(1000 * (1 + seed) + data_rank)
    while True:
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


class Trained(NamedTuple):
    """The final state of a run, the same on all ranks."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]  # by name, in fp32
    applied: list[bool]
    same: bool  # whether all copies of each weight are the same bits, on all ranks and stages
    kind: str  # of optimizer


def train_pipeline(pipe: Pipe, zero: dict[str, Any], topology: Any = None) -> Trained:
    engine, data = start(pipe, zero, topology)
    losses, norms, applied = [], [], []
    for _ in range(pipe.steps):
        losses.append(float(engine.train_batch(data)))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        applied.append(engine.was_step_applied())
    weights, is_same = everybodys_weights(engine.module)
    kind = type(engine.optimizer).__name__
    engine.destroy()
    return Trained(losses, norms, weights, applied, is_same, kind)


def everybodys_weights(module: PipelineModule) -> tuple[dict[str, Tensor], bool]:
    """All weights of all stages, by name, and whether their copies are the same bits."""
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        own = {
            f"{name}{_owner(param)}": param.detach().clone()
            for name, param in module.named_parameters()
            if "nothing" not in name
        }
    everybody: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    torch.distributed.all_gather_object(everybody, own)
    weights: dict[str, Tensor] = {}
    is_same = True
    for item in everybody:
        for name, weight in item.items():
            is_same &= torch.equal(weights.setdefault(name, weight), weight)
    return {name: weight.float() for name, weight in sorted(weights.items())}, is_same


def _owner(param: nn.Parameter) -> str:
    return f" of part {groups._get_expert_parallel_rank(param.group_name)}" if is_moe_param(param) else ""


def train_whole(pipe: Pipe, replicas: int) -> Trained:
    """Plain torch, one process, the batches of all data-parallel ranks."""
    model = Whole(pipe).to(DTYPES[pipe.dtype])
    if pipe.optimizer == "SGD":
        optimizer: Any = torch.optim.SGD(groups_of(list(model.parameters()), pipe.groups), lr=0.5, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups_of(list(model.parameters()), pipe.groups), lr=1e-2, eps=1e-3)
    data = [batches(rank) for rank in range(replicas)]
    losses, norms = [], []
    for _ in range(pipe.steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(pipe.micro_batches):
            for item in data:
                tokens, targets = next(item)
                loss = loss_of(model(tokens), targets) / (replicas * pipe.micro_batches)
                loss.backward()
                total += loss.item()
        trained = [p for p in model.parameters() if p.grad is not None]
        norms.append(float(nn.utils.clip_grad_norm_(trained, pipe.clipping or torch.inf)))
        optimizer.step()
        losses.append(total)
    return Trained(losses, norms, {k: v.float() for k, v in sorted(model.named().items())}, [True], True, "torch")


class Apart(NamedTuple):
    """The distance of a run from another, relative to the largest value."""

    strategy: str
    weights: float
    losses: float
    norms: float
    same: bool
    kind: str


def apart(name: str, one: Trained, other: Trained) -> Apart:
    assert one.weights.keys() == other.weights.keys(), (one.weights.keys(), other.weights.keys())
    largest = max(float(w.abs().max()) for w in other.weights.values())
    weights = max(float((one.weights[k] - other.weights[k]).abs().max()) for k in other.weights) / largest
    pairs = [(a, b) for a, b in zip(one.norms, other.norms, strict=True) if 0 < b < float("inf")]
    norms = max((abs(a - b) / b for a, b in pairs), default=0.0)
    losses = [abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True) if abs(b) < float("inf")]
    return Apart(name, weights, max(losses, default=0.0), norms, one.same, one.kind)


def compare_pipelines(
    pipe: Pipe, strategies: Sequence[str], group: int = 2, oracles: Sequence[str] = ("torch", "1")
) -> list[Apart]:
    """Each strategy against each oracle: plain torch, or DeepSpeed's pipeline with ZeRO-1."""
    replicas = dist.get_world_size() // pipe.stages
    references = {
        name: train_whole(pipe, replicas) if name == "torch" else train_pipeline(pipe, {"stage": 1})
        for name in oracles
    }
    assert {value.kind for value in references.values()}.isdisjoint(("Stage12Optimizer", "Stage3Optimizer")), "ours"
    rows = []
    for name in strategies:
        keys = {"stage": int(name)} if name.isdigit() else {"paro_strategy": name, "paro_group_size": group}
        ours = train_pipeline(pipe, keys)
        rows += [apart(f"{name} against {oracle}", ours, other) for oracle, other in references.items()]
    return rows
