# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoCo: gradients cross between groups in 4 bits, with error feedback: what one step loses is added to the next."""
