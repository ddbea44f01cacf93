# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicts what each strategy costs in memory, bytes and time, from given or measured link rates, and chooses one."""
