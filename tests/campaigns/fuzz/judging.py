# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares a case with its oracle, and returns the problems; inside rank processes only.

Note [What a case is compared with]
    A case is trained by us and by stock DeepSpeed at the stage that is nearest to the strategy, with the keys that are
    not ours; if it says so by us on a simulated device with streams, too, and without kernels, to the bit; and where
    events must change nothing, by us without these, to the bit. Where a stage has a known fault (``oracles.FAULTS``)
    stock is another stage. Our run with streams must match our run without, and the run of stock, to rounding.
    If gradients or updates are sent in few bits, the way from the first weights to the last must be stock's, but for
    a part; and if updates are sent without loss, the oracle is also our own run without that key, to the bit.
"""

import dataclasses
import math
import traceback
from collections.abc import Iterator

import torch
from deepspeed import comm as dist
from torch import Tensor

from tests.campaigns.fuzz import oracles, runs
from tests.campaigns.fuzz.cases import ORACLE, Case, PipeCase
from tests.campaigns.fuzz.pipes import LOSSES, MOMENTS, WEIGHTS, Verdict, judge_pipe
from tests.harness.reference_codecs import reference_codecs
from tests.harness.stream_order import device_with_streams
from tests.harness.training import DTYPES

# Of the way of all weights: what four bits with error feedback may change of it. Without a parameter's gradient it is
# another way.
LOSSY = 0.5
# Events after which every bit must be what it would have been.
SAVES = {"save and load", "resume", "broken load"}
QUIET = {*SAVES, "look", "states", "offload", "export", "second engine"}
HELD = 4096  # bytes more than before: losses and norms are kept
# Muon makes rounding several hundred times larger where a gradient has a rank below its sizes, as here most have.
MUON, MUON_IN_16_BITS, MUON_NORMS = 4, 20, 0.9


def judge(case: Case | PipeCase) -> Verdict:
    """Run a case and compare. Collective."""
    return judge_pipe(case) if isinstance(case, PipeCase) else _judge(case)


def _judge(case: Case) -> Verdict:
    try:
        ours = runs.train(case, case.zero, True)
    except Exception as error:
        print(f"RAISED {traceback.format_exc()}", flush=True)  # for who waits for this rank
        return _refused(case, error)
    problems = list(_wrong_alone(case, ours))
    happened = ["experts in windows"] if ours.windows else []
    if case.streams:
        problems += _with_streams(case, ours)
        happened.append("ordered on streams")
    if case.reference:
        with reference_codecs():
            problems += _bits(ours, runs.train(case, case.zero, True), "without kernels")
        happened.append("without kernels")
    if undisturbed := _without_events(case):
        problems += _bits(ours, runs.train(undisturbed, case.zero, True), "without what changes nothing")
        happened.append("undisturbed")
    if case.exact:
        plain = {key: value for key, value in case.zero.items() if key != "paro_quantized_updates"}
        problems += _bits(ours, runs.train(case, plain, True), "with updates as they are")
    everyone: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, bool(problems))
    if any(everyone):  # all ranks continue, or none
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
    return Verdict([*problems, *_apart(case, ours, stock)], [*happened, f"oracle: stage {stage}"])


def _with_streams(case: Case, ours: runs.Trained) -> Iterator[str]:
    """Return accesses without an order on a device with streams, and differences there."""
    with device_with_streams() as order:
        streamed = runs.train(case, case.zero, True, order)
    yield from (f"order: {finding}" for finding in order.findings)
    if not order.accesses:
        yield "order: no access was seen"
    # Messages are filled up there, and gloo adds up in an order that depends on the place in a message.
    yield from (f"with streams: {problem}" for problem in _apart(case, streamed, ours))


def _without_events(case: Case) -> Case | None:
    """A case without the events that must not change a bit; None if there are none, or others that do."""
    names = {event.name for event in case.events()}
    # A save sends whole parameters, so what updates in few bits have not sent yet arrives earlier than without it.
    quiet = QUIET - SAVES if "paro_quantized_updates" in case.zero and not case.exact else QUIET
    if not names & quiet or names & {"universal", "elsewhere", "write nothing"}:
        return None
    steps = (
        dataclasses.replace(step, before=tuple(event for event in step.before if event.name not in quiet))
        for step in case.steps
    )
    return dataclasses.replace(case, steps=tuple(steps))


def _refused(case: Case, error: Exception) -> Verdict:
    messages = f"{type(error).__name__}: {error}"
    # After two backwards for one forward, stock may raise the same; otherwise its exception may differ.
    for provided in (case, oracles.as_stock_runs_it(case, case.stage)):
        try:
            runs.train(provided, oracles.keys_of(case, case.stage), False)
        except Exception as other:
            if provided is not case or type(other) is type(error):
                return Verdict([], [f"both raise: stock {type(other).__name__}: {str(other)[:60]}"])
    trace = "".join(traceback.format_tb(error.__traceback__)[-4:]).rstrip()
    return Verdict([f"raises {messages}\n{trace}"], [])


def _wrong_alone(case: Case, ours: runs.Trained) -> Iterator[str]:
    if not ours.replicas_equal:
        yield "replicas differ"
    if not torch.isfinite(ours.weights).all():
        yield "weights are not finite"
    earlier, last = ours.held[1:-1], ours.held[-1]
    if earlier and last > max(earlier) + HELD and not case.events():
        yield f"memory grows: bytes after each step {ours.held}"


def _bits(one: runs.Trained, other: runs.Trained, what: str) -> Iterator[str]:
    apart = [name for name in one.states if not torch.equal(one.states[name], other.states[name])]
    if apart:
        yield f"{what}: other bits of {len(apart)} of {len(one.states)} states, as {sorted(apart)[0]}"
    for name in ("losses", "norms", "scales", "applied"):
        pair = getattr(one, name), getattr(other, name)
        if str(pair[0]) != str(pair[1]):  # as text: NaN is NaN
            yield f"{what}: other {name}: {pair[0]} and {pair[1]}"


def _apart(case: Case, ours: runs.Trained, stock: runs.Trained) -> Iterator[str]:
    if (ours.scales, ours.applied) != (stock.scales, stock.applied):
        yield f"steps: {ours.applied} at scales {ours.scales}, stock {stock.applied} at {stock.scales}"
        return
    if case.lossy:
        if case.optimizer != "Muon":  # it takes directions, which few bits may turn
            yield from _far(case, ours, stock)
        return
    results = ((ours.weights - stock.weights).abs().max() / stock.weights.abs().max()).item()
    if not results <= _bound(case, WEIGHTS):
        yield f"weights {results:.1e} apart"
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
    """Return differences of states, relative to the largest of their kind, or the largest gradient."""
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
            results = (ours[name].float() - stock[name].float()).abs().max().item() / largest[kind]
            if not results <= bound:
                yield f"{name} is {results:.1e} of the largest apart"
                return


def _far(case: Case, ours: runs.Trained, stock: runs.Trained) -> Iterator[str]:
    """Return the distance of the change of all weights from stock's, except an ulp of each."""
    first = runs.first_weights(case)
    route, other = ours.weights - first, stock.weights - first
    rounding = torch.finfo(DTYPES[case.dtype]).eps * first.norm()
    if other.norm() > 0 and not (route - other).norm() <= LOSSY * other.norm() + rounding:
        yield f"the way of the weights is {(route - other).norm() / other.norm():.2f} of itself apart"


def _bound(case: Case, bounds: dict[str, float]) -> float:
    lower = case.config.get("torch_autocast") or case.config.get("communication_data_type") == "bf16"
    precision = "bf16" if lower and case.dtype == "fp32" else case.dtype
    if case.optimizer == "Muon":
        return min(MUON_NORMS, bounds[precision] * (MUON if precision == "fp32" else MUON_IN_16_BITS))
    return bounds[precision]


def _close(one: float, other: float, bound: float, root: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) <= bound * max(1e-3, abs(other), root * abs(other) ** 0.5)
    return str(one) == str(other)
