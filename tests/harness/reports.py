# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Reports of trainings that did not happen: what ``paro_report`` would write, from a small model of a step.

Compute, the links within groups and those between groups take turns as in a real step, so that parts sum to the step,
waits lie in forwards and backwards, and transfers overlap. The same arguments give the same report.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LETTERS = {"NIG": "p=N, g=I, os=G", "IIG": "p=I, g=I, os=G"}
SLOW, FAST = 1.0, 0.85  # compute of ranks
_RATES = {"within": 400e6, "between": 50e6}  # bytes a second
_ADAM = 12  # bytes of states per parameter, and 4 of a parameter and of a gradient
_COPY = 0.0004  # seconds per bucket

Span = list[Any]


@dataclass(frozen=True)
class Sizes:
    """What is trained, and on what: parameters of each of ``blocks``, ranks, ranks of a group, micro-steps."""

    blocks: int = 8
    parameters: int = 1_050_000
    ranks: int = 4
    group_size: int = 2
    accumulation: int = 4

    @property
    def groups(self) -> int:
        """Return the number of groups."""
        return self.ranks // self.group_size


@dataclass
class _Rank:
    """The clock of a rank and of its links, and what it has written down."""

    speed: float
    random: random.Random
    now: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: {"within": 0.0, "between": 0.0})
    lanes: dict[str, list[Span]] = field(
        default_factory=lambda: {"training": [], "within": [], "between": [], "copies": []}
    )
    exposed: Counter[tuple[str, str]] = field(default_factory=Counter)  # by operation and hop
    by_module: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def inside(self, name: str, kind: str, module: str | None = None) -> Iterator[None]:
        """Put what follows into a span of the training lane."""
        begin = self.now
        span: Span = [begin, begin, name, kind, None, module]
        self.lanes["training"].append(span)
        yield
        span[1] = self.now

    def compute(self, seconds: float) -> None:
        """Let time pass; no two blocks take the same."""
        self.now += seconds * self.speed * self.random.uniform(0.95, 1.05)

    def send(self, hop: str, name: str, kind: str, nbytes: float) -> Span:
        """Start a transfer; it is drawn from its start, also where it has to wait for the link."""
        end = max(self.now, self.free[hop]) + nbytes / _RATES[hop]
        self.free[hop] = end
        span: Span = [self.now, end, name, kind, nbytes, None]
        self.lanes[hop].append(span)
        return span

    def wait(self, transfer: Span, hop: str, module: str | None) -> None:
        """Wait for a transfer, if it is still under way."""
        if transfer[1] <= self.now:
            return
        with self.inside(f"wait for {transfer[2]}", "wait", module):
            self.exposed[transfer[2], hop] += transfer[1] - self.now
            self.by_module[module or ""] += transfer[1] - self.now
            self.now = transfer[1]

    def copy(self, nbytes: float) -> None:
        """Pack a bucket."""
        self.lanes["copies"].append([self.now, self.now + _COPY, "pack", "copy", nbytes, None])
        with self.inside("other", "other"):
            self.now += _COPY


def _step(strategy: str, sizes: Sizes, speed: float, seed: int) -> _Rank:
    """Run one step of a rank."""
    rank = _Rank(speed, random.Random(f"{strategy} {seed}"))
    nbytes, m, k = 4.0 * sizes.parameters, sizes.group_size, sizes.groups
    inside, across = nbytes * (m - 1) / m, nbytes * (k - 1) / k / m
    gather = {"IIG": ("within", "intra_all_gather", inside), "ZeRO-3": ("between", "all_gather", 1.5 * across * m)}
    for micro_step in range(sizes.accumulation):
        for kind, seconds in (("forward", 0.0035), ("backward", 0.007)):
            with rank.inside(kind, kind):
                left = []
                for block in range(sizes.blocks) if kind == "forward" else reversed(range(sizes.blocks)):
                    name = f"blocks.{block}"
                    with rank.inside(kind, kind, name):
                        if strategy in gather:
                            hop, operation, size = gather[strategy]
                            rank.wait(rank.send(hop, operation, "gather", size), hop, name)
                        rank.compute(seconds)
                        if kind == "backward":
                            rank.copy(nbytes)
                            left += _reduce(rank, strategy, micro_step == sizes.accumulation - 1, inside, across, m)
                for transfer, hop in left[-2:]:
                    rank.wait(transfer, hop, None)
    _update(rank, strategy, sizes, inside * sizes.blocks, across * sizes.blocks)
    return rank


