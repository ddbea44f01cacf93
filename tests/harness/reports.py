# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Reports of trainings that did not happen, with the fields that ``paro_report`` writes and figures by hand."""

from dataclasses import replace
from typing import Any

from deepspeed_ext.planner.compression import UNCOMPRESSED
from deepspeed_ext.planner.costs import PLAIN
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import Rate, Rates
from deepspeed_ext.strategy import GroupSizes, hyphenate
from deepspeed_ext.tools.plan.recorded_training import KEY, Cluster, FlatRates, PlannerInput

LETTERS = {"NIG": "p=N, g=I, os=G", "IIG": "p=I, g=I, os=G"}
STEP = 0.5  # seconds
_MICRO_STEPS, _BLOCKS, _GROUP = 4, 8, 2
_SECONDS = {"forward": 0.005, "backward": 0.01}  # of a block
_BYTES = 2.1e6  # of a block that a rank receives

Span = list[Any]


def _lanes(strategy: str, speed: float) -> list[dict[str, Any]]:
    lanes: dict[str, list[Span]] = {"training": [], "within": [], "between": [], "copies": []}
    training, within, between, copies = lanes.values()
    now = 0.0
    for micro_step in range(_MICRO_STEPS):
        for kind, seconds in _SECONDS.items():
            block = seconds * speed
            training.append([now, now + _BLOCKS * block, kind, kind, None, None])
            for number in range(_BLOCKS) if kind == "forward" else reversed(range(_BLOCKS)):
                name = f"blocks.{number}"
                training.append([now, now + block, kind, kind, None, name])
                if strategy == "IIG":
                    within.append([now, now + 0.2 * block, "intra_all_gather", "gather", _BYTES, None])
                    training.append([now, now + 0.2 * block, "wait for intra_all_gather", "wait", None, name])
                if kind == "backward":
                    copies.append([now + 0.9 * block, now + block, "pack", "copy", _BYTES, None])
                    reduction = [now + 0.5 * block, now + 2 * block, "intra_reduce_scatter", "reduce", _BYTES, None]
                    within.append(reduction)
                    if micro_step == _MICRO_STEPS - 1:
                        between.append([*reduction[:2], "inter_reduce_scatter", *reduction[3:]])
                now += block
    end = now + 0.02 * speed
    training.append([now, end, "update", "update", None, None])
    training.append([now + 0.01 * speed, end, "wait for inter_all_gather", "wait", None, None])
    between.append([now, end, "inter_all_gather", "gather", _BLOCKS * _BYTES, None])
    if end < STEP:
        training.append([end, STEP, "wait", "wait", None, None])
    return [{"lane": lane, "spans": spans} for lane, spans in lanes.items()]


def planner_input(name: str = "NIG", ranks: int = 4, group_size: int = _GROUP) -> PlannerInput:
    """Return the planner's inputs in a report, at 500 Mbit/s; reductions over all ranks send twice a ring's bytes."""
    letters = {stage: letters for letters, stage in PLAIN.items()}.get(name, name)
    sizes = GroupSizes(ranks, group_size)
    model = replace(Model.of_size(8_400_000, width=4), accumulation=_MICRO_STEPS, compute=0.25 / _MICRO_STEPS)
    rates, ring = Rates.of_links(sizes, group_size, 8.0, 0.5), Rate(0.0, 0.5e9 / 8)
    if sizes.groups == 1:  # as the probe has a hop over one rank
        hops = replace(rates.gather, inter=Rate(0.0, float("inf")))
        rates = replace(rates, gather=hops, reduce=hops)
    reduction = replace(ring, bandwidth=ring.bandwidth / 2)
    flat, cluster = FlatRates(ring, reduction, reduction), Cluster(sizes, group_size)
    return PlannerInput(letters, letters != name, UNCOMPRESSED, cluster, "gloo", model, rates, flat)


