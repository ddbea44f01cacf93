# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Starts and ends several ranks on this machine, with networks of a limited rate between them."""
