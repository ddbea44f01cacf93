# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Of these features, whether they come as a package of their own or inside a DeepSpeed."""

__version__ = "0.1.0"
