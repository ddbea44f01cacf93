# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs DeepSpeed's own tests, on any tree and with any classes, and tells what each comes to."""
