# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of csrc, compiled as C++ and run on the CPU, a fiber for each CUDA thread: see README.md."""
