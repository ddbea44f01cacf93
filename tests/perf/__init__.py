# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: programs at the top, shared code in ``lib``, and their results in ``results``."""
