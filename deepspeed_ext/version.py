# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The version of these features, which come as a package, or inside a fork of DeepSpeed."""

__version__ = "0.1.0"
