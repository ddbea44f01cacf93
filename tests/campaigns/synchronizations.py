# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Print how often the host waits for the device in micro-steps 5 to 10 of each strategy, on a simulated device.

Example:
    python -m tests.campaigns.synchronizations --dtype bf16 --places NIG,IIG
"""

import argparse
import re
from collections import Counter
from typing import Any

from tests.harness import ranks
from tests.harness.parity_table import PARTITIONED, REPLICATED

ALL = ",".join((*REPLICATED, *PARTITIONED))
WRAPPERS = re.compile(r"^(utils/|accelerator/)")  # who waits is not told by them


def counts(name: str, zero: dict[str, Any], changed: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Run on each rank; by what is waited for, and the two innermost places."""
    from tests.harness.host_synchronizations import host_synchronizations

    by_place: Counter[tuple[str, str]] = Counter()
    for one, count in host_synchronizations(name, zero, **changed).all.items():
        places = one.where.split(" < ")
        told = [place for place in places if not WRAPPERS.match(place)] or places
        by_place[one.what, " < ".join(told[:2])] += count
    return by_place


def main() -> None:
    """Print a table; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=ALL, help="names, or stages, with commas")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument(
        "--timer", action="store_true", help="have DeepSpeed's throughput timer synchronize, as without a strategy"
    )
    parser.add_argument("--overlap", choices=("true", "false"), help="overlap_comm; unset if left out")
    parser.add_argument("--places", default="", help="strategies whose places are shown, with commas")
    given = parser.parse_args()
    zero = {} if given.overlap is None else {"overlap_comm": given.overlap == "true"}
    changed: dict[str, Any] = {"dtype": given.dtype}
    if given.timer:
        changed["config"] = {"timers": {"throughput": {"synchronized": True}}}
    ranks.prepare_environment()
    pool = ranks.RankPool()
    try:
        rows = {name: pool(4).run(counts, name, zero, changed)[0] for name in given.strategies.split(",")}
    finally:
        pool.close()
    kinds = sorted({what for row in rows.values() for what, _ in row})
    print("| strategy |" + "".join(f" {kind} |" for kind in kinds) + " all |")
    print("|---|" + "---|" * (len(kinds) + 1))
    for name, row in rows.items():
        each = [sum(count for (what, _), count in row.items() if what == kind) for kind in kinds]
        print(f"| {name} |" + "".join(f" {count} |" for count in each) + f" {sum(each)} |")
    for name in filter(None, given.places.split(",")):
        print(f"\n{name}:")
        for (what, where), count in rows[name].most_common():
            print(f"    {count:3} {what} at {where}")


if __name__ == "__main__":
    main()
