# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""All checks, in the order in which they run and are printed: what communicates comes last."""

from torch.distributed import Store

from deepspeed_ext.tools.doctor import (
    clocks,
    compiler,
    environment,
    groups,
    kernels,
    links,
    memory,
    pairs,
    pinned,
    versions,
)
from deepspeed_ext.tools.doctor.check import Check
from deepspeed_ext.tools.doctor.process_group import check_of

ALONE = (
    versions.CHECK,
    environment.CHECK,
    groups.CHECK,
    memory.CHECK,
    pinned.CHECK,
    compiler.CHECK,
    kernels.CHECK,
)
TOGETHER = (links.CHECK, pairs.CHECK, clocks.CHECK)


def all_checks(store: Store) -> tuple[Check, ...]:
    """Return them; process groups are formed over this store."""
    return (*ALONE, check_of(store), *TOGETHER)
