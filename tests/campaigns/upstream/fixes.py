# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The tests of the fixes in ``patches/``, on DeepSpeed without each fix and with it alone.

    scripts/patches test --checkout DIR [N ...]

The tests of a fix must fail without it and pass with it. Each takes minutes, since DeepSpeed's tests start their ranks
anew. Exit status 1 if a fix is not shown by its tests.
"""

import argparse
import shutil
import sys
from collections import Counter
from pathlib import Path

from scripts.fork.deepspeed_source import WORK, git, importable, requirement, unpack
from scripts.fork.patch_mails import Mail, fixes
from scripts.fork.patched_tree import apply
from tests.campaigns.upstream.outcomes import FAILED, PASSED, counts
from tests.campaigns.upstream.suite import Failed, Side, Suite

_LIMIT = 900.0  # seconds for a test: the first one on a machine compiles an operator


def check(mail: Mail, checkout: Path) -> bool:
    """Run the tests of a fix without it and with it, and print the outcomes; return whether all ran, some failed
    without the fix, and none with it. Failed if they cannot be run."""
    work = WORK / "fixes"
    tree = unpack(requirement().version, work / "tree")
    apply(tree, mail)
    suite = Suite.of(checkout.resolve(), work, limit=_LIMIT, extra=importable(tree))
    names = [name.removeprefix("tests/") for name in mail.tests]
    for name in names:
        (suite.tests / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / "tests" / name, suite.tests / name)
    print(f"{mail.path.name[:4]} {mail.subject}")
    git(tree, "checkout", "--quiet", "--detach", "base")
    without = _kinds("without it", suite, names)
    git(tree, "checkout", "--quiet", "main")
    return FAILED in without and without <= {PASSED, FAILED} and _kinds("with it alone", suite, names) == {PASSED}


def _kinds(when: str, suite: Suite, names: list[str]) -> set[str]:
    """Run tests, and print their outcomes and the causes of failures; return the kinds of outcomes."""
    collected, uncollected = suite.collect(names)
    if uncollected:
        raise Failed("".join(f"{file} cannot be imported: {text}" for file, text in uncollected.items()))
    outcomes = suite.run(collected, Side())
    print(f"  {when}: {counts(outcomes.values())}", flush=True)
    causes = Counter(outcome.cause for outcome in outcomes.values() if outcome.kind != PASSED)
    print(*(f"    {number}: {cause}\n" for cause, number in causes.most_common()), sep="", end="")
    return {outcome.kind for outcome in outcomes.values()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests of the fixes without each fix and with it.")
    parser.add_argument("checkout", type=Path, help="a git clone of DeepSpeed")
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="of fixes; default: all")
    args = parser.parse_args()
    registered = {int(mail.path.name[:4]): mail for mail in fixes()}
    if unknown := set(args.numbers) - set(registered):
        parser.error(f"expected numbers of fixes, some of {sorted(registered)}, got {sorted(unknown)}")
    try:
        printed = [check(registered[number], args.checkout) for number in args.numbers or registered]
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 2
    return int(not all(printed))


if __name__ == "__main__":
    sys.exit(main())
