# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A plan as a table."""

from collections.abc import Callable, Sequence

from deepspeed_ext.planner.choice import Plan
from deepspeed_ext.planner.closed_form import HOST, PARTS
from deepspeed_ext.planner.costs import Prediction
from deepspeed_ext.planner.rates import Rate
from deepspeed_ext.strategy import STRATEGIES
from deepspeed_ext.tools.plan.outer import OuterPlan
from deepspeed_ext.tools.plan.saves import SavedPrediction, Saves, figure

EXACT = "exact"
_TOO_LARGE = "  (too large)"
_COLUMNS = (
    ("GB: p", 8),
    ("g", 8),
    ("os", 8),
    ("besides", 9),
    ("sum", 8),
    ("GB in group", 13),
    ("between", 9),
    ("s: compute", 12),
    ("in group", 10),
    ("between", 9),
    ("update", 10),
    ("sum", 8),
    ("busy: in group", 16),
    ("between", 9),
)
_HOST_COLUMNS = (("host: GB", 11), ("s: copies", 11), ("busy", 8))
_SAVE_COLUMNS = (("save, s: sync", 15), ("async", 8), ("every: s", 11), ("steps", 9), ("lost %", 8))
_OUTER_COLUMNS = (("outer: GB held", 16), ("on its way", 12), ("between", 9), ("s: exposed", 12), ("busy", 8))
# Titles and widths, and what returns a row's figures.
_Columns = tuple[Sequence[tuple[str, int]], Callable[[Prediction], Sequence[str]]]
CHANGES_TRAINING = (
    "An outer optimizer changes the training, so none of these is a choice: "
    "see deepspeed_ext/zero/README.md#an-outer-optimizer"
)


def table(plans: Sequence[Plan], saves: Saves | None = None) -> str:
    """Return a table of the strategies of all plans and the plain stages, fastest first.

    A row has what each rank holds, what it receives in a step, the seconds that each part adds to a step, and for how
    long the links are busy. If something is in host memory, further columns show the bytes there, and copies. If the
    plans say how often to save, there are columns for the seconds for which a save holds training up, synchronous and
    asynchronous, and of the way that was asked for the interval, and the share of the time that is lost.

    Args:
        plans: plans for the same model and cluster.
        saves: where and how a run saves; the predictions then include it.
    """
    first = plans[0]
    rows = [(one, plan) for plan in plans for one in plan.predictions] + [(one, first) for one in first.plain]
    rows.sort(key=lambda row: (row[0].total_seconds, row[0].total_memory))
    width = max(len(one.name) for one, _ in rows)
    n, m, k = first.sizes.ranks, first.sizes.group_size, first.sizes.groups
    further: list[_Columns] = [(_HOST_COLUMNS, _of_host)] if any(one.host for one, _ in rows) else []
    further += [] if saves is None else [(_SAVE_COLUMNS, _of_saves)]
    limit = "no limit" if first.budget is None else f"{first.budget / 1e9:g} GB"
    lines = [
        f"{n} ranks in {k} group(s) of {m}, {first.model.accumulation} micro-step(s) a step, a rank's memory: {limit}",
        *_hidden(first),
        *_copied(first, saves),
        *_saved(saves),
        *(f"  {line}" for line in rates(first)),
        "",
        _titles(width, (*_COLUMNS, *(column for columns, _ in further for column in columns))),
    ]
    lines += [
        _line(one, _mark(one, plan), width, "".join(_cells(cells(one), columns) for columns, cells in further))
        for one, plan in rows
    ]
    lines += ["", *(f"{_form(plan)}, {reason(plan)}" if _form(plan) != EXACT else reason(plan) for plan in plans)]
    return "\n".join(lines)


def reason(plan: Plan) -> str:
    """Return why the choice is made, and how often to save with it."""
    chosen = plan.choice
    return f"{plan.reason}; {chosen.saves.reason}" if isinstance(chosen, SavedPrediction) else plan.reason


def outer_table(plan: OuterPlan) -> str:
    """Return a table of the strategies with an outer optimizer, fastest first.

    A row has what ``table`` shows, of a step in the mean; then bytes that the outer optimizer holds, those of what is
    on its way, those received between groups in an outer step, and the seconds that this adds and takes.
    """
    settings, width = plan.settings, max(len(one.average.name) for one in plan.predictions)
    parts = "" if settings.fragments == 1 else f", in {settings.fragments} fragments"
    hidden = f", with a delay of {settings.delay}" if settings.delay else ""
    kept = ", kept on the host" if settings.offload == "cpu" else ""
    lines = [
        f"with an outer step every {settings.steps} steps, in {settings.bits} bits{parts}{hidden}{kept}; without the "
        f"steps of a warm-up",
        CHANGES_TRAINING,
        "",
        _titles(width, (*_COLUMNS, *_OUTER_COLUMNS)),
    ]
    for one in plan.predictions:
        figures = [f"{part / 1e9:.2f}" for part in (one.held, one.transfer, one.received)]
        outer = _cells([*figures, f"{one.exposed:.3g}", f"{one.busy:.3g}"], _OUTER_COLUMNS)
        lines.append(_line(one.average, "" if plan.fits(one) else _TOO_LARGE, width, outer))
    return "\n".join(lines)


