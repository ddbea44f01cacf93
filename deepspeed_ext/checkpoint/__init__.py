# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in DeepSpeed's layout: replaced atomically, checked before a load, and loadable by any strategy."""
