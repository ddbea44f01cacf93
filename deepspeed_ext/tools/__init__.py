# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``python -m deepspeed_ext`` runs."""
