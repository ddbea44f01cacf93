# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Changes the package in one place at a time, and counts the changes that tests find: ``python -m
tests.campaigns.mutants``."""
