# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What campaigns share that draw cases one after the other, and count those that are wrong."""

import argparse
import contextlib
import io
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

from tests.harness.ranks import RankPool, prepare_environment

QUIET = contextlib.redirect_stdout(io.StringIO())  # pools print what ranks have logged
# Draws and runs a case: what was drawn, and what is wrong.
Act = Callable[[random.Random], tuple[str, str]]


def run(description: str | None, number: int, make: Callable[[RankPool], Sequence[Act]]) -> int:
    """Run drawn cases, and print each; return the exit status, 1 if one of them is wrong.

    Args:
        description: of the campaign.
        number: of cases, if the command line names none.
        make: returns the kinds of cases; one that is there twice is drawn twice as often.
    """
    raw = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=description, formatter_class=raw)
    arguments.add_argument("--number", type=int, default=number, help="of cases")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    prepare_environment()
    pool, chance = RankPool(), random.Random(given.seed)
    acts, counts, failures = make(pool), Counter[str](), 0
    for case in range(given.number):
        act, begin = chance.choice(acts), time.monotonic()
        try:
            with QUIET:
                what, wrong = act(chance)
        except Exception:
            what, wrong = act.__name__, traceback.format_exc(limit=-1)
        counts[act.__name__] += 1
        failures += bool(wrong)
        told = f"{what}{f': WRONG: {wrong}' if wrong else ''}"
        print(f"{case:4} {time.monotonic() - begin:5.1f} s  {told}", flush=True)
    pool.close()
    print(f"{given.number} cases: {dict(counts)}; {failures} wrong")
    return int(failures > 0)
