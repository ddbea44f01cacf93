# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Kill one rank or all of them while a checkpoint is saved beside the training: what was saved last must load.

Four ranks train and save twice, under one tag or two. During the second save SIGKILL comes: before or after one of the
calls that copy, write, agree and commit, or at any time. New processes load what ``latest`` names: it must be one of
the two saves, to the bit, and the second one if that had ended. They save again; nothing is left of the killed one.

Exit status 0 if that held for all, 1 if not.
"""

import random
import sys
import tempfile

from tests.campaigns import running
from tests.harness import kills
from tests.harness.ranks import RankPool

STRATEGIES = ("NIG", "IIG", "NII")


class Kills:
    """Kills ranks that save.

    Args:
        pool: of these ranks.
    """

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._calls: dict[tuple[str, bool], list[dict[str, int]]] = {}

    def kill(self, chance: random.Random, folder: str) -> tuple[str, str]:
        """Kill ranks during a save into a folder; return what was drawn, and what is wrong."""
        run = chance.choice(STRATEGIES), chance.random() < 0.5
        if run not in self._calls:
            with tempfile.TemporaryDirectory() as counted:
                self._calls[run] = self._pool(4).run(kills.calls_case, counted, *run, timeout=60.0)
            self._pool.close()  # which restores the calls that were counted
        kill = kills.draw(chance, {run: self._calls[run]})
        which, wrong = kills.run(self._pool, folder, kill, hidden=set(kills.hidden_names(f"{folder}/saved")))
        return f"killed: {kill}: loads save {which + 1}", wrong

    def alone(self, chance: random.Random) -> tuple[str, str]:
        """Kill ranks during a save into a new folder."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return self.kill(chance, folder)


if __name__ == "__main__":
    sys.exit(running.run(__doc__, 40, lambda pool: [Kills(pool).alone]))
