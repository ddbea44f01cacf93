# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels, emulated, in many cases that are drawn: ``python -m tests.campaigns.kernels``."""
