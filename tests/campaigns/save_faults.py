# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Draw faults in saves: failing and slow disks, killed ranks, two engines, two jobs; all among files of others.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.harness import kills, save_faults
from tests.harness.ranks import RankPool, prepare_environment
from tests.harness.save_faults import STRATEGIES

_TIMEOUT = 90.0  # seconds of a case
Act = Callable[[random.Random, str], tuple[str, str]]  # draws and runs a case: what was drawn, and what is wrong
KINDS = (*["fault"] * 6, *["kill"] * 2, "engines", "loads", "volumes")  # the first ones are drawn more often


class Faults:
    """Draws faults, and checks what is left after each.

    Args:
        pool: of ranks.
    """

    def __init__(self, pool: RankPool) -> None:
        self.pool, self.others = pool, (RankPool(), RankPool())

    def fault(self, chance: random.Random, base: str) -> tuple[str, str]:
        """Let one call of a save fail or last long; return what was drawn, and what is wrong."""
        fault = save_faults.draw(chance)
        outcomes = self.pool(4).run(save_faults.fault_case, base, fault, timeout=_TIMEOUT)
        fired = outcomes[fault.rank].fired
        says = f"{fault}{'' if fired else ' (not reached)'}: {outcomes[0].error.split(': ')[0] or 'saved'}"
        if len({bool(outcome.error) for outcome in outcomes}) > 1:
            return says, "it failed on some ranks only"
        if outcomes[0].error and (fault.error is None or not fired):
            return says, outcomes[0].error
        for outcome in outcomes:
            if outcome.loaded != int(not outcome.error) or outcome.again:
                return says, str(outcome)
        return says, ""

    def kill(self, chance: random.Random, base: str) -> tuple[str, str]:
        """Kill a rank or all of them; the last save must load, or the one before if it had not ended."""
        kill = kills.draw(chance)
        which, wrong = kills.run(self.pool, base, kill, hidden=set(kills.hidden_names(f"{base}/saved")))
        return f"killed: {kill}: loads save {which + 1}", wrong

    def engines(self, chance: random.Random, base: str) -> tuple[str, str]:
        """Save two engines into one folder."""
        strategies = chance.choice(STRATEGIES), chance.choice(STRATEGIES)
        outcomes = self.pool(4).run(save_faults.engines_case, base, strategies, timeout=_TIMEOUT)
        return f"two engines: {strategies}", next((str(one) for one in outcomes if one.error or one.again), "")

    def loads(self, chance: random.Random, base: str) -> tuple[str, str]:
        """Let two jobs load one checkpoint that must be converted."""
        delay = chance.choice((0.0, 0.1, 0.5, 1.0, 2.0))
        self.pool(4).run(save_faults.saved_case, base, chance.choice(STRATEGIES), "at once", 2, timeout=_TIMEOUT)
        return f"two jobs convert, {delay:g} s apart", self._both(
            lambda number, pool: pool(2).run(
                save_faults.loaded_case, base, ("NIG", "IIG")[number], 2, number * delay, timeout=2 * _TIMEOUT
            )
        )

    def volumes(self, chance: random.Random, base: str) -> tuple[str, str]:
        """Save two jobs in memory whose folders have one path, on different volumes."""
        saved, strategy = Path(base, "saved"), chance.choice(STRATEGIES)
        pool = self.others[0](2)
        pool.run(save_faults.saved_case, base, strategy, "in memory", 2, timeout=_TIMEOUT)
        saved.rename(Path(base, "of the first job"))
        pool.run(save_faults.saved_case, base, strategy, "in memory", 3, timeout=_TIMEOUT)
        wrong = [one for one in pool.run(save_faults.loaded_case, base, strategy, 3, timeout=_TIMEOUT) if one]
        saved.rename(Path(base, "of the second job"))
        Path(base, "of the first job").rename(saved)
        wrong += [one for one in pool.run(save_faults.loaded_case, base, strategy, 2, timeout=_TIMEOUT) if one]
        return f"two volumes: {strategy}", str(wrong[0]) if wrong else ""

    def _both(self, run: Callable[[int, RankPool], list[dict[str, float]]]) -> str:
        """Run two jobs at the same time; return the first that does not restore all."""
        for pool in self.others:
            pool.first(2)
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(run, range(2), self.others))
        return next((str(one) for job in found for one in job if one), "")


def _run(act: Act, chance: random.Random) -> tuple[str, str]:
    """Run a case in a new folder, among files of other programs, of which none may be lost; nothing may be left."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        save_faults.plant(base)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # pools print what ranks have logged
                what, wrong = act(chance, base)
        except Exception:
            return act.__name__, traceback.format_exc(limit=-1)
        return what, wrong or ", ".join((*save_faults.leftovers(base), *save_faults.lost_files(base)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=sorted(set(KINDS)), default=KINDS, help="kinds of cases")
    given = parser.parse_args()
    prepare_environment()
    pool, chance, failures = RankPool(), random.Random(given.seed), 0
    faults = Faults(pool)
    acts = [getattr(faults, kind) for kind in KINDS if kind in given.only]
    for case in range(given.number):
        begin = time.monotonic()
        what, wrong = _run(chance.choice(acts), chance)
        failures += bool(wrong)
        told = f"{what}: WRONG: {wrong}" if wrong else what
        print(f"{case:4} {time.monotonic() - begin:5.1f} s  {told}", flush=True)
    pool.close()
    print(f"{given.number} cases, {failures} wrong")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