def _reduce(
    rank: _Rank, strategy: str, last: bool, inside: float, across: float, m: int
) -> Iterator[tuple[Span, str]]:
    """Reduce a bucket of gradients: within groups in each micro-step, between groups in the last one."""
    if strategy == "ZeRO-3":
        yield rank.send("between", "reduce_scatter", "reduce", 1.5 * across * m), "between"
        return
    yield rank.send("within", "intra_reduce_scatter", "reduce", inside), "within"
    if last:
        yield rank.send("between", "inter_reduce_scatter", "reduce", across), "between"


def _update(rank: _Rank, strategy: str, sizes: Sizes, inside: float, across: float) -> None:
    with rank.inside("update", "update"):
        rank.compute(0.004 * sizes.blocks)
    if strategy == "ZeRO-3":
        return
    rank.wait(rank.send("between", "inter_all_gather", "gather", across), "between", None)
    if strategy == "NIG":
        rank.wait(rank.send("within", "intra_all_gather", "gather", inside), "within", None)


def report(strategy: str = "NIG", sizes: Sizes | None = None, seed: int = 0) -> dict[str, Any]:
    """Return a report.

    Args:
        strategy: NIG, IIG, or ZeRO-3.
        sizes: of the training; by default a small GPT on four ranks in two groups.
        seed: of the differences between blocks and ranks.
    """
    sizes = sizes or Sizes()
    slow, fast = (_step(strategy, sizes, speed, seed) for speed in (SLOW, FAST))
    step = slow.now * 1.02  # what is left is the data loader
    with fast.inside("wait", "wait"):
        fast.now = max(fast.now, slow.now)
    parts, hops = _parts(slow, step), _hops(slow)
    total = sizes.blocks * sizes.parameters
    called = f"{strategy} ({LETTERS[strategy]})" if strategy in LETTERS else strategy
    choices = _choices(strategy, step)
    findings = _findings(strategy, choices)
    between = next(row["seconds"] for row in parts if row["part"] == "between")
    return {
        "format": 1,
        "made": {
            "when": "2026-11-26 23:40",
            "versions": {"deepspeed_ext": "0.1.0", "deepspeed": "0.19.8", "torch": "2.13.0", "python": "3.11.7"},
            "device": "cpu",
            "hosts": [f"node{i}" for i in range(sizes.groups)],
            "script": "train.py",
        },
        "training": {
            "strategy": strategy if strategy in LETTERS else None,
            "called": called,
            "stage": 2 if strategy == "NIG" else 3,
            "ranks": sizes.ranks,
            "group_size": sizes.group_size,
            "groups": sizes.groups,
            "accumulation": sizes.accumulation,
            "parameters": total,
            "trainable": total,
            "dtype": "fp32",
            "loco": False,
            "updates": False,
        },
        "steps": {
            "first": 11,
            "seconds": [step * 1.01, step, step * 0.99],
            "undisturbed": step / 1.004,
            "overhead": 0.004,
        },
        "parts": parts,
        "hops": hops,
        "operations": _operations(slow),
        "modules": [{"module": name, "exposed": seconds} for name, seconds in slow.by_module.most_common() if name],
        "memory": _memory(strategy, sizes, total),
        "ranks": _ranks(sizes, seed, step),
        "timelines": [
            _timeline("slowest", 0, "node0", slow, step),
            _timeline("fastest", sizes.ranks - 1, f"node{sizes.groups - 1}", fast, step),
        ],
        "choices": choices,
        "findings": findings,
        "paragraph": f"A step of {called} takes {step:.3g} s on {sizes.ranks} ranks in {sizes.groups} groups of "
        f"{sizes.group_size}, {between:.3g} s of it exposed between groups. {findings[0]}",
    }


