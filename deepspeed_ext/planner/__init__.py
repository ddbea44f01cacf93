# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the memory, bytes and time of each strategy from given or measured link rates, and chooses a strategy."""
