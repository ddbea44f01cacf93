# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a recorded step, and the hops to which waits are charged."""

import pytest

from deepspeed_ext.tools.report import measures
from deepspeed_ext.tools.report.measures import BACKWARD, BETWEEN, FORWARD, WITHIN, Communication, Phase, Step, Wait

pytestmark = pytest.mark.quick

REDUCE = Communication("inter_reduce_scatter", BETWEEN, 1000.0, 1.0, 3.0)
GATHER = Communication("intra_all_gather", WITHIN, 500.0, 2.0, 2.5)


def test_intervals_are_united_and_subtracted() -> None:
    intervals = measures.union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.0), (2.0, 2.5)])
    assert intervals == [(0.0, 2.5), (3.0, 4.0)]
    assert measures.length(intervals) == 3.5
    assert measures.subtract(intervals, [(0.5, 1.0), (2.0, 3.5)]) == [(0.0, 0.5), (1.0, 2.0), (3.5, 4.0)]


def by_hop(charges: measures.Charges) -> dict[str, float]:
    return {hop: seconds for hop in (WITHIN, BETWEEN) if (seconds := measures._sum_charges(charges, (1, hop)))}


def test_waits_are_charged_to_communications() -> None:
    step = Step(1, 0.0, 10.0, waits=(Wait(2.0, 3.0, True, REDUCE, "layer"), Wait(4.0, 4.5, True, GATHER)))
    charged = measures.charge_waits(step)
    assert dict(charged) == {("inter_reduce_scatter", BETWEEN, "layer"): 1.0, ("intra_all_gather", WITHIN, ""): 0.5}
    # A wait for a thread, to what that waits for: both are on the wire throughout.
    waits = (Wait(1.0, 4.0, True), Wait(1.5, 2.5, False, GATHER), Wait(2.5, 3.0, False, REDUCE))
    wire = (Communication("inter_reduce_scatter", BETWEEN, 1.0, 0.0, 3.5), GATHER)
    charged = measures.charge_waits(Step(1, 0.0, 10.0, waits=waits, communications=wire))
    # Between groups 2.5 to 3.0; and by the wire 1.0 to 1.5, 3.0 to 3.5.
    assert by_hop(charged) == pytest.approx({WITHIN: 1.0, BETWEEN: 1.5})
    # One inside another one, once.
    waits = (Wait(0.0, 4.0, True), Wait(1.0, 2.0, True, GATHER))
    wire = (Communication("inter_reduce_scatter", BETWEEN, 1.0, 0.0, 4.0),)
    charged = measures.charge_waits(Step(1, 0.0, 10.0, waits=waits, communications=wire))
    assert by_hop(charged) == {WITHIN: 1.0, BETWEEN: 3.0}
    # Of two hops on the wire, to the slower one; of 0 to 1 and 3 to 4 nothing is known.
    step = Step(1, 0.0, 10.0, waits=(Wait(0.0, 4.0, True),), communications=(GATHER, REDUCE))
    assert by_hop(measures.charge_waits(step)) == {BETWEEN: 2.0}


def test_the_pace_of_a_group_excludes_other_groups_and_the_last_backward() -> None:
    phases = tuple(Phase(BACKWARD, end - 1.0, end) for end in (3.0, 6.0, 9.0))
    step = Step(
        1, 1.0, 10.0, phases, (Wait(1.5, 2.5, True, REDUCE), Wait(4.0, 4.5, True, GATHER), Wait(8, 9, True, REDUCE))
    )
    assert measures.pace(step, 3) == 2.0 and measures.pace(step, 2) is None


def test_a_process_group_is_within_or_between_groups_or_neither() -> None:
    hops = [measures.hop_of(ranks, 2) for ranks in ([2, 3], [1, 3], [1, 2], [0, 1, 2, 3], [3])]
    assert hops == [WITHIN, *3 * [BETWEEN], ""]


def test_parts_add_up_to_the_step() -> None:
    phases = (
        Phase(FORWARD, 0.5, 2.0),
        Phase(BACKWARD, 2.0, 6.0),
        Phase(measures.HANDLING, 3.0, 4.0),
        Phase(measures.UPDATE, 6.0, 7.0),
    )
    waits = (Wait(3.5, 4.5, True, REDUCE), Wait(6.5, 7.0, True, GATHER), Wait(0.0, 9.0, False, REDUCE))
    charged = measures.step_parts(Step(1, 0.0, 8.0, phases, waits))
    expected = {"compute": 1.5 + 4.0 - 1.5, "within": 0.5, "between": 1.0, "update": 0.5, "other": 2.0}
    assert charged == pytest.approx(expected)
    assert sum(charged.values()) == pytest.approx(8.0)


def test_a_summary_has_means_of_steps_and_counts_of_hops() -> None:
    late = Communication("inter_reduce_scatter", BETWEEN, 3000.0, 11.0, 12.0)
    steps = [
        Step(1, 0.0, 10.0, waits=(Wait(2.0, 3.0, True, REDUCE, "a"),), communications=(REDUCE, GATHER)),
        Step(2, 10.0, 14.0, waits=(Wait(11.0, 12.0, True, late, "b"),), communications=(late,)),
    ]
    charged = measures.summary(steps)
    assert charged["seconds"] == [10.0, 4.0] and charged["waiting"] == pytest.approx(1.0)
    between, within = ({row["hop"]: row for row in charged["hops"]}[hop] for hop in (BETWEEN, WITHIN))
    assert between == {"hop": BETWEEN, "bytes": 2000.0, "busy": 1.5, "exposed": 1.0, "rate": pytest.approx(2000 / 1.5)}
    assert within["exposed"] == 0.0 and within["bytes"] == 250.0
    counts = {row["name"]: row["count"] for row in charged["operations"]}
    assert counts == {"inter_reduce_scatter": 1.0, "intra_all_gather": 0.5}
    assert charged["modules"] == [{"module": "a", "exposed": 0.5}, {"module": "b", "exposed": 0.5}]


def test_a_timeline_begins_with_its_step() -> None:
    phases, waits = (Phase(FORWARD, 1.5, 4.0),), (Wait(2.0, 2.5, True, GATHER, "layer"), Wait(3.0, 3.0, True))
    training, within = measures.timeline(Step(7, 1.0, 11.0, phases, waits, (GATHER,)))
    assert training["lane"] == "training" and within["lane"] == WITHIN
    assert training["spans"] == [
        [0.5, 3.0, "forward", "forward", None, None],
        [1.0, 1.5, "wait for intra_all_gather", "wait", None, "layer"],
    ]
    assert within["spans"] == [[1.0, 1.5, "intra_all_gather", "gather", 500.0, None]]
