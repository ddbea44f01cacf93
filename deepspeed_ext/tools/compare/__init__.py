# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Configurations compared on a user's own script: launches, what is measured inside ranks, and the verdict."""
