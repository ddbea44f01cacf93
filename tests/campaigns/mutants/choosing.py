# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which changes are made: drawn at random, of each room as many as its lines call for."""

import random
from collections import Counter
from pathlib import Path

from scripts import ROOT
from tests.campaigns.mutants import cpp, python
from tests.campaigns.mutants.mutant import Mutant, room_of

LEAST = 3  # of a room, however small
# Of csrc: what runs without a GPU.
CPU_KERNELS = ("block.h", "cpu_kernels.h", "cpu_vectors.h", "jobs.h", "loco_cpu.cpp", "lossless.h", "lossless_cpu.cpp")


def sources() -> list[Path]:
    """The files that are changed, in the repository: all of the package, and the kernels for the CPU."""
    package = sorted((ROOT / "deepspeed_ext").rglob("*.py"))
    return [path.relative_to(ROOT) for path in (*package, *(ROOT / "csrc" / "loco" / name for name in CPU_KERNELS))]


def changes() -> list[Mutant]:
    """All changes that can be made, in a fixed order."""
    return [one for path in sources() for one in (python if path.suffix == ".py" else cpp).changes(path)]


def shares(number: int) -> Counter[str]:
    """How many changes each room gets, by its lines; at least ``LEAST``, so there may be more than ``number``."""
    lines: Counter[str] = Counter()
    for path in sources():
        lines[room_of(path)] += len((ROOT / path).read_bytes().splitlines())
    whole = sum(lines.values())
    return Counter({room: max(LEAST, round(number * count / whole)) for room, count in lines.items()})


def drawn(number: int, seed: int, rooms: tuple[str, ...] = ()) -> list[Mutant]:
    """Choose changes, of all rooms in turn: whoever stops early has seen each.

    Args:
        number: of all rooms together.
        seed: of the choice.
        rooms: only these, if any.
    """
    of_room: dict[str, list[Mutant]] = {}
    for one in changes():
        of_room.setdefault(one.room, []).append(one)
    found = []
    for room, count in sorted(shares(number).items()):
        if (not rooms or room in rooms) and room in of_room:
            found += random.Random(f"{seed} {room}").sample(of_room[room], min(count, len(of_room[room])))
    random.Random(seed).shuffle(found)
    return found
