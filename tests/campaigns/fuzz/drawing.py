# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws cases with Hypothesis, which also shrinks those that fail: the simplest value of each choice is first."""

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as some
from hypothesis.strategies import SearchStrategy

from tests.campaigns.fuzz.cases import Block, Case, Event, PipeCase, Step, is_lossy

T = TypeVar("T")
Draw = Callable[[SearchStrategy[Any]], Any]

REPLICATED = ("NNG", "NGG", "NIG", "NII", "NNI", "NNN")
SHARDED = ("GGG", "IIG", "IGG", "III", "INI", "ING", "GNG", "GIG")
SLICED = ("IIG", "ING", "IGG")  # p = I, and parameters are gathered after steps
WIDTHS = some.sampled_from((7, 1, 5, 13, 29, 37))
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-1, "warmup_num_steps": 2}}
BUCKETS = some.sampled_from((300, 50, 1000, 5_000_000))


def one_of(*values: T) -> SearchStrategy[T]:
    """One of these; the first is the simplest."""
    return some.sampled_from(values)


def seldom(draw: Draw, one_in: int = 4) -> bool:
    """Whether something happens that is not the simplest."""
    return bool(draw(some.integers(0, one_in - 1)) == one_in - 1)


def maybe(draw: Draw, keys: dict[str, Any], one_in: int = 4, **choices: SearchStrategy[Any]) -> None:
    """Put some of these keys into a dictionary, with drawn values."""
    for name, values in choices.items():
        if seldom(draw, one_in):
            keys[name] = draw(values)


def sizes(draw: Draw, worlds: tuple[int, ...]) -> tuple[int, int]:
    """Ranks, and ranks of a group."""
    world = draw(one_of(*worlds))
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    inner = [size for size in divisors if 1 < size < world]
    return world, draw(one_of(*(inner if inner and not seldom(draw, 6) else divisors)))


def blocks(draw: Draw, stage: int, optimizer: str, of_experts: bool = False) -> tuple[Block, ...]:
    """Of a model, with experts in it if so; what stock's stages 1 and 2 do not have is left out there."""
    packed = ["packed"] if optimizer != "Muon" else []  # which takes matrices
    kinds = ["linear", "linear", "norm", "gain", "again", "tied", "experts", "unit", *packed]
    if stage == 3:
        kinds.append("lent")
    drawn = []
    for number in range(draw(one_of(1, 2, 2, 3))):
        kind = draw(one_of(*packed, *packed, "unit", "experts") if of_experts and not number else one_of(*kinds))
        recomputed = draw(one_of(None, None, None, False, True)) if kind != "experts" else None
        frozen = seldom(draw, 6)
        drawn.append(Block(kind, draw(WIDTHS), draw(some.booleans()), frozen, recomputed))
    return tuple(drawn)


def events(draw: Draw, case: dict[str, Any], convertible: list[dict[str, Any]], lossy: bool) -> tuple[Event, ...]:
    """Before a step."""
    possible = [Event("evaluate"), Event("look", draw(some.integers(0, 7))), Event("save and load"), Event("resume")]
    possible.append(Event("broken load", (draw(some.integers(0, 7)), draw(one_of("gone", "cut")))))
    possible += [Event("rate", draw(one_of(0.5, 2.0))), Event("states", draw(some.integers(0, 7)))]
    possible += [Event("export"), Event("frozen", 0.5), Event("restart")]
    if not lossy:  # there, these have all updates travel whole
        possible += [Event("weights", 1.25), Event("second engine"), Event("write nothing", draw(some.integers(0, 7)))]
    if case["zero"]["paro_strategy"][0] == "N" and not lossy:
        possible.append(Event("offload", draw(one_of(None, ("optim_states",), ("lp_params", "hp_params")))))
    elif not lossy and "offload_param" not in case["zero"]:  # stage 3 moves the optimizer of FusedAdam only
        possible.append(Event("offload", draw(one_of(("lp_params",), ("lp_params", "lp_grads")))))
    if convertible:
        possible += [Event(kind, draw(one_of(*convertible))) for kind in ("universal", "elsewhere")]
    drawn = [draw(one_of(*possible)) for _ in range(draw(one_of(0, 0, 0, 1, 1, 2)))]
    # A load would bring the optimizer's weights into the model, as the next step does.
    return tuple(sorted(drawn, key=lambda event: event.name == "weights"))


def steps(draw: Draw, case: dict[str, Any], convertible: list[dict[str, Any]], lossy: bool) -> tuple[Step, ...]:
    accumulation, results = case["accumulation"], []
    for _ in range(draw(one_of(2, 2, 3))):
        micro_steps = draw(some.integers(1, accumulation)) if case["boundary"] == "user" else 0
        count = micro_steps or accumulation
        skipped, overflow, twice = [], [], []
        for at in range(count):
            if seldom(draw, 6):
                skipped.append((at, draw(some.integers(0, len(case["blocks"]) - 1))))
            if case["dtype"] == "fp16" and seldom(draw, 8):
                overflow.append((at, draw(some.integers(0, case["world"] - 1))))
            # Of two loss.backward() after one forward, DeepSpeed loses one, or raises; its timers stop once.
            once = case["backward"] == "loss" or "wall_clock_breakdown" in case["config"]
            # ZeRO-3 gathers parameters of the first module for one backward only, since its input has no gradient.
            # A layer that is computed again ends its backward twice, which ZeRO-3 asserts.
            again = any(block.recomputed is not None for block in case["blocks"])
            first = bool(skipped) and skipped[-1][0] == at
            once = once or (case["zero"]["paro_strategy"][0] != "N" and (first or again))
            if not once and seldom(draw, 10):
                twice.append(at)
        before = events(draw, case, convertible, lossy)
        results.append(Step(before, micro_steps, tuple(skipped), tuple(overflow), tuple(twice)))
    return tuple(results)


def training(draw: Draw, stage: int) -> dict[str, Any]:
    """Draw the keys outside of zero_optimization."""
    keys: dict[str, Any] = {
        "dtype": draw(one_of("fp32", "fp32", "bf16", "bf16", "fp16")),
        "optimizer": draw(one_of("SGD", "SGD", "Adam", "Adam", "Muon")),
        "accumulation": draw(some.integers(1, 3)),
        "clipping": draw(one_of(0.0, 0.05, 0.5)),
        "groups": draw(one_of(1, 1, 2, 3)),
        "backward": draw(one_of("engine", "engine", "loss")),
        "boundary": draw(one_of("engine", "engine", "engine", "user", "step", "coalesce")),
        "inputs": draw(one_of(5, 3, 13)),
        "outputs": draw(one_of(3, 1, 7)),
        "unused": draw(one_of(0, 0, 1, 11)),
    }
    config: dict[str, Any] = {}
    maybe(draw, config, 8, data_types=some.just({"grad_accum_dtype": "fp32"}))
    maybe(draw, config, 12, communication_data_type=one_of("fp32", "bf16"))
    maybe(draw, config, 12, gradient_predivide_factor=some.just(2.0))
    maybe(draw, config, 12, wall_clock_breakdown=some.just(True))
    maybe(draw, config, 12, scheduler=some.just(WARMUP))
    if keys["dtype"] == "fp16":
        maybe(draw, config, 4, fp16=one_of({"loss_scale": 128.0}, {"hysteresis": 2}, {"loss_scale_window": 1}))
    if keys["dtype"] == "fp32":
        maybe(draw, config, 12, torch_autocast=some.just({"enabled": True, "dtype": "bfloat16"}))
    if keys["optimizer"] == "Adam":
        # In 16 bits, small gradients have no sign to rely on: with a large eps their steps are small, too.
        eps = 1e-3 if keys["dtype"] == "fp32" and "torch_autocast" not in config else 0.1
        decay = draw(one_of(0.0, 0.0, 0.1))
        config["optimizer"] = {"params": {"lr": 1e-2, "eps": eps, "torch_adam": True, "weight_decay": decay}}
    return {**keys, "config": config}


def common_keys(draw: Draw) -> dict[str, Any]:
    """Of zero_optimization, at every stage."""
    zero: dict[str, Any] = {}
    maybe(draw, zero, 2, reduce_bucket_size=BUCKETS, allgather_bucket_size=BUCKETS)
    maybe(draw, zero, 3, overlap_comm=some.booleans())
    maybe(draw, zero, 6, contiguous_gradients=some.just(False), round_robin_gradients=some.just(True))
    maybe(draw, zero, 12, allgather_partitions=some.just(False), use_multi_rank_bucket_allreduce=some.just(False))
    maybe(draw, zero, 12, load_from_fp32_weights=some.just(False), ignore_unused_parameters=some.just(True))
    return zero


def offload_to_host(draw: Draw, zero: dict[str, Any], case: dict[str, Any], one_in: int = 6) -> None:
    """Perhaps have the optimizer on the host, with torch's optimizer."""
    if seldom(draw, one_in):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": draw(some.booleans())}
        case["config"]["zero_force_ds_cpu_optimizer"] = False


def replicated_keys(draw: Draw, case: dict[str, Any]) -> dict[str, Any]:
    """With p = N."""
    zero = common_keys(draw)
    maybe(draw, zero, 6, reduce_scatter=some.just(False), paro_overlap_updates=some.just(True))
    maybe(draw, zero, 10, parameter_alignment=some.just(True))
    offload_to_host(draw, zero, case)
    return zero


def sharded_keys(draw: Draw, case: dict[str, Any], strategy: str) -> dict[str, Any]:
    """With p = I and G."""
    zero = common_keys(draw)
    maybe(draw, zero, 2, stage3_param_persistence_threshold=one_of(0, 20, 10_000))
    maybe(draw, zero, 2, sub_group_size=one_of(100, 30, 1_000_000))
    maybe(draw, zero, 4, stage3_prefetch_bucket_size=one_of(0, 100, 1000))
    maybe(draw, zero, 6, stage3_max_live_parameters=one_of(100, 1000), stage3_max_reuse_distance=one_of(0, 100))
    maybe(draw, zero, 8, memory_efficient_linear=some.just(False), reduce_scatter=some.just(False))
    maybe(draw, zero, 8, stage3_model_persistence_threshold=one_of(0, 30))
    maybe(draw, zero, 2, stage3_gather_16bit_weights_on_model_save=some.just(True))
    key = draw(one_of("", "", "", "stage3_leaf_bytes", "stage3_module_granularity_threshold"))
    if key == "stage3_leaf_bytes":
        zero[key] = draw(one_of(True, 2, 1, 8, 0))  # times what is fetched at once at least
    elif key:
        zero[key] = draw(one_of(20, 60, 300))
    offload_to_host(draw, zero, case)
    if seldom(draw, 8):
        zero["offload_param"] = {"device": "cpu", "pin_memory": draw(some.booleans())}
        if strategy in SLICED:
            maybe(draw, zero, 2, paro_parameter_cache_bytes=one_of(100, 2000, 10**6))
    case["zero_init"] = draw(one_of(None, None, None, "config"))
    return zero


def at_once(block: Block, width: int) -> tuple[int, int]:
    """Elements of what a module of a block has by itself at most, of packed experts of one; and what comes out."""
    inner = block.width
    if block.kind in ("linear", "tied", "lent"):
        return (max(width, inner) + 1) * max(width, inner), inner
    if block.kind in ("unit", "packed"):
        return (width + 3) * (2 * width + 1), width
    return (width + 1) * width, width


def least_leaf_bytes(case: dict[str, Any]) -> int:
    """The bytes that a budget of leaf modules must have at least, or a few more."""
    width, most = case["inputs"], case["unused"]
    for block in case["blocks"]:
        own, width = at_once(block, width)
        most = max(most, own)
    most = max(most, (width + 1) * case["outputs"])
    return int(3 * most * (4 if case["dtype"] == "fp32" or case["zero_init"] else 2))


def in_windows(draw: Draw, case: dict[str, Any]) -> None:
    """Give a budget its bytes, and draw one where experts are to be fetched some at a time."""
    zero = case["zero"]
    if case["kind"] == "windows":
        zero.pop("stage3_module_granularity_threshold", None)
        zero["stage3_leaf_bytes"] = draw(one_of(2, 1, 4))
    times = zero.get("stage3_leaf_bytes", True)
    if times is not True:
        zero["stage3_leaf_bytes"] = times * least_leaf_bytes(case)


def in_few_bits(draw: Draw, zero: dict[str, Any], strategy: str) -> None:
    """Send gradients in few bits, or updates if the strategy can send them so."""
    keys = set(draw(some.sets(one_of("gradients", "updates"), min_size=1)))
    if "gradients" in keys:
        loco: dict[str, Any] = {}
        maybe(draw, loco, 3, reset_T=one_of(1, 2), bits=some.just(8), block_size=one_of(32, 256))
        maybe(draw, loco, 3, err_beta=one_of(0.0, 0.5), error_bits=some.just(16))
        maybe(draw, loco, 4, hadamard=some.just(True), error_feedback=some.just(False))
        zero["zeropp_loco_param"] = loco
        if seldom(draw):  # without error feedback
            del zero["zeropp_loco_param"]
            zero["zero_quantized_gradients"] = True
    if "updates" in keys and strategy[0] != "G":
        updates: dict[str, Any] = {}
        maybe(draw, updates, 3, bits=some.just(8), block_size=one_of(32, 64), resync_T=one_of(1, 2))
        zero["paro_quantized_updates"] = updates
    if zero.get("reduce_scatter") is False:
        del zero["reduce_scatter"]


def strategies_of(kind: str) -> tuple[str, ...]:
    """Return the strategies that a kind of cases is drawn with."""
    if kind == "without loss":
        return tuple(name for name in (*REPLICATED, *SHARDED) if name[2] == "G" and name[0] != "G")
    phase_intervals = {"replicated": REPLICATED, "sharded": SHARDED, "experts": REPLICATED, "windows": SHARDED}
    return phase_intervals.get(kind, (*REPLICATED, *SHARDED))


def draw_compression(draw: Draw, case: dict[str, Any], zero: dict[str, Any], strategy: str) -> bool:
    """Draw the data that is sent in few bits, by the kind of the case; return whether anything is lost."""
    kind = case["kind"]
    if kind == "few bits" or (kind in ("experts", "model-parallel", "windows") and seldom(draw)):
        in_few_bits(draw, zero, strategy)
    if kind == "without loss":
        zero["paro_quantized_updates"] = {"bits": "exact", "resync_T": draw(one_of(1024, 2))}
    if "paro_quantized_updates" in zero:
        case["config"].pop("torch_autocast", None)
        zero.pop("reduce_scatter", None)
    lossy = is_lossy(zero)
    if lossy and case["optimizer"] == "Adam":
        case["config"]["optimizer"]["params"]["eps"] = 0.1  # as in 16 bits
    return lossy


def with_experts(draw: Draw, case: dict[str, Any], stage: int) -> None:
    """Use DeepSpeed's MoE layers as the model."""
    case.update(network="RoutedOverTwo", blocks=(Block(), Block(), Block()), routed=False, empty=False, unused=0)
    case["world"], case["optimizer"] = draw(one_of(4, 4, 2)), draw(one_of("SGD", "Adam"))
    case["zero"]["paro_group_size"] = 2
    case["zero"].pop("reduce_scatter", None)  # which DeepSpeed asserts
    if stage == 2:
        case["zero"].pop("contiguous_gradients", None)  # and this


def with_model_parallelism(draw: Draw, case: dict[str, Any]) -> None:
    """Use two tensor-parallel ranks."""
    # Stock's zero.Init shards over all ranks there, unless it is told otherwise.
    case.update(world=draw(one_of(4, 4, 4, 4, 8)), tensor_parallel=2, routed=False, zero_init=None)
    case["config"].pop("gradient_predivide_factor", None)  # a fault of stage 3, and norms let no other be asked
    if case["optimizer"] == "Muon":
        case["optimizer"] = "SGD"
    case["zero"]["paro_group_size"] = 2 if case["world"] == 8 else draw(one_of(1, 2))


def named_otherwise(draw: Draw, case: dict[str, Any], stage: int) -> None:
    """Perhaps say the same in other keys: a stage that is implied, a size by default, MiCS."""
    zero = case["zero"]
    if seldom(draw, 12):
        zero["stage"] = stage
    if zero["paro_group_size"] == case["world"] and seldom(draw):
        del zero["paro_group_size"]
    elif zero["paro_strategy"] == "III" and seldom(draw):
        zero.update(mics_shard_size=zero.pop("paro_group_size"), stage=stage)
        del zero["paro_strategy"]


