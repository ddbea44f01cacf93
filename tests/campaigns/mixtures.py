# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Small versions of common mixtures of experts, each with common options, compared with stock DeepSpeed.

    python -m tests.campaigns.mixtures                          all, about half an hour on two cores
    python -m tests.campaigns.mixtures --only Mixtral Qwen3Moe  architectures
    python -m tests.campaigns.mixtures --trials LoRA            options

Packed experts are trained under strategies that shard parameters, whole and in windows (``stage3_leaf_bytes``),
and compared with ZeRO-3; and split over two ranks each by AutoEP, compared with AutoEP under ZeRO-2. Prints a table of
the distances of losses and weights from stock's, relative to the largest one. Exit status 1 if a distance exceeds
rounding, or a run fails that stock supports. Runs that stock does not support are listed.
"""

import argparse
import contextlib
import io
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.harness import architectures

WORLD, STEPS, TOKENS = 4, 3, 12
ROUNDING = 2e-5
BEYOND_STOCK = ("`get_seq_length` can only be called on Attention layers",)  # what transformers itself cannot do
ALL = {"attn_implementation": "eager", "pad_token_id": None}
SMALL = architectures.SMALL | ALL
EXPERTS = architectures.EXPERTS | {"moe_intermediate_size": 16}  # grouped products want rows of whole 16 bytes
DEEPSEEK = (
    architectures.WITHOUT_HEADS
    | ALL
    | architectures.LATENT
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
    | {"n_group": 2, "topk_group": 1}
)


@dataclass(frozen=True)
class Architecture:
    """A mixture of transformers."""

    config: str  # the name of its configuration
    keys: dict[str, Any]  # keys of a small one
    preset: str = ""  # AutoEP's name; none where it has none
    attention: Sequence[str] = ("q_proj", "v_proj")  # what LoRA adapts
    # Whether the model adds a loss that balances experts, if asked to (``output_router_logits``).
    auxiliary: bool = True
    router: str = ""  # the class of the router, for replays; empty where it does not choose experts itself
    # Bytes of ``stage3_leaf_bytes`` for windows; none where the experts are one batched product, which has no windows.
    window: int = 20_000


ARCHITECTURES = {
    "Mixtral": Architecture("MixtralConfig", SMALL | {"num_local_experts": 4}, "mixtral", router="MixtralTopKRouter"),
    "Qwen3Moe": Architecture(
        "Qwen3MoeConfig", SMALL | EXPERTS | {"decoder_sparse_step": 1}, "qwen3_moe", router="Qwen3MoeTopKRouter"
    ),
    # Kimi K2 is of this architecture.
    "DeepseekV3": Architecture(
        "DeepseekV3Config", DEEPSEEK, "deepseek_v3", ("q_a_proj", "kv_a_proj_with_mqa"), auxiliary=False
    ),
    "GptOss": Architecture(
        "GptOssConfig", SMALL | {"num_local_experts": 4, "sliding_window": 8}, router="GptOssTopKRouter"
    ),
    "Olmoe": Architecture("OlmoeConfig", SMALL | EXPERTS, router="OlmoeTopKRouter"),
    "Llama4": Architecture(
        "Llama4TextConfig",
        SMALL
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
        | {"intermediate_size_mlp": 24},
        auxiliary=False,
        window=0,
    ),
    "KimiLinear": Architecture(
        "KimiLinearConfig",
        DEEPSEEK
        | {"num_experts": 4, "num_expert_group": 2, "linear_head_dim": 8, "linear_num_heads": 2}
        | {"layer_types": ["linear_attention", "full_attention"]},
        attention=("q_proj", "kv_a_proj_with_mqa"),
        auxiliary=False,
    ),
}


class Trial(NamedTuple):
    """An option of a mixture."""

    # Changes the model before it is trained.
    prepare: Callable[[Any, Architecture], Any] = lambda model, architecture: model
    finish: Callable[[Any, Any], list[float]] = lambda engine, model: []  # what is compared beside losses and weights
    inputs: Callable[[Any], Any] = lambda ids: ids  # changes a batch of token ids
    # Keyword arguments of a forward.
    options: dict[str, Any] = {}  # noqa: RUF012  never changed
    applies: Callable[[Architecture], bool] = lambda architecture: True  # to which architectures
    autoep: bool = True  # whether it is tried with AutoEP


def checkpointed(use_reentrant: bool) -> Callable[[Any, Architecture], Any]:
    def prepare(model: Any, _: Architecture) -> Any:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        return model

    return prepare


def with_adapters(model: Any, architecture: Architecture) -> Any:
    """LoRA on attention; all else, experts too, is frozen."""
    import peft
    import torch

    torch.manual_seed(7)
    adapters = peft.LoraConfig(r=4, target_modules=list(architecture.attention), init_lora_weights=False)
    return peft.get_peft_model(model, adapters)


def replaying(model: Any, architecture: Architecture) -> Any:
    """Make routers repeat their choices for the first batch, as with the choices of a rollout."""
    import torch

    def replay(module: Any, _: Any, output: Any) -> Any:
        scores, index = output[-2:]
        if not hasattr(module, "kept"):
            module.kept = index.detach().clone()
        retained = module.kept
        if scores.shape == retained.shape:  # scores of those that were chosen
            chosen = output[0].softmax(-1).gather(-1, retained)
            return (*output[:-2], chosen / chosen.sum(-1, keepdim=True), retained)
        return (*output[:-2], torch.zeros_like(scores).scatter(-1, retained, scores.gather(-1, retained)), retained)

    for module in model.modules():
        if type(module).__name__ == architecture.router:
            module.register_forward_hook(replay)
    return model


def evaluated(engine: Any, model: Any) -> list[float]:
    """Losses of an evaluation, and tokens that are generated; each rank another number."""
    import torch
    from deepspeed import comm as dist

    model.eval()
    with torch.no_grad():
        ids, rank = torch.arange(2, 2 + TOKENS)[None], dist.get_rank()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss.item()
        prompt = torch.arange(2, 6 + rank)[None]
        tokens = model.generate(prompt, do_sample=False, synced_gpus=True, max_new_tokens=3 + rank, eos_token_id=None)
    model.train()
    return [loss, *(float(token) / 61 for token in tokens[0])]


def exported(engine: Any, model: Any) -> list[float]:
    """The loss of the model that ``save_pretrained`` writes, loaded by itself."""
    import tempfile

    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.comm.agreement import broadcast_text

    with tempfile.TemporaryDirectory() as folder:
        state = engine._zero3_consolidated_16bit_state_dict()
        if dist.get_rank() == 0:
            model.save_pretrained(folder, state_dict=state)
        location = broadcast_text(folder, 0)
        dist.barrier()
        alone = type(model).from_pretrained(location)
        dist.barrier()
    ids = torch.arange(2, 2 + TOKENS)[None]
    with torch.no_grad():
        alone.eval(), model.eval()
        got = alone(input_ids=ids, labels=ids, use_cache=False).loss.item()
        expected = engine(input_ids=ids, labels=ids, use_cache=False).loss.item()
        model.train()
    return [got, expected, got - expected]


TRIALS: dict[str, Trial] = {
    "trained": Trial(),
    "checkpointed": Trial(checkpointed(False)),
    "checkpointed, reentrant": Trial(checkpointed(True)),
    "LoRA": Trial(with_adapters),
    "LoRA, checkpointed": Trial(lambda model, kind: checkpointed(True)(with_adapters(model, kind), kind)),
    "auxiliary loss": Trial(options={"output_router_logits": True}, applies=lambda kind: kind.auxiliary),
    # Two tokens that are the same on all ranks: most experts have none.
    "experts without tokens": Trial(inputs=lambda ids: ids[:1, :2] * 0 + 5),
    "routing replayed": Trial(replaying, applies=lambda kind: bool(kind.router), autoep=False),
    "evaluated, generates": Trial(finish=evaluated),
    "save_pretrained": Trial(finish=exported, autoep=False),
}


class Setting(NamedTuple):
    """A way to train, and the stock one that it is compared with."""

    name: str
    zero: dict[str, Any]
    beside: dict[str, Any]
    autoep: bool = False


WINDOW = -1  # stands for the architecture's
_SHARDED = {"stage3_param_persistence_threshold": 0, "sub_group_size": 4000}
SETTINGS = [
    Setting("IIG", {"paro_strategy": "IIG"}, {"stage": 3}),
    Setting("IIG, whole", {"paro_strategy": "IIG", "stage3_leaf_bytes": True}, {"stage": 3}),
    Setting("IIG, windows", {"paro_strategy": "IIG", "stage3_leaf_bytes": WINDOW}, {"stage": 3}),
    Setting("III, windows", {"paro_strategy": "III", "stage3_leaf_bytes": WINDOW}, {"stage": 3}),
    Setting("GGG, windows", {"paro_strategy": "GGG", "stage3_leaf_bytes": WINDOW}, {"stage": 3}),
    Setting("NIG, AutoEP", {"paro_strategy": "NIG"}, {"stage": 2}, autoep=True),
    Setting("IIG, AutoEP", {"paro_strategy": "IIG"}, {"stage": 2}, autoep=True),
    Setting("IGG, AutoEP", {"paro_strategy": "IGG"}, {"stage": 2}, autoep=True),
]


class Run(NamedTuple):
    """The result of a run: losses, values of a trial, and weights."""

    losses: list[float]
    found: list[float]
    weights: Any


def run(name: str, trial: str, zero: dict[str, Any], autoep: bool) -> Run:
    import deepspeed
    import torch
    import transformers
    from deepspeed import comm as dist

    from tests.harness import experts, training

    experts.mend_registry()
    kind, done = ARCHITECTURES[name], TRIALS[trial]
    torch.manual_seed(5)
    config = getattr(transformers, kind.config)(**kind.keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = done.prepare(model, kind)
    trained = [param for param in model.parameters() if param.requires_grad]
    section = {**_SHARDED, **zero} if zero.get("stage") == 3 or zero.get("paro_strategy", "N")[0] != "N" else zero
    keys = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "zero_optimization": section}
    if "paro_strategy" in section:
        section["paro_group_size"] = 2
    if section.get("stage3_leaf_bytes") == WINDOW:
        section["stage3_leaf_bytes"] = kind.window
    if autoep:
        keys["expert_parallel"] = {"enabled": True, "autoep_size": 2, "preset_model": kind.preset}
        if hasattr(model, "peft_config"):  # whose wrapper the preset's pattern does not know
            keys["expert_parallel"]["moe_layer_pattern"] = r"base_model\.model\.model\.layers\.\d+\.mlp"
        keys["optimizer"] = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    optimizer = None if autoep else torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    provided = {"model_parameters": trained} if autoep else {"optimizer": optimizer}
    keys |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, config=keys, **provided)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        ids = done.inputs(torch.randint(kind.keys["vocab_size"], (2, TOKENS), generator=generator))
        loss = engine(input_ids=ids, labels=ids, use_cache=False, **done.options).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    results = done.finish(engine, model)
    weights = training.whole_weights(model)
    engine.destroy()
    return Run(losses, results, weights)


def case(name: str, trial: str, settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Compare settings with stock's; return each setting with its messages."""
    from deepspeed import comm as dist

    rows, retained = [], dict[str, Run | str]()

    def attempt(zero: dict[str, Any], autoep: bool) -> Run | str:
        try:
            return run(name, trial, dict(zero), autoep)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {str(error).strip()[:160]} ({where.filename[-40:]}:{where.lineno})"

    for setting in settings:
        key = f"{setting.beside} {setting.autoep}"
        if key not in retained:
            retained[key] = attempt(setting.beside, setting.autoep)
        expected, got = retained[key], attempt(setting.zero, setting.autoep)
        dist.barrier()
        if isinstance(got, str):
            registered = isinstance(expected, str) and any(reason in expected for reason in BEYOND_STOCK)
            also = f". Stock: {expected}" if isinstance(expected, str) else ""
            rows.append((setting.name, f"{'' if registered else 'FAILS: '}{got}{also}"))
        elif isinstance(expected, str):
            if "whole" not in retained:
                retained["whole"] = attempt({"stage": 3}, False)
            full = retained["whole"]
            losses = math.inf if isinstance(full, str) else apart(got, full)
            rows.append((setting.name, f"{far(losses)}stock does not; losses {losses:.0e} from ZeRO-3 without AutoEP"))
        else:
            rows.append((setting.name, distance(got, expected)))
    return rows


