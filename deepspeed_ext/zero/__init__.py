# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO optimizers whose placements come from the strategy table."""
