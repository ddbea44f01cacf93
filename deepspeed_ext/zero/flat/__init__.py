# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Model states with p = N: the parts of a stage-1/2 optimizer."""
