# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Model states with p = I or G: the parts of a stage-3 optimizer."""