def distance(got: Run, expected: Run) -> str:
    """How far apart two runs are; begins with FAR if that is further than rounding takes them."""
    losses = apart(got, expected)
    weights = ((got.weights - expected.weights).abs().max() / expected.weights.abs().max()).item()
    return f"{far(losses, weights)}losses {losses:.0e}, weights {weights:.0e}"


def far(*differences: float) -> str:
    return "" if all(difference <= ROUNDING for difference in differences) else "FAR "


def apart(got: Run, expected: Run) -> float:
    """Return the distance of losses and of values of a trial, relative to each; infinite if one is not a number."""
    pairs = zip([*got.losses, *got.found], [*expected.losses, *expected.found], strict=True)
    results = [abs(a - b) / abs(b) if b else abs(a) for a, b in pairs]
    return max(results) if all(result < math.inf for result in results) else math.inf


def cases(only: Sequence[str], trials: Sequence[str]) -> Iterator[tuple[str, str, list[Setting]]]:
    """Each architecture and trial with the settings that it has."""
    for name, kind in ARCHITECTURES.items():
        for trial, done in TRIALS.items():
            if (only and name not in only) or (trials and trial not in trials) or not done.applies(kind):
                continue
            autoep, windows = bool(kind.preset) and done.autoep, bool(kind.window)
            provided = [item for item in SETTINGS if autoep or not item.autoep]
            yield name, trial, [item for item in provided if windows or item.zero.get("stage3_leaf_bytes") != WINDOW]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), choices=list(ARCHITECTURES), help="architectures")
    parser.add_argument("--trials", nargs="*", default=(), choices=list(TRIALS), help="what is done to them")
    arguments = parser.parse_args()
    from tests.harness import ranks

    ranks.prepare_environment()
    pool, wrong = ranks.RankPool(), 0
    from tests.campaigns import mixtures  # by the name that ranks know this module by

    try:
        for name, trial, settings in cases(arguments.only, arguments.trials):
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    answers = pool(WORLD).run(mixtures.case, name, trial, settings, timeout=600.0)
                except Exception as error:  # ranks that fail apart wait for each other
                    answers = [[("all", f"FAILS, {str(error).strip()[-300:]}")]]
            for at, (setting, _) in enumerate(answers[0]):
                everybody = sorted({answer[at][1] for answer in answers}, key=lambda one: "FA" not in one)
                wrong += any(one.startswith(("FAR", "FAILS")) for one in everybody)
                print(f"{name:12} {trial:24} {setting:14} {everybody[0]}", flush=True)
    finally:
        pool.close()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
