# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs the checks that take too long for every change: at night, and before a release.

    python -m tests.campaigns.deep           all parts, one after the other
    python -m tests.campaigns.deep fuzz      one of them

Each guarantee of a page has a test in the first tier, ``scripts/test``; this searches for other faults. Exit status 1
if a part fails; all parts run nevertheless.
"""

import argparse
import subprocess
import sys
import time
from typing import NamedTuple

from scripts import ROOT


class Part(NamedTuple):
    """A part: its purpose, and its command."""

    what: str
    command: tuple[str, ...]


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *arguments)


PARTS = {
    "rows": Part("all rows of tables, and all cases that another case stands for", _python("pytest", "-m", "deep")),
    "fork": Part("the quick tests on the fork, in a new environment", _python("scripts.fork.series", "test")),
    "fuzz": Part("ten minutes of the fuzzer", _python("tests.campaigns.fuzz", "--minutes", "10")),
    "mixtures": Part("mixtures of experts that people train, beside stock", _python("tests.campaigns.mixtures")),
    "saves": Part("20 minutes of faults in saves", _python("tests.campaigns.save_faults", "--minutes", "20")),
    "soak": Part("2,000 steps with everything switched on", _python("tests.campaigns.soak")),
    "mutants": Part("an hour of changes that tests must find", _python("tests.campaigns.mutants", "--minutes", "60")),
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/test deep", description=__doc__, formatter_class=raw)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    chosen = parser.parse_args().parts or list(PARTS)
    rows = []
    for name in chosen:
        print(f"==> {name}: {PARTS[name].what}", flush=True)
        begin = time.monotonic()
        status = subprocess.run(PARTS[name].command, cwd=ROOT, check=False).returncode
        outcome = "passed" if status == 0 else f"FAILED ({status})"
        rows.append(f"{name:<12}{outcome:<12}{time.monotonic() - begin:7.0f} s")
        if status != 0:
            print(f"==> {name} failed with status {status}", flush=True)
    print("\n".join(rows))
    sys.exit(any("FAILED" in row for row in rows))


if __name__ == "__main__":
    main()
