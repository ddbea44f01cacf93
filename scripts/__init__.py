# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Programs of this repository: examples, checks, the emulated cluster, and the patch series."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository
