# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests: pools of ranks, models and their training, simulated devices."""
