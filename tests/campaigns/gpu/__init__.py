# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experiments for one GPU, each in a process of its own: ``python -m tests.campaigns.gpu``."""
