# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Programs that train on this machine and hold what they measure against stock DeepSpeed and the formulas."""
