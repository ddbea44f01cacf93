# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoCo: gradients cross between groups in 4 bits, with what was lost added to the next step's."""