def _form(plan: Plan) -> str:
    """Return a clause that says what crosses in few bits."""
    one = plan.predictions[0]
    few_bits = [name for name, on in (("LoCo", one.loco), ("updates in few bits", one.updates)) if on]
    return f"with {' and '.join(few_bits)}" if few_bits else EXACT


def _hidden(plan: Plan) -> list[str]:
    if plan.model.compute:
        return []
    return ["compute is taken as 0 s, so it hides no communication: give --micro-step-seconds"]


def _copied(plan: Plan, saves: Saves | None) -> list[str]:
    if (plan.model.host is None and saves is None) or plan.rates.host != float("inf"):
        return []
    return ["copies from and to the host are taken as 0 s: give --host-gbps"]


def _saved(saves: Saves | None) -> list[str]:
    if saves is None:
        return []
    together = "" if saves.shared == float("inf") else f", and all nodes together {saves.shared / 1e9:.3g}"
    kind = "asynchronous" if saves.asynchronous else "synchronous"
    return [
        f"{kind} saves; the job fails every {saves.mtbf / 3600:.3g} h and takes {saves.restart:.3g} s to restart; a "
        f"node writes {saves.disk / 1e9:.3g} GB/s{together}"
    ]


def _of_host(one: Prediction) -> list[str]:
    return [f"{one.host / 1e9:.2f}", f"{one.seconds[HOST]:.3g}", f"{one.busy[HOST]:.3g}"]


def _of_saves(one: Prediction) -> list[str]:
    assert isinstance(one, SavedPrediction)
    held = (one.saves.synchronous.held, one.saves.asynchronous.held)
    asked = one.saves.schedule
    return [*map(figure, (*held, asked.seconds)), str(asked.steps), f"{100 * asked.lost:.2f}"]


def rates(plan: Plan) -> list[str]:
    """Return a line for each kind of hop, and for memory and copies where their rates are known."""
    lines = []
    for kind, hops in (("all-gather", plan.rates.gather), ("reduce-scatter", plan.rates.reduce)):
        lines.append(f"{kind:<15}within groups {_rate(hops.intra)}, between groups {_rate(hops.inter)}")
    if plan.rates.memory != float("inf"):
        lines.append(f"{'memory':<15}{plan.rates.memory / 1e9:.3g} GB/s")
    if plan.rates.host != float("inf"):
        lines.append(f"{'from/to host':<15}{plan.rates.host / 1e9:.3g} GB/s a rank, in each direction")
    return lines


def _rate(rate: Rate) -> str:
    if rate.bandwidth == float("inf"):
        return "nothing to move"
    return f"{rate.bandwidth / 1e9:.3g} GB/s a rank + {rate.latency * 1e6:.3g} us"


def _titles(width: int, columns: Sequence[tuple[str, int]]) -> str:
    return f"{'':<{width}}{_cells([title for title, _ in columns], columns)}  known as"


def _cells(figures: Sequence[str], columns: Sequence[tuple[str, int]]) -> str:
    return "".join(f"{figure:>{wide}}" for figure, (_, wide) in zip(figures, columns, strict=True))


def _mark(one: Prediction, plan: Plan) -> str:
    if one is plan.choice:
        return "  <-- choice"
    return "" if plan.fits(one) else _TOO_LARGE


def _line(one: Prediction, mark: str, width: int, more: str = "") -> str:
    """Return a row; ``more``: cells at its end."""
    memory = one.memory
    figures = [f"{part / 1e9:.2f}" for part in (memory.parameters, memory.gradients, memory.optimizer, one.transient)]
    figures += [f"{part / 1e9:.2f}" for part in (one.total_memory, one.volume.intra, one.volume.inter)]
    parts = (one.seconds[part] for part in PARTS if part != HOST)
    figures += [f"{part:.3g}" for part in (*parts, one.total_seconds)]
    figures += [f"{one.busy[part]:.3g}" for part in ("within", "between")]
    known_as = "plain" if one.plain else STRATEGIES[one.strategy].known_as
    return f"{one.name:<{width}}{_cells(figures, _COLUMNS)}{more}  {known_as}{mark}"
