# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ranks are asked to run. The process that asks imports this module, and so no torch."""

from tests.campaigns.fuzz.cases import Case
from tests.campaigns.soak.growth import Soaked


def soaked(case: Case, steps: int, anew: int, seed: int) -> Soaked:
    """Samples of a long run; see ``training``."""
    from tests.campaigns.soak.training import soak

    return soak(case, steps, anew, seed)
