# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism with sharded gradients and parameters."""
