# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: programs at the top, what they share in ``lib``, what they have found in ``results``."""
