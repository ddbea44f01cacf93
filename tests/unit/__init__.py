# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Tests of the package, in folders of the same names; of frameworks, the fork, scripts and the harness."""