@some.composite
def cases(draw: Draw, kind: str, worlds: tuple[int, ...]) -> Case:
    """A case of one of the ``KINDS`` that train a model without a pipeline."""
    strategy = draw(one_of(*strategies_of(kind)))
    stage = 3 if strategy[0] != "N" else 2 if strategy[1] != "N" else 1
    world, group = sizes(draw, worlds)
    case = training(draw, stage)
    if kind == "without loss" and case["dtype"] == "fp32":
        case["dtype"] = "bf16"
        case["config"].pop("torch_autocast", None)
    case.update(kind=kind, world=world)
    zero = replicated_keys(draw, case) if stage < 3 else sharded_keys(draw, case, strategy)
    lossy = draw_compression(draw, case, zero, strategy)
    if case["optimizer"] == "Muon":
        if stage == 3:  # refused but for all-reduces, by which stock's stage 3 has Muon
            case["config"].pop("gradient_predivide_factor", None)
        case["config"].pop("torch_autocast", None)
        case["backward"] = "engine"
    if stage == 1 and zero.get("overlap_comm") and case["boundary"] == "step":
        case["boundary"] = "engine"  # DeepSpeed refuses it
    case["zero"] = {"paro_strategy": strategy, "paro_group_size": group, **zero}
    case["blocks"] = blocks(draw, stage, case["optimizer"], kind == "windows")
    in_windows(draw, case)
    exact = case["dtype"] == "fp32" and "torch_autocast" not in case["config"]
    case["routed"] = stage == 3 and exact and draw(some.booleans())
    if case["routed"]:  # then stage 0 is the oracle, which is one in fp32, and has no other way
        case.update(backward="engine", boundary="user" if case["boundary"] == "user" else "engine")
        if case["optimizer"] == "Muon":
            case["clipping"] = 0.0  # which does something else there
    case["empty"] = stage < 3 and seldom(draw, 8)
    if stage == 1 and case["boundary"] == "engine" and case["accumulation"] > 1 and "overlap_comm" not in zero:
        case["no_sync"] = seldom(draw, 4)
    if kind == "experts":
        with_experts(draw, case, stage)
    if kind == "model-parallel":
        with_model_parallelism(draw, case)
    if case["optimizer"] != "Adam":
        case["config"].pop("optimizer", None)
    convertible = []
    of_others = kind not in ("replicated", "sharded", "windows") or case["optimizer"] != "Adam"
    if not (of_others or lossy or case["empty"]):
        # Not to plain stages: DeepSpeed's own loads lose buffers, frozen parameters and hyperparameters.
        convertible = [{"paro_strategy": name, "paro_group_size": group} for name in (*REPLICATED, *SHARDED)]
    if "gradient_predivide_factor" in case["config"]:
        convertible = []  # stage 3 has it with reduce_scatter false alone, which goes with the other keys
    case["steps"] = steps(draw, case, convertible, lossy)
    case["streams"] = draw(some.booleans())
    case["reference"] = (lossy or "paro_quantized_updates" in zero) and draw(some.booleans())
    named_otherwise(draw, case, stage)
    return Case(**case)


@some.composite
def pipelines(draw: Draw, worlds: tuple[int, ...]) -> PipeCase:
    """A pipeline of two stages."""
    strategy = draw(one_of(*REPLICATED, *SHARDED))
    zero = common_keys(draw)
    zero.pop("round_robin_gradients", None)
    maybe(draw, zero, 8, zeropp_loco_param=some.just({}))
    if strategy[0] != "G":
        maybe(draw, zero, 8, paro_quantized_updates=some.just({}))
    if strategy[0] != "N":
        maybe(draw, zero, 3, stage3_param_persistence_threshold=one_of(0, 100))
    pipe = {
        "micro_batches": draw(some.integers(1, 4)),
        "steps": draw(one_of(2, 3)),
        "tied": draw(some.booleans()),
        "frozen": draw(one_of((), (), (1,), (2, 3), (0, 1, 2), (3, 4, 5))),
        "groups": draw(one_of(1, 2)),
        "two": draw(one_of(None, None, 2)),
        "checkpointing": draw(one_of(0, 0, 1, -1)),
        "dtype": draw(one_of("fp32", "bf16")),
        "optimizer": draw(one_of("SGD", "Adam")),
        "clipping": draw(one_of(0.0, 0.5)),
        "widths": draw(one_of((29, 7, 17, 11), (5, 3), (13, 37, 3))),
    }
    if "paro_quantized_updates" in zero:
        pipe["tied"] = False  # copies of tied weights would differ
    if pipe["optimizer"] == "Adam":
        pipe["groups"] = 1  # the rates of groups are for SGD
    world = draw(one_of(*(world for world in (4, 4, 8, 2) if world <= max(worlds))))
    if len(pipe["frozen"]) > 2:
        without_training(draw, pipe, world)
    elif len(pipe["widths"]) < 3:
        pipe["frozen"], pipe["two"] = (), None
    return PipeCase("pipeline", world, strategy, zero, pipe, draw(one_of(0, 0, 1)))


def without_training(draw: Draw, pipe: dict[str, Any], world: int) -> None:
    """Leave nothing to train on one of two or more stages: the first, the last, or one between."""
    pipe.update(widths=(29, 7, 17, 11), tied=False, two=None, checkpointing=0, dtype="fp32")
    if world > 2 and seldom(draw, 3):
        pipe.update(stages=4, frozen=draw(one_of((2, 3), (0, 1), (4, 5), (4,))))


KINDS = ("replicated", "sharded", "few bits", "windows", "without loss", "experts", "model-parallel", "pipeline")


def of_kind(kind: str, worlds: tuple[int, ...]) -> SearchStrategy[Any]:
    """Cases of a kind, on one of these numbers of ranks where the kind leaves a choice."""
    return pipelines(worlds) if kind == "pipeline" else cases(kind, worlds)
