# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a report says in words: one paragraph, and what stands out. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from deepspeed_ext.planner.choice import best
from deepspeed_ext.tools.report.measures import COMPUTE, UPDATE
from deepspeed_ext.tools.report.recording import BETWEEN, WITHIN

_NAMES = {COMPUTE: "compute", WITHIN: "exposed within groups", BETWEEN: "exposed between groups", UPDATE: "the update"}
_WORTH = 0.05  # of a step: what is less is not pointed out
_SLOW = 2.0  # times that a hop may take of what the probe finds
_UNEVEN = 0.1  # of the median of compute
_APART = 0.05  # of bytes that are held
_MORE = 0.2  # of bytes that are received
_OVERHEAD = 0.02

Report = Mapping[str, Any]


def paragraph(report: Report) -> str:
    """Return what a step takes, what it is made of, what was predicted, and what would be faster."""
    training = report["training"]
    step = _step(report)
    named = [(f"{seconds:.3g} s {_NAMES[part]}") for part, seconds in _parts(report).items() if part in _NAMES]
    left = _parts(report)["other"]
    said = (
        f"A step of {training['called']} takes {step:.3g} s on {training['ranks']} ranks in {training['groups']} "
        f"group(s) of {training['group_size']}: {', '.join(named)}, and {left:.3g} s of anything else"
    )
    predicted = [row["predicted"] for row in report["parts"] if row["predicted"] is not None]
    if predicted:
        said += f". The planner predicts {sum(predicted):.3g} s"
    return f"{said}. {' '.join(report['findings'][:2])}".strip()


def findings(report: Report) -> list[str]:
    """Return what stands out, the most important first; each is a sentence that says what to do about it."""
    found = [*_faster(report), *_slow_hops(report), *_other(report), *_uneven(report), *_memory(report)]
    return [*found, *_bytes(report), *_overhead(report)]


def _step(report: Report) -> float:
    return float(median(report["steps"]["seconds"]))


def _parts(report: Report) -> dict[str, float]:
    return {row["part"]: row["seconds"] for row in report["parts"]}


def _faster(report: Report) -> Iterator[str]:
    fitting = [one for one in report["choices"] if one["fits"] is not False]
    now = next((one for one in report["choices"] if one["now"]), None)
    if now is None:
        return
    exact = _best([one for one in fitting if " + " not in one["strategy"]] or [now])
    lossy = _best([*fitting, now])
    if exact["step"] < (1 - _WORTH) * now["step"]:
        yield _gain(exact, now, "is predicted to be faster")
    # What crosses in 4 bits changes the training a little: that is for its user to weigh.
    if lossy["step"] < (1 - 2 * _WORTH) * min(exact["step"], now["step"]):
        yield _gain(lossy, now, "would be faster still, with gradients or updates in 4 bits")
    elif exact["step"] >= (1 - _WORTH) * now["step"]:
        yield f"No strategy is predicted to be faster by more than {_WORTH:.0%}."


def _best(some: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return best(some, lambda one: float(one["step"]), lambda one: float(one["gb"]))


def _gain(one: Mapping[str, Any], now: Mapping[str, Any], how: str) -> str:
    memory = f"{one['gb']:.3g} GB of model states on each rank, now {now['gb']:.3g}"
    return f"{one['strategy']} {how}: {one['step']:.3g} s instead of {now['step']:.3g} ({memory})."


def _slow_hops(report: Report) -> Iterator[str]:
    where = {WITHIN: "within groups", BETWEEN: "between groups"}
    for hop in report["hops"]:
        if hop["exposed"] < _WORTH * _step(report):
            continue
        reached, probed = hop["rate"], hop["probed_rate"]
        share = hop["exposed"] / _step(report)
        if reached and probed and probed > _SLOW * reached:
            yield (
                f"What crosses {where[hop['hop']]} reaches {reached / 1e6:.3g} MB/s a rank, where the probe finds "
                f"{probed / 1e6:.3g}: messages are small, ranks come late, or compute takes the cores that move them."
            )
        else:
            yield f"The step waits for {share:.0%} of its time for what crosses {where[hop['hop']]}."


def _other(report: Report) -> Iterator[str]:
    share = _parts(report)["other"] / _step(report)
    if share > 2 * _WORTH:
        yield (
            f"{share:.0%} of the step is neither compute, update nor an exposed hop: copies into and out of buckets, "
            f"the data loader, the script, or ranks that wait for one another."
        )


def _uneven(report: Report) -> Iterator[str]:
    if len(report["ranks"]) < 2:
        return
    usual = median(one["compute"] for one in report["ranks"])
    worst = max(report["ranks"], key=lambda one: one["compute"])
    if usual and worst["compute"] > (1 + _UNEVEN) * usual:
        yield (
            f"Rank {worst['rank']} on {worst['host']} computes {worst['compute'] / usual:.2g} times as long as the "
            f"median rank, and the others wait for it."
        )


def _memory(report: Report) -> Iterator[str]:
    for row in report["memory"]:
        if row["formula"] and row["bytes"] > (1 + 2 * _APART) * row["formula"]:
            yield (
                f"This rank holds {row['bytes'] / 1e9:.3g} GB of {row['state']}, where the strategy needs "
                f"{row['formula'] / 1e9:.3g}."
            )


def _bytes(report: Report) -> Iterator[str]:
    for hop in report["hops"]:
        formula = hop["formula_bytes"]
        # Fewer are gathered where modules are kept, and what a thread sends may count for the step after its own.
        if formula and hop["bytes"] > (1 + _MORE) * formula:
            source = "its group" if hop["hop"] == WITHIN else "other groups"
            yield (
                f"A rank receives {hop['bytes'] / 1e6:.3g} MB from {source} in a step, where the formula has "
                f"{formula / 1e6:.3g}."
            )


def _overhead(report: Report) -> Iterator[str]:
    share = report["steps"]["overhead"]
    if share is not None and share > _OVERHEAD:
        yield f"Recorded steps took {share:.1%} longer than those around them, so their parts are a little too long."
