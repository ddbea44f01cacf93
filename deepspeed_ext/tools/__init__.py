# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Commands of ``python -m deepspeed_ext``."""
