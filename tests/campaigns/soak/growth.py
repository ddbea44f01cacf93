# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a rank holds after each engine of a long run, and what of it grows. No torch."""

from typing import NamedTuple

from tests.campaigns.fuzz.cases import Case

# What may come on top of the first half's most. Allocators keep what they have had: a few pages, not a trend.
RESIDENT_MB = 12.0


class Sample(NamedTuple):
    """What a rank holds: bytes of tensors, resident megabytes, threads, open files, process groups."""

    tensors: float
    resident_mb: float
    threads: float
    files: float
    groups: float


class Soaked(NamedTuple):
    """A run: samples; whether losses are finite, and replicas the same bits at the end."""

    samples: list[Sample]
    finite: bool
    replicas_equal: bool


def soaked(case: Case, steps: int, anew: int, seed: int) -> Soaked:
    """Samples of a long run; see ``training``."""
    from tests.campaigns.soak.training import soak

    return soak(case, steps, anew, seed)


def growth(samples: list[Sample]) -> list[str]:
    """What the second half of the samples, after a fifth, has more of than the first."""
    settled = samples[len(samples) // 5 :]
    early, late = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    found = []
    for name in Sample._fields:
        before = max(getattr(sample, name) for sample in early)
        after = max(getattr(sample, name) for sample in late)
        # A sample depends on the step before it; if memory grows, the minimum of samples grows, too.
        least, since = (min(getattr(sample, name) for sample in half) for half in (early, late))
        if since > least and after > before + (RESIDENT_MB if name == "resident_mb" else 0):
            found.append(f"{name} grows from {before:,.0f} to {after:,.0f}")
    return found
