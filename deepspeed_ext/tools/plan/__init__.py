# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predictions on the command line: ``python -m deepspeed_ext plan``."""
