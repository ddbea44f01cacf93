# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares configurations on a user's own script: launches, measurements inside ranks, and the verdict."""
