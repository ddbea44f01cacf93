# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What tests share: pools of ranks, models and their training, devices that are not there."""
