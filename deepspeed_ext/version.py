# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The version of these features, which come as a package of their own or inside a DeepSpeed."""

__version__ = "0.1.0"
