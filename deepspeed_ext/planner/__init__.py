# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which strategy to use: what each costs in memory, bytes and time, from link rates that are given or measured."""
