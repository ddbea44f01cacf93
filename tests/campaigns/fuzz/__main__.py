# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws models, configurations and events, and compares each with stock DeepSpeed.

    python -m tests.campaigns.fuzz --minutes 10 --seed 1
    python -m tests.campaigns.fuzz --cases 300 --kinds sharded pipeline --worlds 4

The same seed, kinds and worlds give the same cases, as long as the same ones fail. A case that fails is shrunk, and
printed so that it can be pasted into a test. See Note [What a case is compared with].
"""

import argparse
import sys
import time

from tests.campaigns.fuzz import campaign
from tests.campaigns.fuzz.drawing import KINDS
from tests.campaigns.fuzz.in_ranks import build_kernels
from tests.harness import ranks

# Ranks. Groups inside of groups take four; these take three times as long as two, and eight ten times.
WORLDS = [2] * 30 + [4] * 14 + [3] * 2 + [6, 8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, help="how long; 0 for as long as it takes")
    parser.add_argument("--cases", type=int, default=0, help="how many; 0 for as many as the minutes allow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, help="ranks, drawn from these")
    parser.add_argument("--batch", type=int, default=25, help="cases of one kind, before those of the next")
    parser.add_argument("--first", action="store_true", help="end with the first failure, and do not shrink it")
    parser.add_argument("--case", help="run this one, as it was printed")
    arguments = parser.parse_args()
    if not arguments.minutes and not arguments.cases and not arguments.case:
        parser.error("--minutes, --cases or --case says how much to run")
    ranks.prepare_environment()
    pool = ranks.RankPool()
    try:
        pool(1).run(build_kernels, timeout=900.0)
        if arguments.case:
            problems = campaign.run_case(pool, campaign.parse(arguments.case))
            print("\n".join(problems) or "as it must be")
            sys.exit(bool(problems))
        deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
        shrinking = 0.0 if arguments.first else 60.0
        results = campaign.Campaign(pool, arguments.seed, tuple(arguments.worlds), shrinking, arguments.batch)
        results.run(arguments.kinds, arguments.cases or sys.maxsize, deadline)
    finally:
        pool.close()
    print(results.report())
    sys.exit(bool(results.failures))


if __name__ == "__main__":
    main()