def report(strategy: str = "NIG", ranks: int = 4, group_size: int = _GROUP) -> dict[str, Any]:
    groups, parameters = ranks // group_size, 8_400_000
    called = f"{hyphenate(strategy)} ({LETTERS[strategy]})"
    parts = {"compute": (0.25, 0.98), "within": (0.08, 0.6), "between": (0.12, 0.85), "update": (0.03, 1.0)}
    parts["other"] = (0.02, 0.4)
    hop = {"busy": 0.2, "exposed": 0.1, "predicted_exposed": 0.08, "rate": 4e8, "probed_rate": 5e8}
    operations = [("inter_reduce_scatter", "between", 8, 0.12), ("intra_reduce_scatter", "within", 32, 0.08)]
    due = {"parameters": 4 * parameters / (1 if strategy == "NIG" else group_size)}
    due |= {"gradients": 4 * parameters / group_size, "optimizer states": 12 * parameters / ranks}
    # Of the rank, seconds of the step, of waits within and between groups, bytes between groups, and GB.
    choices = {
        "NIG + LoCo": (0.6, 0.3, 0.05, 3e6, 0.08),
        "NIG": (1.0, 0.3, 0.2, 2.1e7, 0.075),
        "IIG": (1.15, 0.5, 0.2, 2.1e7, 0.059),
        "ZeRO-3": (4.2, 0.0, 3.8, 1.5e8, 0.042),
    }
    unit = STEP / choices[strategy][0]
    findings = [
        "No strategy is predicted to be faster by more than 5%." if strategy == "NIG" else "NIG is faster: 0.43 s.",
        "The step waits for transfers between groups for 24% of its time.",
        "Rank 0 on node0 computes 1.1 times as long as the median rank, and the others wait for it.",
    ]
    return {
        "format": 1,
        "made": {
            "when": "2026-11-26 23:40",
            "versions": {"deepspeed_ext": "0.1.0", "deepspeed": "0.19.8", "torch": "2.13.0", "python": "3.11.7"},
            "device": "cpu",
            "hosts": [f"node{number}" for number in range(groups)],
            "script": "train.py",
        },
        "training": {
            **{"strategy": strategy, "called": called, "stage": 2 if strategy == "NIG" else 3, "dtype": "fp32"},
            **{"ranks": ranks, "group_size": group_size, "groups": groups, "accumulation": _MICRO_STEPS},
            **dict.fromkeys(("parameters", "trainable"), parameters),
            **dict.fromkeys(("loco", "updates"), False),
        },
        "steps": {"first": 11, "seconds": [STEP * 1.01, STEP, STEP * 0.99], "undisturbed": 0.498, "overhead": 0.004},
        "parts": [{"part": part, "seconds": took, "predicted": took * share} for part, (took, share) in parts.items()],
        "hops": [
            {"hop": name, "bytes": nbytes, "formula_bytes": nbytes, **hop}
            for name, nbytes in (("within", 6.7e7), ("between", 3.4e7))
        ],
        "operations": [
            {"name": name, "hop": of, "count": count, "bytes": count * _BYTES, "busy": 0.2, "exposed": exposed}
            for name, of, count, exposed in operations
        ],
        "modules": [{"module": f"blocks.{n}", "exposed": 0.01} for n in range(_BLOCKS if strategy == "IIG" else 0)],
        "memory": [{"state": state, "bytes": 1.01 * formula, "formula": formula} for state, formula in due.items()],
        "ranks": [
            {"rank": rank, "host": f"node{rank // group_size}", "step": STEP, "compute": item, "waiting": 0.45 - item}
            for rank in range(ranks)
            for item in [0.3 if rank == 0 else 0.25 + 0.02 * rank / ranks]
        ],
        "timelines": [
            {"which": index, "rank": rank, "host": host, "step": 12, "seconds": STEP, "lanes": _lanes(strategy, speed)}
            for index, rank, host, speed in (("slowest", 0, "node0", 1.0), ("fastest", ranks - 1, "node1", 0.85))
        ],
        "choices": [
            {"strategy": name, "step": unit * step, "within": unit * within, "between": unit * between}
            | {"bytes_between": nbytes, "gb": gb, "fits": name != "NIG + LoCo" or None, "now": name == strategy}
            for name, (step, within, between, nbytes, gb) in choices.items()
        ],
        KEY: planner_input(strategy, ranks, group_size).as_dict(),
        "findings": findings,
        "paragraph": f"A step of {called} takes {STEP} s. {findings[0]}",
    }


def large(spans: int = 20_000) -> dict[str, Any]:
    """Return a report of a training of 16,384 ranks, with at least this number of spans in each timeline."""
    created = report("IIG", 16_384, 8)
    for timeline in created["timelines"]:
        base = [(lane["spans"], list(lane["spans"])) for lane in timeline["lanes"]]
        seconds, copies = timeline["seconds"], -(-spans // sum(len(row) for _, row in base))
        for number in range(1, copies):
            for target, row in base:
                target += [[begin + number * seconds, end + number * seconds, *rest] for begin, end, *rest in row]
        timeline["seconds"] = seconds * copies
    return created


def empty() -> dict[str, Any]:
    """Return a report in which all that may be missing is missing."""
    created = report()
    lists = ("parts", "hops", "operations", "modules", "memory", "ranks", "timelines", "choices", "findings")
    created |= {name: [] for name in lists}
    created["steps"] |= {"undisturbed": None, "overhead": None}
    return created


def sparse() -> dict[str, Any]:
    """Return a report of a plain stage without predictions, probes, modules and bytes."""
    created = report("IIG")
    created["training"] |= {"strategy": None, "called": "ZeRO-3"}
    for rows, names in (
        ("parts", ["predicted"]),
        ("hops", ["formula_bytes", "predicted_exposed", "rate", "probed_rate"]),
        ("memory", ["formula"]),
    ):
        for row in created[rows]:
            row |= dict.fromkeys(names)
    for timeline in created["timelines"]:
        for lane in timeline["lanes"]:
            lane["spans"] = [[*span[:4], None, None] for span in lane["spans"]]
    return created | {"choices": [], "modules": []}


def hostile() -> dict[str, Any]:
    """Return a report with names that would break out of a page that trusts them."""
    name = "</script><script>document.title='run'</script><!--<img src=x onerror=alert(1)>\u2028&amp;'\"$title"
    created = report()
    created["paragraph"] = created["training"]["called"] = created["made"]["script"] = name
    created["made"]["hosts"] = [name]
    created["findings"] = [name + "."]
    created["modules"] = [{"module": name, "exposed": 0.01}]
    created["operations"][0]["name"] = name
    created["choices"][1]["strategy"] = name
    for row in created["ranks"]:
        row["host"] = name
    for timeline in created["timelines"]:
        timeline["host"] = name
        for lane in timeline["lanes"]:
            lane["spans"] = [[*span[:2], name, span[3], span[4], name] for span in lane["spans"]]
    return created
