# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains, and makes saves fail: full, failing, and slow disks, killed ranks and writers, damaged files, wrong clocks.

Each case continues one of several trainings, in folders with files of other programs. After each fault, the newest
complete save must load bit-identically on all ranks, or an error must name the damaged file. The next save must
succeed and leave nothing behind, and files of other programs must be as they were. Ranks must end a case within 90 s.

Exit status 0 if that held for all cases, 1 if not.
"""

import argparse
import contextlib
import io
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.harness import save_faults
from tests.harness.ranks import RankPool, prepare_environment
from tests.harness.save_faults import KINDS, Fault
from tests.perf.lib.records import report

RECOVERED, REFUSED, OTHER = "recovered", "refused", "other"  # from the newest complete save; by name; must be 0
_TAGS = 4  # that remain


def run(pool: RankPool, folder: Path, fault: Fault) -> tuple[str, bool, str]:
    """Run a case; return its outcome, whether the fault happened, and messages."""
    base = folder / f"{fault.strategy} {fault.save}"
    base.mkdir(exist_ok=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # pools print what ranks have logged
            outcomes, wrong = save_faults.run(pool, base, fault)
    except Exception:
        outcomes, wrong = [], traceback.format_exc(limit=-1)
    if wrong:
        shutil.move(base, f"{base} {fault.seed}")  # to be looked at; the next case begins a new training
        return OTHER, True, f"WRONG: {wrong}"
    tags = sorted((base / "saved").glob("step*"), key=lambda path: path.stat().st_mtime)
    for tag in tags[:-_TAGS]:
        shutil.rmtree(tag)
    fired = KINDS[fault.kind].ends or any(outcome.fired for outcome in outcomes)
    message = outcomes[0].refused or outcomes[0].error or f"step {outcomes[0].found}"
    return REFUSED if outcomes[0].refused else RECOVERED, fired, message.splitlines()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=[*KINDS], default=[name for name in KINDS if name != "none"])
    parser.add_argument("--csv", type=Path, help="to which the table is appended")
    provided = parser.parse_args()
    prepare_environment()
    pool, chance, begin = RankPool(), random.Random(provided.seed), time.monotonic()
    counts, longest, order = Counter[tuple[str, str]](), Counter[str](), list[str]()
    folder = Path(tempfile.mkdtemp(prefix="save-faults-"))
    while time.monotonic() < begin + provided.minutes * 60:
        order = order or chance.sample(provided.only, len(provided.only))
        fault, start = save_faults.draw(chance, order.pop()), time.monotonic()
        outcome, fired, message = run(pool, folder, fault)
        seconds = time.monotonic() - start
        if fired:
            counts[fault.kind, outcome] += 1
            longest[fault.kind] = max(longest[fault.kind], seconds)
        print(f"{seconds:5.1f} s  {fault}{'' if fired else ' (not reached)'}: {message}", flush=True)
    pool.close()
    rows = []
    for kind in provided.only:
        numbers = {outcome: counts[kind, outcome] for outcome in (RECOVERED, REFUSED, OTHER)}
        rows.append(
            {
                "fault": kind,
                "injected": sum(numbers.values()),
                **numbers,
                "longest": longest[kind],
                "seed": provided.seed,
            }
        )
    report(rows, provided.csv)
    wrong = sum(number for (_, outcome), number in counts.items() if outcome == OTHER)
    if wrong:
        print(f"the folders of {wrong} cases are in {folder}")
    else:
        shutil.rmtree(folder)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
