# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext doctor``: finds problems of a launch's nodes by checks on the nodes themselves."""
