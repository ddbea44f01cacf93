# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A plan as a table. Pure."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from deepspeed_ext.planner.choice import Plan
from deepspeed_ext.planner.closed_form import BETWEEN, COMPUTE, HOST, UPDATE, WITHIN
from deepspeed_ext.planner.costs import Prediction
from deepspeed_ext.planner.rates import GIGA, Rate
from deepspeed_ext.strategy import STRATEGIES, hyphenate
from deepspeed_ext.tools.plan.outer import OuterPlan
from deepspeed_ext.tools.plan.saves import PredictionWithSaves, Saves, format_figure

EXACT = "exact"
_INFINITE = float("inf")
_TOO_LARGE = "  (too large)"
_Column = tuple[str, int, Callable[[Any], str]]  # title, width, and a function that formats a row's cell


def _gb(name: str) -> Callable[[Any], str]:
    read = attrgetter(name)
    return lambda row: f"{read(row) / GIGA:.2f}"


def _seconds(name: str, part: str | None = None) -> Callable[[Any], str]:
    read = attrgetter(name)
    return lambda row: f"{read(row) if part is None else read(row)[part]:.3g}"


_COLUMNS: Sequence[_Column] = (
    ("GB: p", 8, _gb("memory.parameters")),
    ("g", 8, _gb("memory.gradients")),
    ("os", 8, _gb("memory.optimizer")),
    ("other", 9, _gb("transient")),
    ("sum", 8, _gb("total_memory")),
    ("GB in group", 13, _gb("volume.intra")),
    ("between", 9, _gb("volume.inter")),
    ("s: compute", 12, _seconds("seconds", COMPUTE)),
    ("in group", 10, _seconds("seconds", WITHIN)),
    ("between", 9, _seconds("seconds", BETWEEN)),
    ("update", 10, _seconds("seconds", UPDATE)),
    ("sum", 8, _seconds("total_seconds")),
    ("busy: in group", 16, _seconds("busy", WITHIN)),
    ("between", 9, _seconds("busy", BETWEEN)),
)
_HOST_COLUMNS: Sequence[_Column] = (
    ("host: GB", 11, _gb("host")),
    ("s: copies", 11, _seconds("seconds", HOST)),
    ("busy", 8, _seconds("busy", HOST)),
)
_SAVE_COLUMNS: Sequence[_Column] = (
    ("save, s: sync", 15, lambda row: format_figure(row.saves.synchronous.held)),
    ("async", 8, lambda row: format_figure(row.saves.asynchronous.held)),
    ("every: s", 11, lambda row: format_figure(row.saves.schedule.seconds)),
    ("steps", 9, lambda row: str(row.saves.schedule.steps)),
    ("lost %", 8, lambda row: f"{100 * row.saves.schedule.lost:.2f}"),
)
_OUTER_COLUMNS: Sequence[_Column] = (
    ("outer: GB held", 16, _gb("held")),
    ("in flight", 12, _gb("transfer")),
    ("between", 9, _gb("received")),
    ("s: exposed", 12, _seconds("exposed")),
    ("busy", 8, _seconds("busy")),
)
CHANGES_TRAINING = (
    "An outer optimizer changes the training, so none of these is chosen automatically: "
    "see deepspeed_ext/zero/outer_optimizer.md"
)


def table(plans: Sequence[Plan], saves: Saves | None = None) -> str:
    """Return a table of the strategies of all plans and the plain stages, fastest first.

    A row has the bytes that each rank holds and receives in a step, the seconds that each part adds to a step, and the
    busy seconds of links. If something is in host memory, further columns show its bytes and the copies. With saves,
    further columns show the seconds for which synchronous and asynchronous saves block training, and, for the
    requested kind, the interval and the share of the time that is lost.

    Args:
        plans: plans for the same model and cluster.
        saves: storage and failure rate, if the predictions include saves.
    """
    first = plans[0]
    rows = [(row, plan) for plan in plans for row in plan.predictions] + [(row, first) for row in first.plain]
    rows.sort(key=lambda row: (row[0].total_seconds, row[0].total_memory))
    width = max(len(hyphenate(row.name)) for row, _ in rows)
    columns = [*(_HOST_COLUMNS if any(row.host for row, _ in rows) else ()), *(_SAVE_COLUMNS if saves else ())]
    lines = [*_note_lines(first, saves), *(f"  {line}" for line in rate_lines(first)), "", _titles(width, columns)]
    for row, plan in rows:
        mark = "  <-- choice" if row is plan.choice else "" if plan.fits(row) else _TOO_LARGE
        lines.append(_line(row, width, _cells(row, columns), mark))
    lines += [
        "",
        *(
            f"{_compression_clause(plan)}, {reason(plan)}" if _compression_clause(plan) != EXACT else reason(plan)
            for plan in plans
        ),
    ]
    return "\n".join(lines)


