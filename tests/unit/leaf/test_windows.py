# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Packed experts in windows train like unmodified ZeRO-3, with two windows gathered at a time."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from deepspeed_ext.comm import collectives
from deepspeed_ext.leaf.modules import Settings, choose, expert_bytes
from deepspeed_ext.leaf.setup import LiveLimits, _least_bytes, predicted_live, summaries
from deepspeed_ext.leaf.windows import WindowedModule, windowed_modules
from tests.harness import calls, mixtures, snapshots, training
from tests.harness.architectures import LATENT, SMALL, WITHOUT_HEADS
from tests.harness.tiers import deep, since, with_cases

FIVE = {"num_local_experts": 5, "num_experts_per_tok": 2}
ROUTED = {"num_experts": 5, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": SMALL | FIVE,
    "Qwen3Moe": SMALL | ROUTED | {"moe_intermediate_size": 8},
    "DeepseekV3": WITHOUT_HEADS
    | LATENT
    | {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    | {"moe_intermediate_size": 8, "n_shared_experts": 1},
    "Olmoe": SMALL | ROUTED,
    "GptOss": SMALL | FIVE | {"sliding_window": 8},
}
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
SOME = [("Mixtral", ("grouped_mm",)), ("DeepseekV3", ("batched_mm",)), ("GptOss", ("eager",))]


def make_model(name: str, implementation: str = "eager") -> Any:
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)


