# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Limits on the host's waits for the device in experiment T5. Imports no torch and needs no GPU."""

from typing import Any, NamedTuple

ELSEWHERE = "elsewhere"  # of a wait: the experiment itself, which moves its batches to the device
EVENT = "event at "  # begins the place of a wait for an event


class Waits(NamedTuple):
    """Numbers of waits of the host, by kind: on a GPU an event may have completed before the wait."""

    events: int  # DeepSpeed's brakes: the host must not be far ahead of gathers and reductions
    others: int  # answers that decide a step
    copies: int  # to the device, of numbers beside the norm: DeepSpeed's; on a GPU alone


# In micro-steps 5 to 10 of each case, as counted on the simulated device; `--only T5 --device cpu` shows where. That
# device does not see copies of a number to it, for which a GPU makes the host wait; these are as counted on one.
# tests/unit/zero/test_device_waits.py compares them with stock DeepSpeed's.
WAITS = dict.fromkeys(("NNN", "NNI", "NNG", "NII", "NIG", "NGG"), Waits(0, 6, 6))
WAITS |= {"INI": Waits(90, 3, 12), "ING": Waits(90, 3, 18), "III": Waits(156, 3, 12), "GNG": Waits(90, 3, 9)}
WAITS |= dict.fromkeys(("IIG", "IGG", "IIG in four bits", "IIG without the timer"), Waits(156, 3, 18))
WAITS |= dict.fromkeys(("GIG", "GGG"), Waits(156, 3, 9))
WAITS |= {"IIG in four bits, monitored": Waits(156, 6, 18)}
WAITS |= {"NIG in fp16": Waits(0, 9, 9), "IIG in fp16": Waits(156, 6, 21)}


def check(setup: Any, title: str, counts: dict[str, int]) -> None:
    """Note where the host has waited, and check that it was no more often than ``WAITS`` has of this case."""
    setup.report.figure(title, counts)
    results, most = count_waits(counts), WAITS[title]
    other_ranks = most.others + (most.copies if setup.cuda else 0)
    setup.report.check(f"{title}: at most {most.events} waits for events", results.events <= most.events)
    setup.report.check(f"{title}: at most {other_ranks} other waits", results.others <= other_ranks)


def count_waits(counts: dict[str, int]) -> Waits:
    """Return how often the host has waited, given how often at each place; copies are among the others."""
    own = {where: count for where, count in counts.items() if not where.endswith(ELSEWHERE)}
    events = sum(count for where, count in own.items() if where.startswith(EVENT))
    return Waits(events, sum(own.values()) - events, 0)
