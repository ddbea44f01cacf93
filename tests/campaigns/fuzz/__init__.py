# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A fuzzer that has stock DeepSpeed as its oracle: ``python -m tests.campaigns.fuzz``."""