def reason(plan: Plan) -> str:
    """Return the reason for the choice, and its interval between saves."""
    chosen = plan.choice
    return f"{plan.reason}; {chosen.saves.reason}" if isinstance(chosen, PredictionWithSaves) else plan.reason


def outer_table(plan: OuterPlan) -> str:
    """Return a table of the strategies with an outer optimizer, fastest first.

    A row has the columns of ``table`` for an average step; then the bytes that the outer optimizer holds, has in
    flight, and receives from other groups in an outer step, and the exposed and busy seconds of an outer step.
    """
    settings, width = plan.settings, max(len(hyphenate(row.average.name)) for row in plan.predictions)
    parts = "" if settings.fragments == 1 else f", in {settings.fragments} fragments"
    hidden = f", with a delay of {settings.delay}" if settings.delay else ""
    offloaded = ", kept on the host" if settings.offload == "cpu" else ""
    lines = [
        f"with an outer step every {settings.steps} steps, in {settings.bits} bits{parts}{hidden}{offloaded}; "
        f"without the steps of a warm-up",
        CHANGES_TRAINING,
        "",
        _titles(width, _OUTER_COLUMNS),
    ]
    for row in plan.predictions:
        lines.append(_line(row.average, width, _cells(row, _OUTER_COLUMNS), "" if plan.fits(row) else _TOO_LARGE))
    return "\n".join(lines)


def _compression_clause(plan: Plan) -> str:
    """Return a clause on the compression."""
    first = plan.predictions[0]
    few_bits = [name for name, on in (("LoCo", first.loco), ("updates in few bits", first.updates)) if on]
    return f"with {' and '.join(few_bits)}" if few_bits else EXACT


def _note_lines(plan: Plan, saves: Saves | None) -> Iterator[str]:
    """Yield lines on the cluster and on assumptions."""
    n, m, k = plan.sizes.ranks, plan.sizes.group_size, plan.sizes.groups
    limit = "no limit" if plan.budget is None else f"{plan.budget / GIGA:g} GB"
    yield f"{n} ranks in {k} group(s) of {m}, {plan.model.accumulation} micro-step(s) a step, a rank's memory: {limit}"
    if not plan.model.compute:
        yield "compute is assumed to take 0 s, so no communication is hidden: give --micro-step-seconds"
    if (plan.model.host is not None or saves is not None) and plan.rates.host == _INFINITE:
        yield "copies from and to the host are assumed to take 0 s: give --host-gbps"
    if saves is not None:
        together = "" if saves.shared == _INFINITE else f", and all nodes together {saves.shared / GIGA:.3g}"
        kind = "asynchronous" if saves.asynchronous else "synchronous"
        yield (
            f"{kind} saves; the job fails every {saves.mtbf / 3600:.3g} h and takes {saves.restart:.3g} s to restart; "
            f"a node writes {saves.disk / GIGA:.3g} GB/s{together}"
        )


def rate_lines(plan: Plan) -> list[str]:
    """Return a line for each direction of hops, and for memory and copies if their rates are known."""
    lines = []
    for kind, hops in (("all-gather", plan.rates.gather), ("reduce-scatter", plan.rates.reduce)):
        lines.append(f"{kind:<15}within groups {_rate(hops.intra)}, between groups {_rate(hops.inter)}")
    if plan.rates.memory != _INFINITE:
        lines.append(f"{'memory':<15}{plan.rates.memory / GIGA:.3g} GB/s")
    if plan.rates.host != _INFINITE:
        lines.append(f"{'from/to host':<15}{plan.rates.host / GIGA:.3g} GB/s a rank, in each direction")
    return lines


def _rate(rate: Rate) -> str:
    if rate.bandwidth == _INFINITE:
        return "no data to send"
    return f"{rate.bandwidth / GIGA:.3g} GB/s a rank + {rate.latency * 1e6:.3g} us"


def _titles(width: int, more: Sequence[_Column]) -> str:
    titles = "".join(f"{title:>{wide}}" for title, wide, _ in (*_COLUMNS, *more))
    return f"{'':<{width}}{titles}  known as"


def _cells(row: Any, columns: Sequence[_Column]) -> str:
    return "".join(f"{cell(row):>{wide}}" for _, wide, cell in columns)


def _line(row: Prediction, width: int, more: str, mark: str) -> str:
    """Return a row of the table; ``more``: further cells."""
    known_as = "plain" if row.plain else STRATEGIES[row.strategy].known_as
    return f"{hyphenate(row.name):<{width}}{_cells(row, _COLUMNS)}{more}  {known_as}{mark}"
