# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism with gradients and parameters that are sharded."""
