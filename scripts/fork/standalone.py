# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The fixes at the beginning of the series: each applies to DeepSpeed alone, with tests that fail without it."""

import shutil
from collections import Counter
from pathlib import Path

from scripts.fork.deepspeed_source import WORK, Failed, git, importable, requirement, unpack
from scripts.fork.patch_mails import ALONE, Mail
from scripts.fork.patched_tree import apply, import_problems
from scripts.fork.upstream import suite
from scripts.fork.upstream.outcomes import FAILED, PASSED, Outcome

_TESTS = "tests/"  # of DeepSpeed's repository; its source distribution has none
_CLONE = "git clone --depth 1 https://github.com/deepspeedai/DeepSpeed"
_LIMIT = 900.0  # seconds for a test: the first one on a machine compiles an operator


def fixes(mails: list[Mail]) -> list[Mail]:
    """Return the patches that apply alone."""
    return [mail for mail in mails if mail.tests]


def chosen(mails: list[Mail], number: int) -> Mail:
    """Return a fix, given the number at the beginning of its file's name.

    Raises:
        Failed: there is no such patch, or it needs others.
    """
    found = [mail for mail in mails if mail.path.name.startswith(f"{number:04}-")]
    numbers = ", ".join(str(int(mail.path.name[:4])) for mail in fixes(mails))
    if not found:
        raise Failed(f"expected the number of a fix that applies alone ({numbers}), got {number}")
    if not found[0].tests:
        raise Failed(f"{found[0].path.name} needs the patches before it; these apply alone: {numbers}")
    return found[0]


def problems(mails: list[Mail], tree: Path, do_import: bool = True) -> list[str]:
    """Return what does not hold of the fixes: they come first, and each applies alone, brings its tests, and leaves a
    tree that can be imported.

    Args:
        mails: of the whole series.
        tree: as ``unpack`` makes it; whatever has been applied to it is left aside.
        do_import: whether to look at the last of these, which takes some seconds for each.
    """
    alone = fixes(mails)
    late = [mail for mail in alone if mail not in mails[: len(alone)]]
    found = [f"{mail.path.name}: a fix that applies alone comes after patches that do not" for mail in late]
    for mail in alone:
        git(tree, "checkout", "--quiet", "--force", "--detach", "base")
        try:
            apply(tree, mail)
        except Failed as failed:
            git(tree, "am", "--abort")
            found.append(f"{mail.path.name} does not apply alone: {failed}")
            continue
        found += [
            f"{mail.path.name}: {ALONE} {name} is none of its files under {_TESTS}"
            for name in mail.tests
            if not (name.startswith(_TESTS) and (tree / name).is_file())
        ]
        found += import_problems(importable(tree), mail) if do_import else []
    return found


def test(mail: Mail, checkout: Path | None) -> bool:
    """Run a fix's tests on DeepSpeed without it and with it alone, and print what they come to.

    Args:
        mail: the fix.
        checkout: of DeepSpeed, which has what its tests are made of.

    Returns:
        Whether some fail without it and none with it.

    Raises:
        Failed: they cannot be run.
    """
    if checkout is None:
        raise Failed(f"expected --checkout DIR, a checkout of DeepSpeed for what tests are made of: {_CLONE}")
    work = WORK / "only"
    tree = unpack(requirement().version, work / "tree")
    apply(tree, mail)
    try:
        tests = suite.Suite.of(checkout.resolve(), work, limit=_LIMIT, extra=importable(tree))
        for name in mail.tests:
            target = tests.tests / name.removeprefix(_TESTS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, target)
        print(f"{mail.path.name[:4]} {mail.subject}")
        git(tree, "checkout", "--quiet", "--detach", "base")
        without = _report("without it", _outcomes(tests, mail))
        git(tree, "checkout", "--quiet", "main")
        alone = _report("with it alone", _outcomes(tests, mail))
    except suite.Failed as failed:
        raise Failed(str(failed)) from failed
    return shows(without, alone)


def shows(without: set[str], alone: set[str]) -> bool:
    """Whether tests show what a fix does, given the kinds of outcomes without it and with it: all ran, some failed
    without it, and none with it."""
    return FAILED in without and without <= {PASSED, FAILED} and alone == {PASSED}


def _outcomes(tests: suite.Suite, mail: Mail) -> list[Outcome]:
    names = [name.removeprefix(_TESTS) for name in mail.tests]
    collected, uncollected = tests.collect(names)
    if uncollected:
        raise Failed("".join(f"{file} cannot be imported: {text}" for file, text in uncollected.items()))
    found: dict[str, Outcome] = {}
    tests.run(collected, suite.Side(), found.update)
    return list(found.values())


def _report(when: str, outcomes: list[Outcome]) -> set[str]:
    """Print what tests came to, with one reason of those that did not pass; return which kinds there were."""
    counted = Counter(outcome.kind for outcome in outcomes)
    print(f"  {when}: {', '.join(f'{number} {kind}' for kind, number in sorted(counted.items()))}", flush=True)
    for cause, number in Counter(outcome.cause for outcome in outcomes if outcome.kind != PASSED).most_common():
        print(f"    {number}: {cause}")
    return set(counted)
