# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own tests with our optimizers in the place of DeepSpeed's: ``python -m tests.campaigns.upstream``."""