def train(
    name: str, zero: dict[str, Any], implementation: str = "eager", look: Callable[[Any], Any] = lambda engine: None
) -> tuple[list[float], Any, Any]:
    model = make_model(name, implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    leaves = [] if "stage3_leaf_bytes" in zero else [f"{name}Experts"]  # else stock finds that ranks differ
    section = {**mixtures.SMALL, "leaf_module": {"classes": leaves}, **zero}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(2):
        ids = torch.randint(MODELS[name]["vocab_size"], (1, 2 + 3 * dist.get_rank()), generator=generator)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    observed = look(engine)
    weights = training.whole_weights(model)
    engine.destroy()
    return losses, weights, observed


def off(run: tuple[list[float], Any, Any], expected: tuple[list[float], Any, Any]) -> tuple[float, float]:
    """Return the distance of losses, and of weights relative to the largest."""
    losses = max(abs(a - b) for a, b in zip(run[0], expected[0], strict=True))
    return losses, ((run[1] - expected[1]).abs().max() / expected[1].abs().max()).item()


@pytest.mark.quick
def test_recomputed_windows_need_the_gradients_of_their_inputs() -> None:
    """A frozen router gives weights that need none."""
    module, state = mock.Mock(params=()), mock.Mock(tokens=[0], weights=[])
    module._in_order.return_value = [(0, state)]
    for needs in ((True, False), (False, True)):
        hidden, routing, none = torch.zeros(1), torch.zeros(1), torch.zeros(0)
        WindowedModule.run_backward(module, none, hidden, none, routing, None, needs_grads=needs)
        assert (hidden.requires_grad, routing.requires_grad) == needs


@since(transformers="5.0")  # the first to pack experts
@pytest.mark.parametrize("name, implementations", [*SOME, *deep(*((name, IMPLEMENTATIONS) for name in MODELS))])
def test_every_architecture_and_implementation(ranks: Any, name: str, implementations: tuple[str, ...]) -> None:
    for implementation, losses, weights, windows in ranks(2).run(architecture_case, name, implementations)[0]:
        assert losses <= 2e-5 and weights <= 1e-5, (implementation, losses, weights)
        assert windows and all(len(module_windows) >= 3 for module_windows in windows), (implementation, windows)


def architecture_case(name: str, implementations: Sequence[str]) -> list[tuple[str, float, float, Any]]:
    """Return the distance to stock and the windows, with a budget for two experts."""
    stock = train(name, {"stage": 3})
    two_experts = 2 * max(expert_bytes(module) for module in make_model(name).modules())
    keys = {"stage": 3, "stage3_leaf_bytes": max(two_experts, least(name))}
    rows = []
    for implementation in implementations:
        run = train(name, keys, implementation, lambda engine: [m.windows for m in windowed_modules(engine.module)])
        rows.append((implementation, *off(run, stock), run[2]))
    return rows


def least(name: str) -> int:
    return max(_least_bytes(module) for module in make_model(name).modules())


BY_HAND = {"stage": 3, "leaf_module": {"classes": ["PackedMixture"]}}
OVERLAP = {"overlap_comm": True, "reduce_bucket_size": 10_000}


def strategies_case(names: Sequence[str], network: str, more: dict[str, Any], size: int = 2) -> list[Any]:
    """Compare strategies with stock that has the mixture as a leaf module."""
    variants = [training.placed(name, size, **mixtures.WINDOWS) for name in names]
    job = mixtures.job_of(getattr(mixtures, network), **{"steps": 2, "accumulation": 2, **more})
    return training.against(job, variants, BY_HAND)


@pytest.mark.quick
@with_cases(
    "world, size, names",
    (4, 2, ("INI", "GNG")),
    *deep(
        (3, 3, ("IIG",)),
        (4, 2, ("ING", "III", "IIG", "IGG", "GIG", "GGG")),
        (4, 1, ("IIG", "GGG", "GNG")),
        (3, 3, ("GGG",)),
    ),
)
def test_every_strategy(ranks: Any, world: int, size: int, names: Sequence[str]) -> None:
    training.check(ranks(world).run(strategies_case, names, "Packed", {}, size)[0])


@pytest.mark.parametrize("world", [2, *deep(4)])
@with_cases(
    "network, more",
    ("Packed", {"clipping": 0.05, "zero": {**mixtures.SMALL, **OVERLAP}}),
    ("PackedFrozen", {"zero": {**mixtures.SMALL, "reduce_scatter": False}, "checkpointing": True}),
    *deep(
        ("Packed", {"zero": {**mixtures.SMALL, "stage3_param_persistence_threshold": 200}, "boundary": "step"}),
        ("Packed", {"zero_init": "config", "checkpointing": False}),
        ("PackedLooped", {}),
    ),
    ids=lambda more: str(more).replace("'", "")[:50],
)
def test_other_options(ranks: Any, network: str, more: dict[str, Any], world: int) -> None:
    training.check(ranks(world).run(strategies_case, ("IIG", "GGG"), network, more)[0], losses=1e-5)  # of about 10


@pytest.mark.parametrize("dtype, digits", [("fp16", 11), *deep(("bf16", 8))])
def test_16_bits_and_overflow(ranks: Any, dtype: str, digits: int) -> None:
    more = {"dtype": dtype, "optimizer": "SGD", "overflow": [(1, 1)] if dtype == "fp16" else []}
    for row in ranks(2).run(strategies_case, ("IIG", "GGG"), "Packed", more)[0]:
        # Windows are summed in another order: a token's two experts, and what goes back to the router.
        assert max(row.weights, row.norms) <= 2.0 ** (1 - digits) and row.losses <= 10 * 2.0 ** (1 - digits), row
        assert row.replicas_equal and row.same_decisions, row


def test_peak_of_gathered_elements_and_bytes_sent(ranks: Any) -> None:
    for strategy, (most, predicted, two, ours, unwindowed) in ranks(4).each(measured_case, ("IIG", "GGG")):
        assert two == most == predicted, (strategy, most, predicted)
        assert ours["inter"] == unwindowed["inter"], strategy
        # A piece of a window is not padded, as a chunk is.
        assert ours["intra"] == pytest.approx(unwindowed["intra"], rel=0.02), strategy


def measured_case(strategy: str) -> Any:
    """Return for strategies: the elements gathered at a time, their prediction, and those of two windows; and the
    bytes that this rank receives in two steps with windows, and without."""
    tight = {**mixtures.SMALL, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    counted: dict[str, int] = {}

    def count(group: Any, received: Sequence[Any], sent: Sequence[Any], name: str) -> None:
        own, hop = dist.get_rank(group=group), name.split("_")[0]
        arriving = sum(part.numel() * part.element_size() for at, part in enumerate(received) if at != own)
        counted[hop] = counted.get(hop, 0) + arriving

    job = mixtures.job_of(mixtures.Packed)
    most, traffic = [], []
    for keys in (mixtures.WINDOWS, {"leaf_module": {"classes": ["PackedMixture"]}}):
        engine, _ = training.make_engine(replace(job, zero=tight), training.placed(strategy, **keys))
        counted.clear()
        with calls.before(collectives, "pairwise_all_to_all", count):
            for x, y in (batch for batch, _ in zip(training.batches(job), range(2), strict=False)):
                engine.backward(((engine(x) - y) ** 2).mean())
                engine.step()
            engine.optimizer.drain_parameters()
        traffic.append(dict(counted))
        most.append(engine.optimizer.gathers["dense"].live.peak)
        engine.destroy()
    plain = mixtures.Packed((13, 7))
    choices = choose(plain, Settings(mixtures.WINDOWS["stage3_leaf_bytes"], 0, 10**9))
    return most[0], predicted_live(choices, plain, LiveLimits(10**9, 0, 0, 0)), 2 * 2 * 273, *traffic


@since(transformers="5.0")
def test_generation_evaluation_and_access_to_parameters(ranks: Any) -> None:
    for equal, off_by, gathered, gradient, copied in ranks(2).run(access_case):
        assert equal and off_by <= 1e-6 and gathered and gradient <= 1e-5 and copied


def access_case() -> tuple[bool, float, bool, float, bool]:
    """Return whether generation equals stock's; the difference of an evaluation; whether a gathered parameter is
    complete and a change of it is used; the difference of a gradient; whether copied experts have own weights."""
    ids = torch.arange(6).view(1, 6)
    results: list[Any] = []
    copies: list[bool] = []

    def look(engine: Any) -> None:
        experts = engine.module.model.layers[0].mlp.experts
        with deepspeed.zero.GatheredParameters(list(experts.parameters())):
            twin = copy.deepcopy(experts)
        twin.down_proj.data.zero_()
        hidden, index = torch.ones(2, twin.down_proj.shape[1]), torch.zeros(2, 1, dtype=torch.int64)
        copies.append(not twin.forward(hidden, index, torch.ones(2, 1)).any())  # its hooks are the engine's
        weight = engine.module.model.layers[0].mlp.experts.down_proj
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            full_shape = tuple(weight.shape)
            weight.data.mul_(1.5)
        engine.eval()
        with torch.no_grad():
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss.item()
            tokens = engine.module.generate(ids, max_new_tokens=4, do_sample=False).tolist()
        engine.train()
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        results.append((loss, tokens, full_shape, safe_get_full_grad(weight)))
        engine.step()

    train("Qwen3Moe", {"stage": 3}, look=look)
    train("Qwen3Moe", {"stage": 3, "stage3_leaf_bytes": least("Qwen3Moe")}, look=look)
    (loss, tokens, shape, gradient), (our_loss, our_tokens, our_shape, ours) = results
    difference = ((gradient - ours).abs().max() / gradient.abs().max()).item()
    return tokens == our_tokens, abs(loss - our_loss), shape == our_shape, difference, all(copies)


def test_interrupted_backward_leaves_no_state(ranks: Any) -> None:
    for strategy, equal in ranks(2).each(given_up_case, ("IIG", "GGG", "ING")):
        assert equal, strategy


def given_up_case(name: str) -> bool:
    """Return whether weights equal those without the micro-batch whose backward raised between two windows."""

    class Interrupted(Exception):
        pass

    def run(interrupted: bool) -> torch.Tensor:
        job = mixtures.job_of(mixtures.Packed, accumulation=2)
        engine, model = training.make_engine(job, training.placed(name, **mixtures.WINDOWS))
        model.requires_grad_(False)
        windowed = windowed_modules(model)[-1]  # windows after it would have been reduced already
        for param in windowed.params:
            param.requires_grad_(True)
        data = training.batches(job)
        skipped = next(data)
        if interrupted:

            def interrupt(module: Any, number: int, *_: Any) -> None:
                if not number:
                    raise Interrupted

            with calls.before(windowed.hooks, "reduce_window", interrupt), pytest.raises(Interrupted):
                training.micro_step(engine, job, 0, *skipped)
        for number in range(2):
            training.step(engine, job, number, data)
        weights = training.whole_weights(model)
        engine.destroy()
        return weights

    return torch.equal(run(False), run(True))


def test_unsupported_experts_stay_together(ranks: Any) -> None:
    too_small, kinds = ranks(1).run(refused_case)[0]
    assert too_small.startswith("ValueError: ")
    assert "one of the 7 packed experts of layers.0.mixture.experts needs 3,276, got 3,000" in too_small, too_small
    assert kinds["PackedExperts"] == ("windowed", "4 windows of at most 2 experts")
    assert kinds["Unknown"] == ("fine", "its packed experts stay together: its forward takes (x), not hidden states")
    assert kinds["Lent"] == ("fine", "its packed experts stay together: it shares parameters with other modules")


def refused_case() -> tuple[str, dict[str, tuple[str, str]]]:
    """Return the error of a budget below one expert; and the kind and start of the reason of each packed module."""

    class UnknownExperts(mixtures.PackedExperts):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    class Block(nn.Module):
        def __init__(self, experts: nn.Module, lent: bool) -> None:
            super().__init__()
            self.experts = experts
            self.head = nn.Linear(2, 2)
            if lent:
                self.head.weight = experts.down_proj  # type: ignore[assignment]

    zero = {"stage": 3, "stage3_leaf_bytes": 3000}
    message = snapshots.error_of(training.make_engine, mixtures.job_of(mixtures.Packed), zero)
    kinds = {}
    models = (mixtures.Packed((13, 7)), UnknownExperts(10, 7), Block(mixtures.PackedExperts(10, 7), True))
    for label, model in zip(("PackedExperts", "Unknown", "Lent"), models, strict=True):
        choices = choose(model if label != "Unknown" else Block(model, False), Settings(6552, 0, 10**9))
        summary = next(row for row in summaries(choices) if "Experts" in row.cls)
        kinds[label] = summary.kind, summary.why
    return message, {
        "PackedExperts": (kinds["PackedExperts"][0], kinds["PackedExperts"][1].split(";")[0]),
        "Unknown": (kinds["Unknown"][0], kinds["Unknown"][1].split(", indices")[0]),
        "Lent": kinds["Lent"],
    }
