# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The project's claims about GPUs, the experiments that settle each claim, and the file of verdicts."""

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.campaigns.gpu.runs import FAILED, NOT_RUN, PASSED, Outcome

HOLDS, FAILS, OPEN = "holds", "does not hold", "not settled"
TABLE = Path("tests", "campaigns", "gpu", "status.csv")  # of all verdicts; rows are appended
COLUMNS = ("date", "device", "versions", "commit", "claim", "verdict", "experiments")
_LINE = re.compile(r"(?m)^(\*\*Status:\*\* [^;]*; )(?:nothing has run on a GPU yet|on a GPU .*)\.$")

# A claim, and the experiments that all must pass. Those that only measure, T8B and T9, settle none.
CLAIMS = (
    ("CUDA kernels give the bits of the reference and of the CPU's kernels", ("T0", "T8A")),
    ("A buffer is read only when what fills it is complete, on any stream", ("T1", "T2", "T3", "T3B")),
    ("All strategies match stock DeepSpeed on a GPU", ("T6", "T10")),
    ("What is saved beside the training on a GPU is what is saved at once", ("T11",)),
    ("A report changes nothing that is trained on a GPU, and the doctor accepts a sound one", ("T12",)),
    ("Models with experts match stock DeepSpeed on a GPU", ("T13",)),
    ("The strategies run over NCCL", ("T7",)),
    ("The host waits for the device no more often than is written down", ("T5",)),
    ("Communication overlaps with computation", ("T4",)),
    ("On a GPU whose ranks share an emulated network, methods train alike and send the formulas' bytes", ("T14",)),
)


class Verdict(NamedTuple):
    claim: str
    kind: str  # holds, does not hold, not settled
    experiments: str  # and what each came to


def verdicts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Return the verdict on each claim; an outcome that did not end, or checked nothing, settles nothing."""
    # Without a check nothing could have failed: figures alone show only that the program has ended.
    kinds = {one.name: one.kind if one.checks or one.kind != PASSED else "checked nothing" for one in outcomes}
    results = []
    for claim, names in CLAIMS:
        came = [kinds.get(name, NOT_RUN) for name in names]
        kind = FAILS if FAILED in came else HOLDS if set(came) == {PASSED} else OPEN
        messages = ", ".join(f"{name} {kind}" for name, kind in zip(names, came, strict=True))
        results.append(Verdict(claim, kind, messages))
    return results


def sentence(about: Mapping[str, str], found: Sequence[Verdict]) -> str:
    date, counts = about["date"][:10], Counter(item.kind for item in found)
    remaining = [(counts[FAILS], "failed"), (counts[OPEN], "inconclusive")]
    rest = "".join(f", {count} {outcome}" for count, outcome in remaining if count)
    confirmed = f"{counts[HOLDS]} of {len(found)} claims were confirmed{rest}"
    return f"on a GPU ({about['device']}, {date}) {confirmed}, [details]({TABLE.parent.as_posix()}/README.md)"


def write(root: Path, about: Mapping[str, str], found: Sequence[Verdict]) -> None:
    """Append the verdicts on all claims to the table, and say in the README of a root how many hold; ValueError if
    that has no line of the status. ``about`` has date, device, versions and commit."""
    table, readme = root / TABLE, root / "README.md"
    text, count = _LINE.subn(lambda line: f"{line[1]}{sentence(about, found)}.", readme.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"expected one line of the status in {readme}, got {count}")
    fresh = not table.exists()
    with table.open("a", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if fresh:
            rows.writerow(COLUMNS)
        rows.writerows([*(about[name] for name in COLUMNS[:4]), *item] for item in found)
    readme.write_text(text, encoding="utf-8")
