# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How our classes get into DeepSpeed: activation, the table of patches, the patcher, and the seams."""
