# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Digests of trained weights with every option, so that two commits can be compared bit by bit.

    python -m tests.campaigns.bits --write FILE        at one commit
    python -m tests.campaigns.bits --compare FILE      at another one

Trains every strategy with each set of options of the checker of stream order: LoCo, updates in few bits and without
loss, Muon, experts, offload, overlap, pipelines. Exit status 1 if a digest differs, or if a case is new or missing.
Another machine may have other digests.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORLD = 4


def trained(options: str, names: Sequence[str]) -> dict[str, str]:
    """Train strategies with a set of options; a digest of losses, norms and weights for each."""
    import torch

    from tests.harness import pipelines, stream_cases, training
    from tests.harness.digests import digest

    torch.use_deterministic_algorithms(True)
    given, found = stream_cases.OPTIONS[options], {}
    for name in names:
        if given.pipe is not None:
            run: Any = pipelines.train_pipeline(given.pipe, training.placed(name, 1, **given.zero))
            weights = list(run.weights.values())
        else:
            run = training.train(stream_cases.job_of(options, name), training.placed(name, **given.zero))
            weights = [run.weights]
        found[name] = digest([torch.tensor(run.losses), torch.tensor(run.norms), *weights])
    return found


def digests() -> dict[str, list[str]]:
    """Return the digests of every rank, by the names of their cases."""
    from tests.campaigns import bits  # by the name that ranks know this module by
    from tests.harness import ranks
    from tests.harness.stream_cases import OPTIONS

    ranks.prepare_environment()
    pool, found = ranks.RankPool(), dict[str, list[str]]()
    try:
        for options, given in OPTIONS.items():
            with contextlib.redirect_stdout(io.StringIO()):  # pools print what ranks have logged
                answers = pool(WORLD).run(bits.trained, options, tuple(given.strategies), timeout=600.0)
            found |= {f"{options}: {name}": [one[name] for one in answers] for name in given.strategies}
            print(f"{len(found):4} {options}", file=sys.stderr, flush=True)
    finally:
        pool.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, help="the file to write digests to")
    what.add_argument("--compare", type=Path, help="the file to compare digests with")
    arguments = parser.parse_args()
    before = json.loads(arguments.compare.read_text(encoding="utf-8")) if arguments.compare else {}
    found = digests()
    if arguments.write:
        arguments.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    apart = sorted(case for case in before.keys() | found.keys() if before.get(case) != found.get(case))
    print("\n".join(f"DIFFERS {case}" for case in apart) or f"{len(found)} cases, all bits equal")
    return int(bool(apart))


if __name__ == "__main__":
    sys.exit(main())
