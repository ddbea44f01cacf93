# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoCo: sends gradients between groups in 4 bits, with error feedback: errors of one step are added to the next."""
