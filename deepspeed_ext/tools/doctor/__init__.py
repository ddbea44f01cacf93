# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext doctor``: what is wrong with the nodes of a launch, found on the nodes themselves."""
