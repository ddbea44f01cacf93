# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 modules of many small parameters, fetched as one unit."""