def _length(spans: list[Span]) -> float:
    """Return the seconds in which at least one of the spans is open."""
    total, last = 0.0, 0.0
    for begin, end, *_ in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def _parts(rank: _Rank, step: float) -> list[dict[str, Any]]:
    """Return the parts of a step; what nothing else takes is "other"."""
    training = rank.lanes["training"]
    within, between = (sum(s for (_, hop), s in rank.exposed.items() if hop == name) for name in ("within", "between"))
    update = _length([span for span in training if span[3] == "update"])
    elsewhere = [span for span in training if span[3] in ("wait", "other")]
    phases = [span for span in training if span[3] in ("forward", "backward")]
    compute = _length(phases) - sum(
        _length([span]) for span in elsewhere if any(one[0] <= span[0] and span[1] <= one[1] for one in phases)
    )
    found = {"compute": compute, "within": within, "between": between, "update": update}
    found["other"] = step - sum(found.values())
    return [
        {"part": part, "seconds": seconds, "predicted": seconds * factor}
        for (part, seconds), factor in zip(found.items(), (0.98, 0.6, 0.85, 1.0, 0.4), strict=True)
    ]


def _hops(rank: _Rank) -> list[dict[str, Any]]:
    rows = []
    for hop in ("within", "between"):
        spans = rank.lanes[hop]
        if spans:
            nbytes, busy = sum(span[4] for span in spans), _length(spans)
            exposed = sum(seconds for (_, of), seconds in rank.exposed.items() if of == hop)
            row = {"hop": hop, "bytes": nbytes, "formula_bytes": nbytes * 0.998, "busy": busy, "exposed": exposed}
            rows.append(
                row | {"predicted_exposed": exposed * 0.8, "rate": nbytes / busy, "probed_rate": 1.1 * _RATES[hop]}
            )
    return rows


def _operations(rank: _Rank) -> list[dict[str, Any]]:
    rows = []
    for hop in ("within", "between"):
        for name in sorted({span[2] for span in rank.lanes[hop]}):
            spans = [span for span in rank.lanes[hop] if span[2] == name]
            nbytes, exposed = sum(span[4] for span in spans), rank.exposed[name, hop]
            row = {"name": name, "hop": hop, "count": len(spans), "bytes": nbytes}
            rows.append(row | {"busy": _length(spans), "exposed": exposed})
    return sorted(rows, key=lambda row: -row["exposed"])


def _memory(strategy: str, sizes: Sizes, total: int) -> list[dict[str, Any]]:
    n, m = sizes.ranks, sizes.group_size
    shards = {"NIG": (1, m, n), "IIG": (m, m, n), "ZeRO-3": (n, n, n)}[strategy]
    states = zip(("parameters", "gradients", "optimizer states"), (4, 4, _ADAM), shards, strict=True)
    rows = [(state, total * size / count) for state, size, count in states]
    return [{"state": state, "bytes": nbytes * 1.01, "formula": nbytes} for state, nbytes in rows]


def _ranks(sizes: Sizes, seed: int, step: float) -> list[dict[str, Any]]:
    """Return a row for each rank; the first one computes longest."""
    chance = random.Random(seed)
    rows = []
    for rank in range(sizes.ranks):
        compute = step * (0.6 if rank == 0 else chance.uniform(0.5, 0.55))
        waiting = step * (0.95 - chance.uniform(0, 0.02)) - compute
        host = f"node{rank // sizes.group_size}"
        rows.append({"rank": rank, "host": host, "step": step, "compute": compute, "waiting": waiting})
    return rows


def _timeline(which: str, number: int, host: str, rank: _Rank, step: float) -> dict[str, Any]:
    lanes = [{"lane": lane, "spans": spans} for lane, spans in rank.lanes.items() if spans]
    return {"which": which, "rank": number, "host": host, "step": 12, "seconds": step, "lanes": lanes}


