# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Draw faults in saves: failing and slow disks, killed ranks; all among files of others.

After each fault the last committed checkpoint must load bit-identically, on all ranks. The next save must succeed and
leave nothing behind, and files of other programs must be as they were. Nothing may hang.

Exit status 0 if that held for all draws, 1 if not.
"""

import argparse
import contextlib
import io
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

from tests.harness import kills, save_faults
from tests.harness.ranks import RankPool, prepare_environment

_TIMEOUT = 90.0  # seconds of a case


def fault(pool: RankPool, chance: random.Random, base: str) -> tuple[str, str]:
    """Make one call of a save fail or block; return the fault, and the problems."""
    drawn = save_faults.draw(chance)
    outcomes = pool(4).run(save_faults.fault_case, base, drawn, timeout=_TIMEOUT)
    fired = outcomes[drawn.rank].fired
    expected_text = f"{drawn}{'' if fired else ' (not reached)'}: {outcomes[0].error.split(': ')[0] or 'saved'}"
    if len({bool(outcome.error) for outcome in outcomes}) > 1:
        return expected_text, "it failed on some ranks only"
    if outcomes[0].error and (drawn.error is None or not fired):
        return expected_text, outcomes[0].error
    wrong = [str(item) for item in outcomes if item.loaded != int(not item.error) or item.again]
    return expected_text, wrong[0] if wrong else ""


def kill(pool: RankPool, chance: random.Random, base: str) -> tuple[str, str]:
    """Kill a rank or all of them; the last save must load, or the one before if it had not ended."""
    drawn = kills.draw(chance)
    index, wrong = kills.run(pool, base, drawn, hidden=set(kills.hidden_names(f"{base}/saved")))
    return f"killed: {drawn}: loads save {index + 1}", wrong


def _run(act: Callable[..., tuple[str, str]], pool: RankPool, chance: random.Random) -> tuple[str, str]:
    """Run a case in a new folder, among files of other programs, of which none may be lost; nothing may be left."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        save_faults.plant(base)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # pools print what ranks have logged
                case, wrong = act(pool, chance, base)
        except Exception:
            return act.__name__, traceback.format_exc(limit=-1)
        return case, wrong or ", ".join((*save_faults.leftovers(base), *save_faults.lost_files(base)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("fault", "kill"), default="", help="these alone")
    provided = parser.parse_args()
    prepare_environment()
    pool, chance, failures = RankPool(), random.Random(provided.seed), 0
    acts = {"fault": [fault], "kill": [kill], "": [fault, fault, fault, kill]}[provided.only]
    for case in range(provided.number):
        begin = time.monotonic()
        subject, wrong = _run(chance.choice(acts), pool, chance)
        failures += bool(wrong)
        messages = f"{subject}: WRONG: {wrong}" if wrong else subject
        print(f"{case:4} {time.monotonic() - begin:5.1f} s  {messages}", flush=True)
    pool.close()
    print(f"{provided.number} cases, {failures} wrong")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
