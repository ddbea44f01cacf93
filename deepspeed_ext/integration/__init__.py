# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Integration of our classes into DeepSpeed: activation, the table of patches, the patcher, and the seams."""
