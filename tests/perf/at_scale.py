# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicts 7B and 65B models on nodes of 8 GPUs, without measurements.

    python -m tests.perf.at_scale                      # the tables of results/at_scale.md
    python -m tests.perf.at_scale --as-in-the-paper    # those of results/paper.md

Exit status 1 if more than three predicted ratios are far from the published ones, otherwise 0.
"""

import argparse
import sys

from tests.perf import tables
from tests.perf.lib import paper
from tests.perf.lib.records import markdown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as-in-the-paper", action="store_true", help="in the paper's setting, at a fitted rate")
    start = "paper" if parser.parse_args().as_in_the_paper else "at-scale"
    for name in (name for name in tables.TABLES if name.startswith(start)):
        print(f"{name}\n\n{markdown(tables.TABLES[name]())}")
    far = [miss for miss in paper.misses(paper.predicted_ratios(paper.fitted())) if miss > paper.NEAR]
    return int(start == "paper" and len(far) > 3)


if __name__ == "__main__":
    sys.exit(main())
