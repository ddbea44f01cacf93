# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m deepspeed_ext plan``: predictions of all strategies."""
