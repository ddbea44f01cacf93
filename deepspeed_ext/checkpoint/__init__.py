# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in DeepSpeed's layout that are replaced as a whole, checked before they are used, and load anywhere."""
