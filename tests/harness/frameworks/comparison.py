# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares a run under a framework with stock DeepSpeed's.

This module imports neither torch nor a framework: it serves the process that runs pytest, too.
"""

import importlib.util
from typing import NamedTuple

import pytest


class Row(NamedTuple):
    """The distance of a run under a framework from stock DeepSpeed's under the same framework."""

    strategy: str  # that ran
    losses: float  # largest difference, relative to stock's largest loss
    weights: float  # relative to stock's largest weight
    moved: float  # how far stock training moved the weights, relative as well
    replicas_equal: bool
    resumed: bool | None = None  # whether a resumed run ended with the same bits; None if there was none


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip the tests of a module where one of these packages is not installed. None is imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def check(
    rows: list[Row], strategy: str, losses: float = 1e-6, weights: float = 1e-5, resumed: bool | None = None
) -> None:
    """Check that all ranks ran the strategy and ended where stock did.

    The bounds are far above fp32 rounding, and far below the effect of an error in any gradient.
    """
    for row in rows:
        assert row.strategy == strategy and row.resumed is resumed, row
        assert row.moved > 0.01, row
        assert row.losses <= losses and row.weights <= weights, row
        assert row.replicas_equal, row
