# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs of frameworks on top of DeepSpeed, and the table of results."""
