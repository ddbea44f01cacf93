# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own unit tests with our optimizers instead of DeepSpeed's.

Runs tests of a checkout of DeepSpeed twice, with the DeepSpeed that is installed: unchanged, and with every
configuration of ZeRO-1, 2 and 3 given the strategy that corresponds to its stage. Prints the tests that pass on stock
and not with ours. A configuration that is refused by a documented refusal counts as refused, not as failed.

Needs a checkout near the installed version (git clone https://github.com/deepspeedai/DeepSpeed), this package with its
development dependencies (pip install -e .[test]), and a C++ compiler for the tests that offload. Tests
that load a checkpoint with another number of ranks need an older pytest, and are errors of stock without it:

  pip install --target DIR 'pytest<8.4'   and then   --extra DIR

Exit status: 0 if every difference is known; 1 if not; 2 if it could not run.
"""

import argparse
import random
import signal
import sys
from collections import Counter
from pathlib import Path

from scripts import ROOT
from tests.campaigns.upstream.known import KNOWN
from tests.campaigns.upstream.outcomes import PASSED, REFUSED, Outcome, counts
from tests.campaigns.upstream.suite import Failed, Side, Suite

# What involves ZeRO, or the engine that makes it.
PATHS = [
    *("unit/runtime/zero", "unit/v1/zero", "unit/checkpoint", "unit/runtime/half_precision", "unit/v1/half_precision"),
    *("unit/runtime/test_autocast.py", "unit/runtime/test_ds_config_dict.py", "unit/runtime/test_ds_config_model.py"),
    *("unit/runtime/test_ds_initialize.py", "unit/runtime/test_lr_schedulers.py"),
    *("unit/runtime/test_multi_output_model.py", "unit/runtime/test_multiple_models.py"),
    *("unit/runtime/test_no_sync_ctxt.py", "unit/runtime/sparse_tensor", "unit/runtime/pipe", "unit/utils"),
    *("unit/model_parallelism/test_autotp_training.py", "unit/model_parallelism/test_tp_plan_e2e.py"),
    *("unit/sequence_parallelism", "unit/ulysses_alst", "unit/v1/moe/test_moe.py"),
]


def summarize(side: Side, stock: dict[str, Outcome], ours: dict[str, Outcome]) -> bool:
    """Print how a side differs from stock; return whether every difference is known. Refusals are documented."""
    print(f"\n{side.name}" + (f", groups of {side.group_size}" if side.group_size else ""))
    print(f"  stock: {counts(stock.values())} of {len(stock)} tests")
    made = sum(outcome.made > 0 for outcome in ours.values())
    print(f"  ours: {counts(ours.values())} of the {len(ours)} that pass on stock; {made} made an optimizer of ours")
    registered, unknown = Counter[str](), []
    for test, outcome in sorted(ours.items()):
        if outcome.kind == REFUSED:
            registered[f"refused: {outcome.text}"] += 1
        elif outcome.kind != PASSED:
            reason = next((row.reason for row in KNOWN if row.explains(test, outcome, side.name)), None)
            registered.update([f"known: {reason}"] if reason else [])
            unknown += [] if reason else [f"  NOT KNOWN: {outcome.kind} {test}: {outcome.cause}"]
    print(*(f"  {number} {reason}" for reason, number in registered.most_common()), *unknown, sep="\n")
    print(f"  {len(unknown)} differences that are not known")
    return not unknown


def _strategies(text: str) -> tuple[str, ...]:
    from deepspeed_ext.strategy import STRATEGIES, plain_name

    names = tuple(map(plain_name, text.upper().split(",")))
    if [STRATEGIES[name].stage == 3 for name in names if name in STRATEGIES] != [False, False, True]:
        raise argparse.ArgumentTypeError(f"expected a strategy for each of the stages 1, 2 and 3, got {text!r}")
    return names


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.parent}", description=__doc__, formatter_class=raw)
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument("tests", nargs="*", default=PATHS, help="files, folders or ids below tests (unit/...)")
    parser.add_argument(
        "--strategies",
        type=_strategies,
        default=("NNG", "NGG", "GGG"),
        metavar="S1,S2,S3",
        help="for the stages 1, 2 and 3 (default: NNG,NGG,GGG; in groups: NIG,NIG,IIG)",
    )
    parser.add_argument("--group-size", type=int, help="ranks in a group, where that divides the ranks")
    parser.add_argument("--sample", type=int, help="number of tests, drawn at random (default: all)")
    parser.add_argument("--extra", type=Path, metavar="DIR", help="packages that come before the environment's")
    return parser.parse_intermixed_args(arguments)


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))  # and what it runs
    side = Side(args.strategies, args.group_size)
    try:
        suite = Suite.of(args.checkout, ROOT / "build" / "upstream", extra=args.extra and args.extra.resolve())
        suite.build()
        collected, uncollected = suite.collect(args.tests)
        for file, text in uncollected.items():
            print(f"cannot be imported: {file}: {Outcome('error', text).cause}")
        tests = sorted(collected)
        if args.sample is not None:
            tests = random.Random(0).sample(tests, min(args.sample, len(tests)))
        print(f"{len(tests)} of {len(collected)} tests", flush=True)
        stock = suite.run(tests, Side())
        ours = suite.run([test for test in tests if stock[test].kind == PASSED], side)
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 2
    return int(not summarize(side, stock, ours))


if __name__ == "__main__":
    sys.exit(main())
