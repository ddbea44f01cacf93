# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules that run in the processes of DeepSpeed's tests, which import them by their own names, of no package."""
