# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A device that uses host memory, but that torch and DeepSpeed take for a device of its own."""
