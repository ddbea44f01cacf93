# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training scripts to copy. None of them imports deepspeed_ext; their configuration files ask for it."""
