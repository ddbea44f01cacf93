# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Long runs with everything switched on, in which nothing may grow: ``python -m tests.campaigns.soak``."""
