# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Kill one rank or all of them while a checkpoint is saved beside the training: what was saved last must load.

Four ranks train and save twice, under one tag or two. During the second save SIGKILL comes: before or after one of the
calls that copy, write, agree and commit, or at any time. New processes load what ``latest`` names: it must be one of
the two saves, to the bit, and the second one if that had ended. They save again; nothing is left of the killed one.

Exit status 0 if that held for all, 1 if not.
"""

import argparse
import contextlib
import io
import random
import sys
import tempfile
import time
from collections import Counter

from tests.harness import kills
from tests.harness.ranks import RankPool, prepare_environment

_QUIET = contextlib.redirect_stdout(io.StringIO())  # what ranks have written
STRATEGIES = ("NIG", "IIG", "NII")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--number", type=int, default=40, help="of kills")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare_environment()
    pool, chance = RankPool(), random.Random(args.seed)
    counts, loaded, failures = {}, Counter[str](), 0
    for strategy in STRATEGIES:
        for same in (False, True):
            with tempfile.TemporaryDirectory() as folder, _QUIET:
                counts[strategy, same] = pool(4).run(kills.calls_case, folder, strategy, same, timeout=60.0)
            pool.close()  # what it calls is counted for good
    for number in range(args.number):
        kill, begin = kills.draw(chance, counts), time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _QUIET:
            which, wrong = kills.run(pool, folder, kill)
        failures += bool(wrong)
        loaded[("the first save", "the second save", "WRONG")[which if not wrong else -1]] += 1
        told = f"NOT AS IT HAD TO: {wrong}" if wrong else f"loads save {which + 1}"
        print(f"{number:4} {time.monotonic() - begin:5.1f} s  {kill}: {told}", flush=True)
    pool.close()
    print(f"{args.number} kills; loaded: {dict(loaded)}; {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