def _choices(strategy: str, step: float) -> list[dict[str, Any]]:
    """Return what a planner might say, in units of the step that runs."""
    figures = {
        "NIG + LoCo": (0.6, 0.3, 0.05, 3e6, 0.08),
        "NIG": (1.0, 0.3, 0.2, 2.1e7, 0.075),
        "IIG": (1.15, 0.5, 0.2, 2.1e7, 0.059),
        "ZeRO-2": (2.1, 0.0, 1.6, 9.4e7, 0.067),
        "ZeRO-3": (4.2, 0.0, 3.8, 1.5e8, 0.042),
    }
    now = figures[strategy][0]
    names = ("step", "within", "between", "bytes_between", "gb")
    rows = []
    for name, row in figures.items():
        seconds = [step * value / now for value in row[:3]]
        values = dict(zip(names, [*seconds, *row[3:]], strict=True))
        rows.append({"strategy": name, **values, "fits": name != "NIG + LoCo" or None, "now": name == strategy})
    return rows


def _findings(strategy: str, choices: list[dict[str, Any]]) -> list[str]:
    best, now = choices[1], next(one for one in choices if one["now"])
    first = f"{best['strategy']} is predicted to be faster: {best['step']:.3g} s instead of {now['step']:.3g}."
    return [
        "No strategy is predicted to be faster by more than 5%." if strategy == "NIG" else first,
        "The step waits for 30% of its time for what crosses between groups.",
        "Rank 0 on node0 computes 1.1 times as long as the median rank, and the others wait for it.",
    ]


def large(spans: int = 20_000, ranks: int = 16_384) -> dict[str, Any]:
    """Return a report of a large training: so many ranks, and at least so many spans in each timeline."""
    made = report("IIG", Sizes(blocks=96, ranks=ranks, group_size=8, accumulation=8))
    for timeline in made["timelines"]:
        base = [(lane["spans"], list(lane["spans"])) for lane in timeline["lanes"]]
        seconds, copies = timeline["seconds"], -(-spans // sum(len(row) for _, row in base))
        for number in range(1, copies):
            for target, row in base:
                target += [[begin + number * seconds, end + number * seconds, *rest] for begin, end, *rest in row]
        timeline["seconds"] = seconds * copies
    return made


def empty() -> dict[str, Any]:
    """Return a report in which all that may be missing is missing."""
    made = report()
    lists = ("parts", "hops", "operations", "modules", "memory", "ranks", "timelines", "choices", "findings")
    made |= {name: [] for name in lists}
    made["steps"] |= {"undisturbed": None, "overhead": None}
    return made


def sparse() -> dict[str, Any]:
    """Return a report without predictions, probes, modules and bytes."""
    made = report("ZeRO-3")
    for rows, names in (
        ("parts", ["predicted"]),
        ("hops", ["formula_bytes", "predicted_exposed", "rate", "probed_rate"]),
        ("memory", ["formula"]),
    ):
        for row in made[rows]:
            row |= dict.fromkeys(names)
    for timeline in made["timelines"]:
        for lane in timeline["lanes"]:
            lane["spans"] = [[*span[:4], None, None] for span in lane["spans"]]
    return made | {"choices": [], "modules": []}


def hostile() -> dict[str, Any]:
    """Return a report with names that would break out of a page that trusts them."""
    name = "</script><script>document.title='run'</script><!--<img src=x onerror=alert(1)>\u2028&amp;'\"$title"
    made = report()
    made["paragraph"] = made["training"]["called"] = made["made"]["script"] = name
    made["made"]["hosts"] = [name]
    made["findings"] = [name + "."]
    made["modules"] = [{"module": name, "exposed": 0.01}]
    made["operations"][0]["name"] = name
    made["choices"][1]["strategy"] = name
    for row in made["ranks"]:
        row["host"] = name
    for timeline in made["timelines"]:
        timeline["host"] = name
        for lane in timeline["lanes"]:
            lane["spans"] = [[*span[:2], name, span[3], span[4], name] for span in lane["spans"]]
    return made
