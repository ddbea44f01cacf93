# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs a case beside its oracle, and says what is wrong; inside rank processes only.

Note [What a case is compared with]
    A case is trained three times: by us, by us on a simulated device with streams, and by stock DeepSpeed at the stage
    that is nearest to the strategy, with the keys that are not ours. Where that stage has a known fault
    (``oracles.FAULTS``) it is another stage. What we run with streams must be what we run without, and what stock
    runs, to rounding. Where gradients or updates cross in few bits, the way from the first weights to the last
    must be stock's, but for a part; and where updates cross without loss, the oracle is also our own run without that
    key, to the bit.
    If stock's run is different, other stages are trained, too, to say who is alone: that is what one asks first.
"""

import dataclasses
import math
import traceback
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from deepspeed import comm as dist
from torch import Tensor

from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Volume
from tests.campaigns.fuzz import oracles, runs
from tests.campaigns.fuzz.cases import FOUND, ORACLE, Case, PipeCase
from tests.campaigns.fuzz.runs import Trained
from tests.harness import pipelines, stream_cases
from tests.harness.stream_order import device_with_streams
from tests.harness.training import DTYPES, placed

T = TypeVar("T")
# Of what is largest of its kind. An ulp or two in what is added up in another order, and what steps make of that.
WEIGHTS = {"fp32": 3e-5, "bf16": 1.5e-2, "fp16": 4e-3}
MOMENTS = {"fp32": 2e-4, "bf16": 6e-2, "fp16": 2e-2}
LOSSES = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 1e-2}
# Of the way of all weights: what four bits with error feedback may change of it. Without a parameter's gradient it is
# another way.
LOSSY = 0.5
HELD = 4096  # bytes more than before: losses and norms are kept
INTER, MESSAGE = 1.10, 128  # of the formula; bytes of each message, for what fills it up
# Muon makes rounding several hundred times larger where a gradient has a rank below its sizes, as here most have.
MUON, MUON_IN_16_BITS, MUON_NORMS = 4, 20, 0.9


class Verdict(NamedTuple):
    """What was found: problems, each a line; and what happened, for counting."""

    problems: list[str]
    happened: list[str]


def judge(case: Case | PipeCase) -> Verdict:
    """Run a case and compare. Collective."""
    return _judge_pipe(case) if isinstance(case, PipeCase) else _judge(case)


def _judge(case: Case) -> Verdict:
    try:
        ours = runs.train(case, case.zero, True)
    except Exception as error:
        print(f"RAISED {traceback.format_exc()}", flush=True)  # for who waits for this rank
        return _refused(case, error)
    problems = list(_wrong_alone(case, ours))
    with device_with_streams() as order:
        streamed = runs.train(case, case.zero, True, order)
    problems += [f"order: {finding}" for finding in order.findings]
    # Messages are filled up there, and gloo adds up in an order that depends on the place in a message.
    problems += [f"with streams: {problem}" for problem in _apart(case, streamed, ours)]
    happened = [f"accesses ordered: {bool(order.accesses)}"]
    if case.exact:
        plain = {key: value for key, value in case.zero.items() if key != "paro_quantized_updates"}
        problems += _bits(ours, runs.train(case, plain, True), "with updates as they are")
    if any(_everybody(bool(problems))):  # all ranks go on, or none
        return Verdict(problems, happened)
    print(ORACLE, flush=True)  # who hangs from now on is not ours
    stage = oracles.stage_for(case)
    if stage is None:
        return Verdict([], [*happened, "no oracle"])
    try:
        stock = runs.train(oracles.as_stock_runs_it(case, stage), oracles.keys_of(case, stage), False)
    except Exception as error:
        return Verdict([], [*happened, f"stock raises {type(error).__name__}: {str(error)[:80]}"])
    alike = stage == case.stage and not case.events() and not oracles.faults(case, stage)
    if alike and stock.left <= HELD < ours.left - stock.left:
        problems.append(f"{ours.left} bytes live longer than the engine, of stock's {stock.left}")
    differences = list(_apart(case, ours, stock))
    if differences:
        print(f"{FOUND} {differences[0]}", flush=True)  # what follows may hang
        differences[0] += f" ({', '.join(_blame(case, ours))})"
    return Verdict(problems + differences, [*happened, f"oracle: stage {stage}"])


def _everybody(mine: T) -> list[T]:
    """What all ranks have. Collective."""
    everybody = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _refused(case: Case, error: Exception) -> Verdict:
    """What we raise, and stock does not."""
    told = f"{type(error).__name__}: {error}"
    # Of two backwards behind one forward stock may raise the same; else its exception may be another one.
    for given in (case, oracles.as_stock_runs_it(case, case.stage)):
        try:
            runs.train(given, oracles.keys_of(case, case.stage), False)
        except Exception as other:
            if given is not case or type(other) is type(error):
                return Verdict([], [f"both raise: stock {type(other).__name__}: {str(other)[:60]}"])
    trace = "".join(traceback.format_tb(error.__traceback__)[-4:]).rstrip()
    return Verdict([f"raises {told}\n{trace}"], [])


def _wrong_alone(case: Case, ours: Trained) -> Iterator[str]:
    """What needs no oracle."""
    if not ours.replicas_equal:
        yield "replicas differ"
    if not torch.isfinite(ours.weights).all():
        yield "weights are not finite"
    earlier, last = ours.held[1:-1], ours.held[-1]
    if earlier and last > max(earlier) + HELD and not case.events():
        yield f"memory grows: bytes after each step {ours.held}"
    yield from _bytes(case, ours)


def _bytes(case: Case, ours: Trained) -> Iterator[str]:
    """Bytes between groups, of the last step; the formula is of models whose parameters are all used."""
    size = case.zero.get("paro_group_size")
    others = any(event.name == "universal" for event in case.events())  # the last step has other keys
    plain = not (
        others
        or set(case.config) - {"optimizer"}
        or case.network
        or case.tensor_parallel > 1
        or case.optimizer == "Muon"
        or case.steps[-1].twice  # each backward at the boundary is reduced
    )
    if not plain or not size or case.zero.get("paro_strategy") not in STRATEGIES or case.boundary == "coalesce":
        return
    width = 4 if case.dtype == "fp32" else 2
    states = ModelStates.of(ours.elements, ours.trained, parameter_bytes=width, gradient_bytes=width)
    sizes = GroupSizes(case.world, size)
    due = Volume()
    strategy, count = STRATEGIES[case.strategy], case.steps[-1].micro_steps or case.accumulation
    for phase in strategy.phases(sizes, states):
        due += phase.volume * (phase.each_micro_step * count or 1)
    got = ours.received[-1]
    if got.inter > INTER * due.inter + MESSAGE * got.messages or (due.inter and ours.trained and not got.inter):
        yield f"bytes between groups: {got.inter:.0f} in {got.messages} messages, {due.inter:.0f} by the formula"


def _bits(one: Trained, other: Trained, what: str) -> Iterator[str]:
    """What differs at all."""
    apart = [name for name in one.states if not torch.equal(one.states[name], other.states[name])]
    if apart:
        yield f"{what}: other bits of {len(apart)} of {len(one.states)} states, as {sorted(apart)[0]}"
    for name in ("losses", "norms", "scales", "applied"):
        pair = getattr(one, name), getattr(other, name)
        if str(pair[0]) != str(pair[1]):  # as text: NaN is NaN
            yield f"{what}: other {name}: {pair[0]} and {pair[1]}"


def _apart(case: Case, ours: Trained, stock: Trained) -> Iterator[str]:
    """What differs by more than rounding."""
    if (ours.scales, ours.applied) != (stock.scales, stock.applied):
        yield f"steps: {ours.applied} at scales {ours.scales}, stock {stock.applied} at {stock.scales}"
        return
    if case.lossy:
        if case.optimizer != "Muon":  # it takes directions, which few bits may turn
            yield from _far(case, ours, stock)
        return
    found = _relative(ours.weights, stock.weights)
    if not found <= _bound(case, WEIGHTS):
        yield f"weights {found:.1e} apart"
    elif case.dtype != "fp32" and case.optimizer != "Muon":
        yield from _far(case, ours, stock)  # which small steps are in 16 bits
    for name, bounds in (("losses", LOSSES), ("norms", MOMENTS)):
        pairs = list(zip(getattr(ours, name), getattr(stock, name), strict=True))
        if name == "norms" and not any(stock.norms):
            continue  # stage 0 takes none without clipping
        # A loss is a mean of squares: where it is small, what is squared is exact to a part of its own size only.
        root = 0.3 if name == "losses" else 0.0
        off = [(i, a, b) for i, (a, b) in enumerate(pairs) if not _close(a, b, _bound(case, bounds), root)]
        if off:
            yield f"{name} apart: number {off[0][0]} is {off[0][1]!r}, stock's {off[0][2]!r}"
    if stock.states and ours.states:
        norm = max(filter(math.isfinite, stock.norms), default=0.0)
        yield from _states(case, ours.states, stock.states, norm, stock.weights.abs().max().item())


def _states(
    case: Case, ours: dict[str, Tensor], stock: dict[str, Tensor], norm: float, weight: float
) -> Iterator[str]:
    """States, in parts of the largest of their kind; of moments, also of what the largest gradient makes of them."""
    if ours.keys() != stock.keys():
        yield f"states of one only: {sorted(ours.keys() ^ stock.keys())[:4]}"
        return
    largest = {"exp_avg": 0.1 * norm, "exp_avg_sq": 1e-3 * norm**2, "momentum_buffer": norm}
    largest.update(fp32=weight, model=weight)
    for name, state in stock.items():
        kind = name.rpartition(" ")[2]
        if state.numel():
            largest[kind] = max(largest.get(kind, 1e-12), state.float().abs().max().item())
    for name in sorted(stock):
        if name == "counters" and any(step.twice for step in case.steps):
            continue  # each backward counts there with managed_gradient_accumulation false
        kind = name.rpartition(" ")[2]
        bound = _bound(case, WEIGHTS if kind in ("fp32", "model") else MOMENTS)
        if ours[name].shape != stock[name].shape:
            yield f"{name}: shape {tuple(ours[name].shape)}, stock's {tuple(stock[name].shape)}"
        elif stock[name].numel():
            found = (ours[name].float() - stock[name].float()).abs().max().item() / largest[kind]
            if not found <= bound:
                yield f"{name} is {found:.1e} of the largest apart"
                return


def _far(case: Case, ours: Trained, stock: Trained) -> Iterator[str]:
    """How far the way of all weights is from stock's, but for what an ulp of each is."""
    first = runs.first_weights(case)
    way, other = ours.weights - first, stock.weights - first
    rounding = torch.finfo(DTYPES[case.dtype]).eps * first.norm()
    if other.norm() > 0 and not (way - other).norm() <= LOSSY * other.norm() + rounding:
        yield f"the way of the weights is {(way - other).norm() / other.norm():.2f} of itself apart"


