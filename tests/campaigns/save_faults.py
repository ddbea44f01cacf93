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
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.campaigns.killed_saves import STRATEGIES as KILLED
from tests.harness import kills, save_faults
from tests.harness.ranks import RankPool, prepare_environment
from tests.harness.save_faults import STRATEGIES

_TIMEOUT = 90.0  # seconds of a case
_QUIET = contextlib.redirect_stdout(io.StringIO())  # output of ranks


class Campaign:
    """Draws faults, and checks what is left after each.

    Args:
        chance: by which they are drawn.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.pool, self.others = RankPool(), (RankPool(), RankPool())
        self._calls: dict[tuple[str, bool], list[dict[str, int]]] = {}

    def fault(self, base: str) -> tuple[str, str]:
        """Let one call of a save fail or last long; return what was drawn, and what is wrong."""
        fault = save_faults.draw(self.chance)
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

    def kill(self, base: str) -> tuple[str, str]:
        """Kill ranks during a save."""
        strategy, same = self.chance.choice(KILLED), self.chance.random() < 0.5
        if (strategy, same) not in self._calls:
            with tempfile.TemporaryDirectory() as folder:
                self._calls[strategy, same] = self.pool(4).run(kills.calls_case, folder, strategy, same)
            self.pool.close()  # which restores the calls that were counted
        kill = kills.draw(self.chance, {(strategy, same): self._calls[strategy, same]})
        which, wrong = kills.run(self.pool, base, kill, hidden=set(kills.hidden_names(f"{base}/saved")))
        return f"killed: {kill}: loads save {which + 1}", wrong

    def engines(self, base: str) -> tuple[str, str]:
        """Save two engines into one folder."""
        strategies = self.chance.choice(STRATEGIES), self.chance.choice(STRATEGIES)
        outcomes = self.pool(4).run(save_faults.engines_case, base, strategies, timeout=_TIMEOUT)
        return f"two engines: {strategies}", next((str(one) for one in outcomes if one.error or one.again), "")

    def loads(self, base: str) -> tuple[str, str]:
        """Let two jobs load one checkpoint that must be converted."""
        delay = self.chance.choice((0.0, 0.1, 0.5, 1.0, 2.0))
        self.pool(4).run(save_faults.saved_case, base, self.chance.choice(STRATEGIES), "at once", 2, timeout=_TIMEOUT)
        return f"two jobs convert, {delay:g} s apart", self._both(
            lambda number, pool: pool(2).run(
                save_faults.loaded_case, base, ("NIG", "IIG")[number], 2, number * delay, timeout=2 * _TIMEOUT
            )
        )

    def volumes(self, base: str) -> tuple[str, str]:
        """Save two jobs in memory whose folders have one path, on different volumes."""
        saved, strategy = Path(base, "saved"), self.chance.choice(STRATEGIES)
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

    def close(self) -> None:
        """Kill all ranks."""
        for pool in (self.pool, *self.others):
            pool.close()


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--number", type=int, default=200, help="of draws")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare_environment()
    campaign = Campaign(random.Random(args.seed))
    kinds = (campaign.fault,) * 6 + (campaign.kill,) * 2 + (campaign.engines, campaign.loads, campaign.volumes)
    counts, failures = Counter[str](), 0
    for number in range(args.number):
        act, begin = campaign.chance.choice(kinds), time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
            save_faults.plant(base)
            try:
                with _QUIET:
                    what, wrong = act(base)
                wrong = wrong or ", ".join((*save_faults.leftovers(base), *save_faults.lost_files(base)))
            except Exception:
                what, wrong = act.__name__, traceback.format_exc(limit=-1)
        counts[act.__name__] += 1
        failures += bool(wrong)
        print(
            f"{number:4} {time.monotonic() - begin:5.1f} s  {what}{f': WRONG: {wrong}' if wrong else ''}", flush=True
        )
    campaign.close()
    print(f"{args.number} draws: {dict(counts)}; {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
