# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares the planner's predictions with steps measured on emulated clusters, and computes the cost of its choices.

    python -m tests.perf.timeline_accuracy

For each row of ``emulated_cluster.csv`` and ``overlap.csv`` that the planner supports, a step is predicted from the
link's rate without headers, the compute of a step without communication, and the costs of a byte and a message for the
host's cores (Note [Host costs]). These costs are fitted once for each campaign (one version of the package, within
hours): for strategies to the rows of ``CALIBRATED`` methods, for plain stages to all rows of one setting. The tables
leave out the fitted rows. The form of the costs was chosen with knowledge of all rows.

Tables: the share of rows whose prediction is within 10 % of the measured median, with the variation of their own
steps; the largest errors; and the largest cost of a choice relative to the best measured strategy, over all memories.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import tabulated, timeline
from tests.perf.lib.records import markdown
from tests.perf.lib.timeline import EMULATED, OVERLAPPING, SUMMED, Case, HostCosts, cases, compute_of_element, fit

NEAR = 0.1
CALIBRATED = ("NNN", "NNG", "IIG", "GGG", "NIG + LoCo", "NIG + LoCo + updates")
PLAIN_SETTINGS = {SUMMED: "2x2-small-4", OVERLAPPING: "", EMULATED: "2x2-1"}  # the large model has one setting only


def is_calibration(case: Case) -> bool:
    return case.row.setting == PLAIN_SETTINGS[case.campaign] if case.plain else case.row.method in CALIBRATED


def slowness(all_cases: Sequence[Case]) -> dict[str, float]:
    """Return each setting's slowness of the host, relative to its campaign's first; 1 with emulated compute."""
    computes: dict[tuple[str, str], list[float]] = defaultdict(list)
    for case in all_cases:
        computes[case.campaign, case.row.setting].append(compute_of_element(case))
    first: dict[str, float] = {}
    slow = {}
    for (campaign, setting), values in computes.items():
        typical = statistics.median(values)
        slow[setting] = 1.0 if campaign == EMULATED else typical / first.setdefault(campaign, typical)
    return slow


def fitted(all_cases: Sequence[Case], slow: dict[str, float]) -> dict[tuple[str, bool], HostCosts]:
    """Return the costs of each campaign, of strategies (False) and of plain stages (True)."""
    costs: dict[tuple[str, bool], HostCosts] = {}
    for plain in (False, True):
        for campaign in (SUMMED, OVERLAPPING, EMULATED):
            calibration = [
                (case, slow[case.row.setting])
                for case in all_cases
                if (case.campaign, case.plain) == (campaign, plain) and is_calibration(case)
            ]
            near = costs.get((campaign, False), costs.get((SUMMED, False), HostCosts()))
            costs[campaign, plain] = fit(calibration, near) if calibration else costs[SUMMED, plain]
    return costs


def table(title: str, groups: Callable[[Case], str], errors: Sequence[tuple[Case, float]]) -> str:
    by_group: dict[str, list[tuple[Case, float]]] = defaultdict(list)
    for case, error in errors:
        by_group[groups(case)].append((case, error))
    header = [title, "rows", f"within {NEAR:.0%}", "median error", "median spread of the row's own steps"]
    lines = []
    for name, group_errors in [*sorted(by_group.items()), ("all", list(errors))]:
        near = sum(abs(error) <= NEAR for _, error in group_errors) / len(group_errors)
        typical = statistics.median(abs(error) for _, error in group_errors)
        spread = statistics.median((max(c.row.steps) - min(c.row.steps)) / c.row.median for c, _ in group_errors)
        lines.append([name, f"{len(group_errors)}", f"{near:.1%}", f"{typical:.1%}", f"{spread:.0%}"])
    return markdown((header, lines))


def choices(seconds: Sequence[tuple[Case, float]]) -> str:
    """Return the largest and the mean cost of the choice among exact strategies, by kind of compute."""
    groups = defaultdict(list)
    for case, predicted in seconds:
        if not (case.plain or case.sent.label):
            row = replace(case.row, more=case.row.more | {"seconds_predicted": predicted})
            groups[case.campaign == EMULATED, row.setting, row.mbit, row.more.get("wire_of_compute")].append(row)
    complete = [(key, tabulated.regret(rows)) for key, rows in groups.items() if len(rows) == len(STRATEGIES)]
    lines = []
    for name, emulated in (("without overlap, or on cores", False), (EMULATED, True)):
        costs = [cost for key, cost in complete if key[0] == emulated]
        lines.append([name, f"{len(costs)}", f"{max(costs):.3f}", f"{statistics.mean(costs):.3f}"])
    return markdown((["choice", "settings and rates", "costs at most", "in the mean"], lines))


def main() -> None:
    predicted, unpredicted = cases()
    slow = slowness(predicted)
    costs = fitted(predicted, slow)
    print(
        f"{len(predicted)} rows; left out, since the planner does not know them: "
        f"{', '.join(f'{name} ({count})' for name, count in sorted(unpredicted.items()))}.\n"
    )
    for (campaign, plain), host_costs in costs.items():
        values = ", ".join(f"{name} {value:.2g}" for name, value in asdict(host_costs).items())
        print(f"{campaign}, {'plain stages' if plain else 'strategies'}, seconds: {values}")
    print(f"\nfitted to {sum(map(is_calibration, predicted))} rows, which are left out of what follows\n")
    seconds = [(case, costs[case.campaign, case.plain].seconds(case, slow[case.row.setting])) for case in predicted]
    errors = [(case, expected / case.row.median - 1) for case, expected in seconds if not is_calibration(case)]
    print(table("Mbit/s", timeline.kind, errors))
    methods = lambda case: "plain stages" if case.plain else f"strategies{case.sent.label}"  # noqa: E731
    print(table("methods", lambda case: f"{methods(case)}, {timeline.kind(case)}", errors))
    print(table("setting", lambda case: case.row.setting, errors))
    for case, error in sorted(errors, key=lambda pair: -abs(pair[1]))[:20]:
        where = f"{case.row.setting} {timeline.kind(case)} {case.row.method}"
        print(f"{error:+.0%} {where}: measured {case.row.median:.3f} s")
    print(f"\n{choices(seconds)}")


if __name__ == "__main__":
    main()