def _bound(case: Case, bounds: dict[str, float]) -> float:
    """The bound of what a case computes in."""
    lower = case.config.get("torch_autocast") or case.config.get("communication_data_type") == "bf16"
    precision = "bf16" if lower and case.dtype == "fp32" else case.dtype
    if case.optimizer == "Muon":
        return min(MUON_NORMS, bounds[precision] * (MUON if precision == "fp32" else MUON_IN_16_BITS))
    return bounds[precision]


def _relative(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def _close(one: float, other: float, bound: float, root: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) <= bound * max(1e-3, abs(other), root * abs(other) ** 0.5)
    return str(one) == str(other)


def _blame(case: Case, ours: Trained) -> Iterator[str]:
    """Which stages have our weights, without a key but the stage; stage 0 is plain data parallelism."""
    plain = dataclasses.replace(case, zero={"stage": case.stage})
    for stage in (0, 1, 2, 3):
        if any(not fault.without for fault in oracles.faults(case, stage)):
            continue
        try:
            other = runs.train(oracles.as_stock_runs_it(case, stage), oracles.keys_of(plain, stage), False)
        except Exception as error:
            yield f"stage {stage} raises {type(error).__name__}"
            continue
        apart = _relative(ours.weights, other.weights)
        yield f"plain stage {stage} is {apart:.1e} from us{'' if apart <= _bound(case, WEIGHTS) else ' (!)'}"


def stock_is_wrong(number: int) -> bool:
    """Whether this rank sees a fault of ``oracles.FAULTS`` that has a smallest case. Collective.

    What is right is the same stage without the keys that the fault needs, else another stage; of norms, what other
    ranks have.
    """
    fault = oracles.FAULTS[number]
    case = fault.smallest
    assert case is not None
    acts = case.optimizer != "Muon"  # whose states some ranks cannot read
    try:
        stock = runs.train(case, case.zero, acts)
    except Exception:
        return "raise" in fault.what
    whole = oracles.as_stock_runs_it(case, case.zero["stage"])
    if fault.without:
        return any(_apart(case, runs.train(whole, oracles.keys_of(case, case.zero["stage"]), acts), stock))
    plain = dataclasses.replace(whole, backward="engine", boundary="engine", zero={"stage": case.zero["stage"]})
    other = runs.train(plain, oracles.keys_of(plain, oracles.beside(fault, case)), False)
    unlike = any(norms != stock.norms for norms in _everybody(stock.norms))
    return unlike or _relative(stock.weights, other.weights) > WEIGHTS[case.dtype]


def _judge_pipe(case: PipeCase) -> Verdict:
    pipe = pipelines.Pipe(**{**case.pipe, "zero": case.zero})
    groups = case.world // pipe.stages
    size = 2 if groups % 2 == 0 else 1
    ours = pipelines.train_pipeline(pipe, placed(case.strategy, size))
    problems = [] if ours.same else ["copies of weights differ"]
    with device_with_streams() as order:
        engine = pipelines.make_pipeline(pipe, placed(case.strategy, size))
        data = pipelines.batches(engine.grid.get_data_parallel_rank())
        with stream_cases.stepping_on_host(engine, order), order.watch():
            for _ in range(pipe.steps):
                engine.train_batch(data)
        engine.destroy()
    problems += [f"order: {finding}" for finding in order.findings]
    oracle = dataclasses.replace(pipe, zero={key: case.zero[key] for key in case.zero if key in oracles.OF_PIPELINES})
    print(ORACLE, flush=True)
    try:
        stock = pipelines.train_pipeline(oracle, {"stage": 1})
    except Exception as error:
        return Verdict(problems, [f"stock raises {type(error).__name__}: {str(error)[:80]}"])
    if {"zeropp_loco_param", "paro_quantized_updates"} & case.zero.keys():
        return Verdict(problems, ["oracle: stage 1"])
    apart = pipelines.apart(case.strategy, ours, stock)
    # Losses are summed over stages, and learning rates are larger there.
    bounds = (2 * WEIGHTS[pipe.dtype], 2 * LOSSES[pipe.dtype], 2 * MOMENTS[pipe.dtype])
    for name, found, bound in zip(("weights", "losses", "norms"), apart[1:4], bounds, strict=True):
        if not found <= bound:
            problems.append(f"{name} {found:.1e} apart")
    if ours.applied != stock.applied:
        problems.append(f"steps {ours.applied}, stock's {stock.applied}")
    return Verdict(problems, ["oracle: stage 1"])
